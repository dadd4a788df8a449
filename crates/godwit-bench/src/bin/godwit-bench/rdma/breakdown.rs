//! Figure 3: the parts of a blackout over the number of queue pairs, with pre-setup and without.

use std::io;

use godwit_bench::interrupt;
use godwit_bench::spread::Spread;
use godwit_testkit::rdma::{
    ALIAS, AtWork, Bed, Moved, Program, Side, clean_up, move_process, write_bw_through_a_move,
};
use serde::Serialize;

use crate::rdma::report::Report;
use crate::rdma::{Plan, role};

/// One move.
#[derive(Debug, Serialize)]
pub(crate) struct Run {
    pub(crate) side: &'static str,
    pub(crate) qps: u32,
    pub(crate) pre_setup: bool,
    pub(crate) round: u32,
    /// `None` if the process did not move.
    pub(crate) moved: Option<Moved>,
    pub(crate) error: Option<String>,
}

/// Parts of a blackout, in chronological order. `rest` is the remainder: waiting for the nodes.
pub(crate) const PARTS: [&str; 8] = [
    "wait_before_stop",
    "dump_rdma",
    "dump_others",
    "transfer",
    "full_restore",
    "restore_rdma",
    "resume",
    "rest",
];

/// Returns the parts of a move's blackout in milliseconds.
pub(crate) fn parts(moved: &Moved) -> [f64; 8] {
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

/// All moves of one kind.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) side: &'static str,
    pub(crate) qps: u32,
    pub(crate) pre_setup: bool,
    pub(crate) runs: usize,
    pub(crate) failed: usize,
    pub(crate) blackout_ms: Option<Spread>,
    /// Names and milliseconds, in chronological order.
    pub(crate) parts_ms: Vec<(&'static str, Option<Spread>)>,
    /// Time of the pre-setup, while the process runs.
    pub(crate) pre_setup_ms: Option<Spread>,
}

impl Summary {
    pub(crate) fn all(runs: &[Run]) -> Vec<Self> {
        let mut kinds: Vec<_> = runs
            .iter()
            .map(|run| (run.side, run.qps, run.pre_setup))
            .collect();
        kinds.sort_unstable();
        kinds.dedup();
        let of = |(side, qps, pre_setup)| {
            let same = |run: &&Run| (run.side, run.qps, run.pre_setup) == (side, qps, pre_setup);
            let runs: Vec<&Run> = runs.iter().filter(same).collect();
            let moves: Vec<&Moved> = runs.iter().filter_map(|run| run.moved.as_ref()).collect();
            let spread = |pick: &dyn Fn(&Moved) -> Option<f64>| {
                let values: Vec<f64> = moves.iter().filter_map(|moved| pick(moved)).collect();
                Spread::of(&values)
            };
            Self {
                side,
                qps,
                pre_setup,
                runs: runs.len(),
                failed: runs.iter().filter(|run| run.error.is_some()).count(),
                blackout_ms: spread(&|moved| Some(moved.blackout_ms)),
                parts_ms: (0..PARTS.len())
                    .map(|place| (PARTS[place], spread(&|moved| Some(parts(moved)[place]))))
                    .collect(),
                pre_setup_ms: spread(&|moved| moved.pre_setup_ms),
            }
        };
        kinds.into_iter().map(of).collect()
    }

    /// Returns the median of a part.
    pub(crate) fn part(&self, name: &str) -> Option<f64> {
        let found = self.parts_ms.iter().find(|(part, _)| *part == name)?;
        found.1.map(|spread| spread.median)
    }
}

pub(crate) fn turn(bed: &Bed, plan: &Plan, round: u32, report: &mut Report) -> io::Result<()> {
    for &qps in &plan.qps {
        for &side in plan.sides {
            for pre_setup in [round.is_multiple_of(2), !round.is_multiple_of(2)] {
                interrupt::check()?;
                let mut moved = None;
                let error = one(
                    bed,
                    &write_bw_through_a_move(qps),
                    side,
                    pre_setup,
                    &mut moved,
                )
                .err();
                clean_up(bed)?;
                let run = Run {
                    side: role(side),
                    qps,
                    pre_setup,
                    round,
                    moved,
                    error: error.map(|error| error.to_string()),
                };
                println!(
                    "{:8} {qps:4} queue pairs{}: {}",
                    run.side,
                    if pre_setup { ", pre-setup" } else { "" },
                    said(run.moved.as_ref(), run.error.as_deref())
                );
                report.breakdown.push(run);
                report.save()?;
            }
        }
    }
    Ok(())
}

/// Describes a move for the screen.
pub(crate) fn said(moved: Option<&Moved>, error: Option<&str>) -> String {
    match (moved, error) {
        (_, Some(error)) => format!("FAILED: {error}"),
        (None, None) => "nothing moved".to_owned(),
        (Some(moved), None) => format!(
            "blackout {:.0} ms, wait-before-stop {:.0} ms, restore_rdma {:.1} ms",
            moved.blackout_ms, moved.wbs_ms, moved.breakdown_ms.restore_rdma
        ),
    }
}

/// Moves one side of the program while it works, and waits until both sides end with success.
pub(crate) fn one(
    bed: &Bed,
    program: &Program,
    side: Side,
    pre_setup: bool,
    moved: &mut Option<Moved>,
) -> io::Result<()> {
    let there = bed.guest(2);
    let at_work = AtWork::start(bed, program, side)?;
    *moved = Some(move_process(
        at_work.mover,
        there,
        ALIAS,
        at_work.log,
        pre_setup,
    )?);
    at_work.ended(there)
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_testkit::rdma::Breakdown;

    fn moved(blackout_ms: f64, restore_rdma: f64) -> Moved {
        Moved {
            blackout_ms,
            breakdown_ms: Breakdown {
                dump_rdma: 1.0,
                dump_others: 2.0,
                transfer: 3.0,
                full_restore: 4.0,
                restore_rdma,
                resume: 6.0,
            },
            wbs_ms: 5.0,
            ..Moved::default()
        }
    }

    #[test]
    fn parts_make_up_the_blackout() {
        let parts = parts(&moved(40.0, 10.0));
        assert_eq!(parts, [5.0, 1.0, 2.0, 3.0, 4.0, 10.0, 6.0, 9.0]);
        assert_eq!(parts.iter().sum::<f64>(), 40.0);
    }

    #[test]
    fn moves_of_one_kind_are_taken_together() {
        let run = |pre_setup, moved: Option<Moved>| Run {
            side: "sender",
            qps: 16,
            pre_setup,
            round: 0,
            error: moved.is_none().then(|| "not today".to_owned()),
            moved,
        };
        let runs = [
            run(true, Some(moved(40.0, 1.0))),
            run(false, Some(moved(90.0, 10.0))),
            run(false, Some(moved(110.0, 30.0))),
            run(false, None),
        ];
        let all = Summary::all(&runs);
        assert_eq!(all.len(), 2);
        let without = all.iter().find(|one| !one.pre_setup).unwrap();
        assert_eq!((without.runs, without.failed), (3, 1));
        assert_eq!(without.part("restore_rdma"), Some(20.0));
        assert_eq!(without.blackout_ms.unwrap().most, 110.0);
    }
}
