//! One move of a machine, measured and verified.

use std::io;
use std::time::{Duration, Instant};

use godwit_bench::cpu::{Meter, Sweep};
use godwit_bench::interrupt;
use godwit_testkit::process::wait_for;
use godwit_testkit::vm::{GuestConsole, GuestLoad, format_image};

use crate::noise::await_quiet;
use crate::report::{VmGuest, VmMove, VmSeen};
use crate::scenes::vm::mover::{Machine, Mover};
use crate::site::Site;

/// Time between two looks at a move.
const LOOK: Duration = Duration::from_millis(50);
/// Longest time for any reaction of a guest.
const PATIENCE: Duration = Duration::from_secs(120);
/// Warm-up of the guest: the first accesses to its file are slower.
const WARM_UP: Duration = Duration::from_secs(3);
/// Time to measure the guest before the move.
const BEFORE: Duration = Duration::from_secs(5);
/// Bytes of a write of the guest.
pub(crate) const BLOCK: f64 = 4096.0;

/// Boots a machine and moves it once.
///
/// # Errors
/// The machine does not become quiet, the mover fails, or the guest finds an error.
pub(crate) fn measure(
    mover: &dyn Mover,
    site: &Site,
    load: &GuestLoad,
    limit: Duration,
) -> io::Result<VmMove> {
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
    Ok(VmMove {
        converged,
        seconds: (ended - started).as_secs_f64(),
        blackout_ms: converged.then_some(blackout_ms),
        stopped_ms,
        guest: VmGuest { before, during },
        cpu_seconds,
        cpu_before,
        wire_bytes,
        disk_at_rest,
        verified_writes: verified(machine.as_mut())?,
    })
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
fn verified(machine: &mut dyn Machine) -> io::Result<u64> {
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
struct Watch {
    writes: u64,
    at: Instant,
}

impl Watch {
    /// Starts the interval now.
    fn begin(console: &GuestConsole) -> io::Result<Self> {
        console.mark(PATIENCE)?;
        let (writes, at) = console
            .writes()
            .ok_or_else(|| io::Error::other("the guest has not written anything"))?;
        Ok(Self { writes, at })
    }

    /// Returns the guest's measurements until its first write after `end`.
    fn end(self, console: &GuestConsole, end: Instant) -> io::Result<VmSeen> {
        let later = || console.writes().filter(|(_, at)| *at > end);
        let (writes, at) = wait_for(PATIENCE, later)
            .ok_or_else(|| io::Error::other("the guest does not write any more"))?;
        let latency = console.fresh_report(PATIENCE)?.latency_since_mark;
        Ok(VmSeen {
            mbps: mbps(writes - self.writes, at - self.at),
            p50_us: latency.p50_us as f64,
            p99_us: latency.p99_us as f64,
            p999_us: latency.p999_us as f64,
            max_us: latency.max_us as f64,
        })
    }
}

fn mbps(writes: u64, time: Duration) -> f64 {
    writes as f64 * BLOCK / 1e6 / time.as_secs_f64()
}
