//! Figure 4 (c): duration of wait-before-stop over the number of partners. Each partner is a separate process with one
//! queue pair. All partners share one virtual machine, since there are three machines.

use std::io;
use std::time::Duration;

use godwit_bench::interrupt;
use godwit_testkit::rdma::{
    ALIAS, Bed, Moved, Place, checked_end, clean_up, connected, move_process,
};

use crate::rdma::Plan;
use crate::rdma::breakdown::said;
use crate::rdma::report::Report;
use crate::rdma::waiting::Run;

/// Bytes of a message of `godwit-verbs-client`, and requests in flight on each of its queue pairs.
const MESSAGE: u32 = 1024;
const DEPTH: u32 = 8;
/// Time for which all processes work before the move.
const WORK: Duration = Duration::from_millis(500);

pub(crate) fn turn(bed: &Bed, plan: &Plan, round: u32, report: &mut Report) -> io::Result<()> {
    for &partners in plan.partners {
        interrupt::check()?;
        let mut moved = None;
        let error = one(bed, partners, &mut moved).err();
        clean_up(bed)?;
        let error = error.map(|error| error.to_string());
        println!(
            "wait-before-stop, {partners} partners: {}",
            said(moved.as_ref(), error.as_deref())
        );
        report.waiting.push(Run {
            over: "partners",
            queue_pairs: partners,
            message_bytes: MESSAGE,
            partners,
            round,
            bytes_in_flight: u64::from(partners) * u64::from(MESSAGE) * u64::from(DEPTH),
            wbs_ms: moved.as_ref().map(|moved| moved.wbs_ms),
            blackout_ms: moved.as_ref().map(|moved| moved.blackout_ms),
            error,
        });
        report.save()?;
    }
    Ok(())
}

/// Moves a process with `partners` partners; all of them verify their data.
fn one(bed: &Bed, partners: u32, moved: &mut Option<Moved>) -> io::Result<()> {
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
    *moved = Some(move_process(mover, there, ALIAS, "run/server.log", false)?);
    all[0].1.guest = there;
    std::thread::sleep(WORK);
    there.must("touch /run/verbs-client-ends")?;
    for (name, place) in &all {
        checked_end(*place, &format!("run/{name}.log"))?;
    }
    Ok(())
}
