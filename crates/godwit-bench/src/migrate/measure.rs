//! One move of a disk, measured and verified.

use std::io;
use std::time::{Duration, Instant};

use godwit_testkit::fio::{FioReport, RunningFio, now_ms};
use godwit_testkit::report::add_fields;
use serde_json::{Value, json};

use super::case::Case;
use super::movers::{Mover, Moving};
use crate::common::interrupt;
use crate::common::moved::compare_images;
use crate::suite::Extent;
use crate::suite::noise::await_quiet;
use crate::suite::site::{Data, Destination, Site};

/// Time between two looks at a move, about the precision of its duration.
const LOOK: Duration = Duration::from_millis(50);
/// Milliseconds before and after the end of a move within which the switchover took place.
const SWITCHOVER_MS: u64 = 1000;
/// Time for which the guest continues after the move.
const AFTER: Duration = Duration::from_millis(SWITCHOVER_MS + 200);
/// Milliseconds of a point of the series.
const STEP_MS: u64 = 250;

/// Times of the guest's work before the move.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quiet {
    warm_up: Duration,
    before: Duration,
}

impl Quiet {
    pub(super) fn new(extent: Extent) -> Self {
        Self {
            warm_up: Duration::from_secs(extent.of(1, 3)),
            before: Duration::from_secs(extent.of(5, 10)),
        }
    }
}

/// Times of a run, in ms since 1970.
struct Times {
    quiet: u64,
    begun: u64,
    ended: u64,
}

/// Moves the site's image once.
pub(super) fn measure(
    mover: &dyn Mover,
    site: &Site,
    case: &Case,
    quiet: Quiet,
    limit: Duration,
) -> io::Result<Value> {
    let disk_at_rest = site.settle()?;
    await_quiet()?;
    let mut moving = mover.open(site)?;
    let guest = case.guest(site.bytes);
    let guest = guest.map(|load| load.start(&moving.guest(), site.dir()));
    let mut guest = guest.transpose()?;
    stay(&mut guest, quiet.warm_up)?;
    let quiet_from = now_ms();
    stay(&mut guest, quiet.before)?;

    let wire = site.link.carried_bytes()?;
    let cpu = moving.cpu_seconds()?;
    let (begun, started) = (now_ms(), Instant::now());
    moving.begin()?;
    let ended = follow(moving.as_mut(), &mut guest, started, limit)?;
    let seconds = ended.unwrap_or_else(|| started.elapsed()).as_secs_f64();
    let times = Times {
        quiet: quiet_from,
        begun,
        ended: begun + (seconds * 1000.0) as u64,
    };
    let cpu_seconds = moving.cpu_seconds()? - cpu;
    let wire_bytes = site.link.carried_bytes()? - wire;
    let converged = ended.is_some();
    if !converged {
        moving.cancel()?;
    }
    stay(&mut guest, AFTER)?;
    let seen = guest.map(RunningFio::stop).transpose()?;
    let images = moving.images();
    moving.close()?;

    seen.as_ref().map_or(Ok(()), FioReport::succeeded)?;
    let mut run = json!({
        "case": case.to_string(), "mover": mover.name(), "workload": case.workload.name(),
        "rate_mbps": case.rate.mbps(), "link_gbps": case.link.0,
        "destination_in_memory": case.destination == Destination::Memory, "files": case.data == Data::Files,
        "image_bytes": site.bytes, "limit_seconds": limit.as_secs_f64(), "disk_at_rest": disk_at_rest,
        "converged": converged, "seconds": seconds, "lm_seconds": converged.then_some(seconds),
        "wire_bytes": wire_bytes, "cpu_seconds": cpu_seconds,
        "cpu_seconds_per_gb": cpu_seconds / (site.bytes as f64 / 1e9),
    });
    if converged {
        let [source, destination] = images?;
        let samples = seen.as_ref().map_or(&[][..], |seen| &seen.samples);
        let moved = times.ended - SWITCHOVER_MS.min(times.ended - begun);
        run["compared_blocks"] = compare_images(&source, &destination, samples, moved)?.into();
    }
    if let Some(seen) = seen {
        add_guest(&mut run, &seen, &times, converged);
    }
    Ok(run)
}

/// Adds the guest's figures and series to the run.
fn add_guest(run: &mut Value, seen: &FioReport, times: &Times, converged: bool) {
    add_fields(run, &seen.window(times.quiet, times.begun), "_before");
    add_fields(run, &seen.window(times.begun, times.ended), "_during");
    let (from, to) = (times.ended - SWITCHOVER_MS, times.ended + SWITCHOVER_MS);
    let silence = converged.then(|| seen.longest_silence(from, to));
    run["blackout_ms"] = silence.into();
    // Points in whole steps from the command on, in both directions.
    let first = times.begun - (times.begun - times.quiet) / STEP_MS * STEP_MS;
    let windows = seen.windows(first, to, STEP_MS);
    let points = (first..to).step_by(STEP_MS as usize).zip(windows).map(|(at, window)| {
        let seconds = (at as f64 - times.begun as f64) / 1000.0;
        json!({"seconds": seconds, "mbps": window.mbps, "p50_us": window.p50_us, "max_us": window.max_us})
    });
    run["series"] = points.collect();
}

/// Watches a move to its end and returns the duration; `None` if the move exceeds the limit.
fn follow(
    moving: &mut dyn Moving,
    guest: &mut Option<RunningFio>,
    started: Instant,
    limit: Duration,
) -> io::Result<Option<Duration>> {
    while started.elapsed() < limit {
        interrupt::check()?;
        stay(guest, Duration::ZERO)?;
        if moving.advance(LOOK)? {
            return Ok(Some(started.elapsed()));
        }
    }
    Ok(None)
}

/// Lets the guest work.
fn stay(guest: &mut Option<RunningFio>, how_long: Duration) -> io::Result<()> {
    match guest {
        Some(fio) => interrupt::sleep(how_long).and_then(|()| fio.check()),
        None => Ok(()),
    }
}
