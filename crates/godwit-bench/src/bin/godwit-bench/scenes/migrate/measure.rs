//! One move of a disk, measured and verified.

use std::io;
use std::time::{Duration, Instant};

use godwit_bench::interrupt;
use godwit_bench::moved::compare_images;
use godwit_testkit::fio::{FioReport, RunningFio, now_ms};

use crate::noise::await_quiet;
use crate::options::Extent;
use crate::report::{Guest, Move, Point, Seen};
use crate::scenes::migrate::case::Case;
use crate::scenes::migrate::movers::{Mover, Moving};
use crate::site::Site;

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
pub(crate) struct Quiet {
    warm_up: Duration,
    before: Duration,
}

impl Quiet {
    pub(crate) const fn new(extent: Extent) -> Self {
        let (warm_up, before) = match extent {
            Extent::Quick => (1, 5),
            Extent::Full => (3, 10),
        };
        Self {
            warm_up: Duration::from_secs(warm_up),
            before: Duration::from_secs(before),
        }
    }
}

/// Moves the site's image once.
///
/// # Errors
/// The machine does not become quiet, the mover fails, the guest sees an error, or the images differ afterwards.
pub(crate) fn measure(
    mover: &dyn Mover,
    site: &Site,
    case: &Case,
    quiet: Quiet,
    limit: Duration,
) -> io::Result<Move> {
    let disk_at_rest = site.settle()?;
    await_quiet()?;
    let mut moving = mover.open(site)?;
    let mut guest = case
        .guest(site.bytes)
        .map(|load| load.start(&moving.guest(), site.dir()))
        .transpose()?;
    let stay = |guest: &mut Option<RunningFio>, how_long| -> io::Result<()> {
        if guest.is_some() {
            interrupt::sleep(how_long)?;
        }
        alive(guest)
    };
    stay(&mut guest, quiet.warm_up)?;
    let quiet_from = now_ms();
    stay(&mut guest, quiet.before)?;

    let wire = site.link.carried_bytes()?;
    let cpu = moving.cpu_seconds()?;
    let (from, started) = (now_ms(), Instant::now());
    moving.begin()?;
    let ended = follow(moving.as_mut(), &mut guest, started, limit)?;
    let seconds = ended.unwrap_or_else(|| started.elapsed()).as_secs_f64();
    let to = from + (seconds * 1000.0) as u64;
    let cpu_seconds = moving.cpu_seconds()? - cpu;
    let wire_bytes = site.link.carried_bytes()? - wire;
    if ended.is_none() {
        moving.cancel()?;
    }
    stay(&mut guest, AFTER)?;
    let seen = guest.map(RunningFio::stop).transpose()?;
    let images = moving.images();
    moving.close()?;

    seen.as_ref().map_or(Ok(()), FioReport::succeeded)?;
    let compared_blocks = match ended {
        Some(_) => {
            let [source, destination] = images?;
            let samples = seen.as_ref().map_or(&[][..], |seen| &seen.samples);
            let moved = to - SWITCHOVER_MS.min(to - from);
            Some(compare_images(&source, &destination, samples, moved)?)
        }
        None => None,
    };
    let window = |from, to| seen.as_ref().map(|seen| Seen::of(&seen.window(from, to)));
    Ok(Move {
        converged: ended.is_some(),
        seconds,
        wire_bytes,
        guest: Guest {
            before: window(quiet_from, from),
            during: window(from, to),
        },
        cpu_seconds,
        blackout_ms: seen
            .as_ref()
            .zip(ended)
            .map(|(seen, _)| seen.longest_silence(to - SWITCHOVER_MS, to + SWITCHOVER_MS) as f64),
        compared_blocks,
        disk_at_rest,
        series: seen.map_or_else(Vec::new, |seen| {
            series(&seen, quiet_from, from, to + SWITCHOVER_MS)
        }),
    })
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
        alive(guest)?;
        if moving.advance(LOOK)? {
            return Ok(Some(started.elapsed()));
        }
    }
    Ok(None)
}

fn alive(guest: &mut Option<RunningFio>) -> io::Result<()> {
    if let Some(fio) = guest
        && !fio.alive()
    {
        return Err(io::Error::other(fio.explain()));
    }
    Ok(())
}

/// Returns points in whole steps from the command on, in both directions.
fn series(seen: &FioReport, first: u64, zero: u64, end: u64) -> Vec<Point> {
    let first = zero - (zero - first) / STEP_MS * STEP_MS;
    let starts = (first..end).step_by(STEP_MS as usize);
    starts
        .zip(seen.windows(first, end, STEP_MS))
        .map(|(at, window)| Point {
            seconds: (at as f64 - zero as f64) / 1000.0,
            mbps: Seen::of(&window).mbps,
            p50_us: window.p50_us as f64,
            max_us: window.max_us as f64,
        })
        .collect()
}
