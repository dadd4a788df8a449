//! Moves of a working program: figure 3, the parts of a blackout over the number of queue pairs, and figure 4, the
//! duration of wait-before-stop over the number of queue pairs, the message size and the number of partners.

use std::io;
use std::time::Duration;

use godwit_testkit::rdma::{
    ALIAS, AtWork, Bed, Moved, Place, Program, Side, checked_end, connected, move_process,
    write_bw, write_bw_through_a_move,
};
use serde_json::{Value, json};

use super::{Bench, role};

/// Parts of a blackout, in chronological order. `rest` is the remainder: waiting for the nodes.
pub(super) const PARTS: [&str; 8] = [
    "wait_before_stop",
    "dump_rdma",
    "dump_others",
    "transfer",
    "full_restore",
    "restore_rdma",
    "resume",
    "rest",
];

/// Requests in flight on each queue pair, as in the paper.
const DEPTH: u32 = 64;
/// Bytes of a message while the number of queue pairs varies, as in the paper.
const MESSAGE: u32 = 4096;
/// Queue pairs while the message size varies.
const PAIRS: u32 = 4;
/// Upper limits of messages and bytes of a run; the smaller one applies. The run must still be at work when the process
/// moves.
const MESSAGES: u32 = 24_000;
const BYTES: u32 = 256 << 20;
/// Bytes of a message of `godwit-verbs-client`, and requests in flight on each of its queue pairs.
const CLIENT_MESSAGE: u32 = 1024;
const CLIENT_DEPTH: u32 = 8;
/// Time for which all processes work before the move.
const WORK: Duration = Duration::from_millis(500);

/// A measurement of wait-before-stop.
pub(super) struct Waiting {
    /// Name of the varied quantity.
    over: &'static str,
    queue_pairs: u32,
    message_bytes: u32,
    partners: u32,
    depth: u32,
}

impl Waiting {
    pub(super) const KEYS: &str = "over, queue_pairs, message_bytes, partners";

    fn run(&self) -> Value {
        let bytes = u64::from(self.queue_pairs) * u64::from(self.message_bytes);
        json!({
            "over": self.over, "queue_pairs": self.queue_pairs, "message_bytes": self.message_bytes,
            "partners": self.partners, "bytes_in_flight": bytes * u64::from(self.depth),
        })
    }
}

impl Bench<'_> {
    /// Moves either side with each number of queue pairs, without pre-setup and with it.
    pub(super) fn breakdown(&mut self) -> io::Result<()> {
        for &qps in &self.plan.qps {
            for &side in self.plan.sides {
                for pre_setup in self.ways() {
                    let run = json!({"side": role(side), "qps": qps, "pre_setup": pre_setup});
                    self.measure("breakdown", run, |bed, run| {
                        let program = write_bw_through_a_move(qps);
                        add(run, &move_one(bed, &program, side, pre_setup)?);
                        Ok(())
                    })?;
                }
            }
        }
        Ok(())
    }

    /// Moves a sender with each number of queue pairs, and with each message size.
    pub(super) fn waiting(&mut self) -> io::Result<()> {
        let pairs = self
            .plan
            .waiting_qps
            .iter()
            .map(|qps| ("queue_pairs", *qps, MESSAGE));
        let sizes = self
            .plan
            .message_bytes
            .iter()
            .map(|bytes| ("message_bytes", PAIRS, *bytes));
        for (over, queue_pairs, message_bytes) in pairs.chain(sizes) {
            let waiting = Waiting {
                over,
                queue_pairs,
                message_bytes,
                partners: 1,
                depth: DEPTH,
            };
            self.measure("waiting", waiting.run(), |bed, run| {
                let program = program(queue_pairs, message_bytes);
                add(run, &move_one(bed, &program, Side::Client, false)?);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Moves a process with each number of partners. Each partner is a separate process with one queue pair. All
    /// partners share one virtual machine, since there are three machines.
    pub(super) fn partners(&mut self) -> io::Result<()> {
        for &partners in self.plan.partners {
            let waiting = Waiting {
                over: "partners",
                queue_pairs: partners,
                message_bytes: CLIENT_MESSAGE,
                partners,
                depth: CLIENT_DEPTH,
            };
            self.measure("waiting", waiting.run(), |bed, run| {
                add(run, &move_among(bed, partners)?);
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Adds the figures of a move to the run, the parts of the blackout among them.
fn add(run: &mut Value, moved: &Moved) {
    for (part, ms) in PARTS.iter().zip(parts(moved)) {
        run[*part] = ms.into();
    }
    run["wbs_ms"] = moved.wbs_ms.into();
    run["blackout_ms"] = moved.blackout_ms.into();
    if let Some(ms) = moved.pre_setup_ms {
        run["pre_setup_ms"] = ms.into();
    }
    run["moved"] = json!(moved);
}

/// Returns the parts of a move's blackout in milliseconds.
fn parts(moved: &Moved) -> [f64; 8] {
    let all = &moved.breakdown_ms;
    let known = [
        moved.wbs_ms,
        all.dump_rdma,
        all.dump_others,
        all.transfer,
        all.full_restore,
        all.restore_rdma,
        all.resume,
    ];
    let rest = (moved.blackout_ms - known.iter().sum::<f64>()).max(0.0);
    let [wait, objects, others, transfer, restore, made, resume] = known;
    [wait, objects, others, transfer, restore, made, resume, rest]
}

fn program(qps: u32, bytes: u32) -> Program {
    let messages = (MESSAGES.min(BYTES / bytes) / qps).max(2 * DEPTH);
    write_bw(qps, DEPTH, bytes, messages)
}

/// Moves one side of the program while it works, and waits until both sides end with success.
fn move_one(bed: &Bed, program: &Program, side: Side, pre_setup: bool) -> io::Result<Moved> {
    let there = bed.guest(2);
    let at_work = AtWork::start(bed, program, side)?;
    let moved = move_process(at_work.mover, there, ALIAS, at_work.log, pre_setup)?;
    at_work.ended(there)?;
    Ok(moved)
}

/// Moves a process with `partners` partners; all of them verify their data.
fn move_among(bed: &Bed, partners: u32) -> io::Result<Moved> {
    let (source, there, fixed) = (bed.guest(1), bed.guest(2), bed.guest(3));
    let alias = ALIAS.split('/').next().unwrap_or(ALIAS);
    source.must(&format!(
        "ip addr add {ALIAS} dev eth0; arping -q -U -c 1 -I eth0 {alias} >/dev/null 2>&1; true"
    ))?;
    let command =
        "env LD_PRELOAD=/opt/godwit/libgodwit_verbs.so godwit-verbs-client --events --pairs 1";
    let mover = Place {
        guest: source,
        pid: source.background("server", &format!("{command} --clients {partners}"))?,
    };
    let mut all = vec![("server".to_owned(), mover)];
    for number in 1..=partners {
        let name = format!("client-{number}");
        let pid = fixed.background(&name, &format!("{command} {alias}"))?;
        all.push((name, Place { guest: fixed, pid }));
    }
    for (_, place) in &all {
        connected(*place)?;
    }
    std::thread::sleep(WORK);
    let moved = move_process(mover, there, ALIAS, "run/server.log", false)?;
    all[0].1.guest = there;
    std::thread::sleep(WORK);
    there.must("touch /run/verbs-client-ends")?;
    for (name, place) in &all {
        checked_end(*place, &format!("run/{name}.log"))?;
    }
    Ok(moved)
}

#[cfg(test)]
mod tests {
    use godwit_testkit::rdma::Breakdown;

    use super::*;

    #[test]
    fn parts_make_up_the_blackout() {
        let moved = Moved {
            blackout_ms: 40.0,
            breakdown_ms: Breakdown {
                dump_rdma: 1.0,
                dump_others: 2.0,
                transfer: 3.0,
                full_restore: 4.0,
                restore_rdma: 10.0,
                resume: 6.0,
            },
            wbs_ms: 5.0,
            ..Moved::default()
        };
        let parts = parts(&moved);
        assert_eq!(parts, [5.0, 1.0, 2.0, 3.0, 4.0, 10.0, 6.0, 9.0]);
        assert_eq!(parts.iter().sum::<f64>(), 40.0);
    }

    #[test]
    fn a_run_is_neither_over_before_it_is_moved_nor_without_end() {
        assert!(program(1, 512).command.ends_with("-n 24000"));
        assert!(program(4, 131_072).command.ends_with("-n 512"));
        // perftest wants more requests than are in flight at once.
        assert!(program(4096, 4096).command.ends_with("-n 128"));
    }
}
