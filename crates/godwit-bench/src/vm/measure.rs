//! One move of a machine, measured and verified.

use std::io;
use std::time::{Duration, Instant};

use crate::common::cpu::{Meter, Sweep};
use crate::common::{awaited, interrupt};
use godwit_testkit::report::add_fields;
use godwit_testkit::vm::{GuestConsole, GuestLoad, format_image};
use serde_json::{Value, json};

use super::mover::{Machine, Mover};
use crate::suite::noise::await_quiet;
use crate::suite::site::Site;

/// Time between two looks at a move.
const LOOK: Duration = Duration::from_millis(50);
/// Longest time for any reaction of a guest.
const PATIENCE: Duration = Duration::from_secs(120);
/// Warm-up of the guest: the first accesses to its file are slower.
pub(super) const WARM_UP: Duration = Duration::from_secs(3);
/// Time to measure the guest before the move.
pub(super) const BEFORE: Duration = Duration::from_secs(5);
/// Bytes of a write of the guest.
pub(crate) const BLOCK: f64 = 4096.0;

/// Boots a machine and moves it once.
pub(crate) fn measure(
    mover: &dyn Mover,
    site: &Site,
    load: &GuestLoad,
    limit: Duration,
) -> io::Result<Value> {
    format_image(&site.image())?;
    let disk_at_rest = site.settle()?;
    await_quiet()?;
    let ends = vec![site.link.left(), site.link.right()];
    let _sweep = Sweep(ends.clone());
    let mut machine = mover.start(site, load)?;
    let mut cpu = Meter::new(ends);
    interrupt::sleep(WARM_UP)?;

    let (quiet, used) = (Watch::begin(machine.console())?, cpu.look()?);
    let began = Instant::now();
    interrupt::sleep(BEFORE)?;
    let cpu_before = (cpu.look()? - used) / began.elapsed().as_secs_f64();
    let before = quiet.end(machine.console(), Instant::now())?;

    let watch = Watch::begin(machine.console())?;
    let (wire, used) = (site.link.carried_bytes()?, cpu.look()?);
    let started = Instant::now();
    machine.begin()?;
    let converged = follow(machine.as_mut(), &mut cpu, started, limit)?;
    let ended = Instant::now();
    let cpu_seconds = cpu.look()? - used;
    let wire_bytes = site.link.carried_bytes()? - wire;
    if !converged {
        machine.cancel()?;
    }
    let during = watch.end(machine.console(), ended)?;
    let blackout_ms = machine.console().host_gap().as_secs_f64() * 1000.0;
    let stopped_ms = converged.then(|| machine.stopped_ms()).transpose()?;
    let mut run = json!({
        "image_bytes": site.bytes, "limit_seconds": limit.as_secs_f64(), "disk_at_rest": disk_at_rest,
        "converged": converged, "seconds": (ended - started).as_secs_f64(),
        "lm_seconds": converged.then(|| (ended - started).as_secs_f64()),
        "blackout_ms": converged.then_some(blackout_ms), "stopped_ms": stopped_ms, "wire_bytes": wire_bytes,
        "cpu_seconds": cpu_seconds, "cpu_per_second_before": cpu_before,
        "verified_writes": verified(machine.as_mut())?,
    });
    add_fields(&mut run, &before, "_before");
    add_fields(&mut run, &during, "_during");
    Ok(run)
}

/// Watches a move; returns true if it ends within the limit.
fn follow(
    machine: &mut dyn Machine,
    cpu: &mut Meter<'_>,
    started: Instant,
    limit: Duration,
) -> io::Result<bool> {
    while started.elapsed() < limit {
        interrupt::check()?;
        if machine.advance(LOOK)? {
            return Ok(true);
        }
        cpu.look()?;
    }
    Ok(false)
}

/// Checks that the guest verified all of its writes, and that it ran once and not twice. Returns its number of writes.
pub(super) fn verified(machine: &mut dyn Machine) -> io::Result<u64> {
    let finished = machine.finish()?;
    let console = machine.console();
    let wrong = match (finished.errors + finished.mismatches, console.repeated()) {
        (0, 0) => return Ok(finished.writes),
        (0, repeated) => format!("{repeated} of its reports came twice"),
        _ => format!("{finished:?}"),
    };
    Err(io::Error::other(format!(
        "the guest did not verify: {wrong}; it said: {:#?}",
        console.log()
    )))
}

/// A watched interval of a guest's work, from its start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watch {
    writes: u64,
    at: Instant,
}

impl Watch {
    /// Starts the interval now.
    pub(super) fn begin(console: &GuestConsole) -> io::Result<Self> {
        console.mark(PATIENCE)?;
        let (writes, at) = console
            .writes()
            .ok_or_else(|| io::Error::other("the guest has not written anything"))?;
        Ok(Self { writes, at })
    }

    /// Returns the guest's measurements until its first write after `end`.
    pub(super) fn end(self, console: &GuestConsole, end: Instant) -> io::Result<Value> {
        let later = || console.writes().filter(|(_, at)| *at > end);
        let (writes, at) = awaited("a write of the guest", PATIENCE, later)?;
        let latency = console.fresh_report(PATIENCE)?.latency_since_mark;
        let bytes = (writes - self.writes) as f64 * BLOCK;
        Ok(json!({
            "mbps": bytes / 1e6 / (at - self.at).as_secs_f64(),
            "p50_us": latency.p50_us, "p99_us": latency.p99_us, "p999_us": latency.p999_us, "max_us": latency.max_us,
        }))
    }
}
