//! The scene `migrate`: a disk moves while its guest works, moved by Godwit and by its peers in turns.

mod case;
mod cell;
mod measure;
mod movers;
mod selection;
pub(crate) mod targets;

use std::io;
use std::time::Duration;

pub(crate) use self::case::random_writes;
use self::case::{Case, Rate, Workload};
use self::cell::Standard;
use self::measure::{Quiet, measure};
use self::movers::Mover;
pub(crate) use self::selection::Selection;
use crate::options::{Extent, Options};
use crate::report::Move;
use crate::site::Site;
use crate::suite::Suite;

/// Lower bound of a move's limit, however fast an idle disk moves. A quick run has the shorter one: its disks are
/// small, and most moves of peers run into the limit.
const LEAST_LIMIT: Duration = Duration::from_secs(30);
const LEAST_QUICK_LIMIT: Duration = Duration::from_secs(20);
/// Limit of a move relative to the time of an idle disk.
const LIMIT_FACTOR: f64 = 6.0;
/// Longest time for the move of an idle disk.
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs the scene.
///
/// # Errors
/// A mover fails, a run does not verify, or the machine is too noisy.
pub(crate) fn run(options: &Options, suite: &mut Suite) -> io::Result<()> {
    let extent = suite.report.extent;
    let rounds = options.rounds.unwrap_or(match extent {
        Extent::Quick => 1,
        Extent::Full => 5,
    });
    let movers = options.migrate.movers(extent)?;
    let bytes = options.migrate.image_bytes(extent);
    let mut place: Option<(Case, Site, Duration)> = None;
    cell::print_header();
    for case in options.migrate.cases(extent) {
        let idle = Case {
            workload: Workload::Randwrite,
            rate: Rate::Megabytes(0.0),
            ..case
        };
        if place.as_ref().is_none_or(|(last, ..)| *last != idle) {
            // The old namespaces must go first: the new ones have the same addresses.
            drop(place.take());
            let settle = options.settle(extent);
            let site = Site::new(case.link.0, bytes, case.destination, case.data, settle)?;
            let limit = limit(&site, &idle, extent)?;
            place = Some((idle, site, limit));
        }
        let Some((_, site, limit)) = &place else {
            continue;
        };
        let mut moves: Vec<Vec<Move>> = movers.iter().map(|_| Vec::new()).collect();
        for round in 0..rounds.max(1) {
            for turn in 0..movers.len() {
                let index = (round + turn) % movers.len();
                let mover = movers[index].as_ref();
                // The mover has failed to converge, and its futile writes would disturb the rest.
                if moves[index].iter().any(|moved| !moved.converged) {
                    continue;
                }
                let measured = measure(mover, site, &case, Quiet::new(extent), *limit);
                let measured = measured.map_err(|error| failed(mover, &case, &error))?;
                cell::print(&case, mover.name(), &measured);
                moves[index].push(measured);
            }
        }
        let standard = Standard::new(&case, moves.iter().flatten());
        let cells = movers.iter().zip(moves).map(|(mover, moves)| {
            cell::summary(&case, mover.name(), bytes, *limit, &standard, moves)
        });
        suite.report.migrate.extend(cells);
        suite.save()?;
    }
    Ok(())
}

/// Returns the limit of a move at this site, derived from QEMU's plain mirror of an idle disk.
fn limit(site: &Site, idle: &Case, extent: Extent) -> io::Result<Duration> {
    let plain = movers::qemu::Qemu {
        mode: movers::qemu::CopyMode::Background,
        encrypted: false,
    };
    let measured = measure(&plain, site, idle, Quiet::new(extent), PATIENCE)
        .map_err(|error| failed(&plain, idle, &error))?;
    let seconds = measured.seconds * LIMIT_FACTOR;
    let least = match extent {
        Extent::Quick => LEAST_QUICK_LIMIT,
        Extent::Full => LEAST_LIMIT,
    };
    Ok(Duration::from_secs_f64(seconds).max(least))
}

fn failed(mover: &dyn Mover, case: &Case, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{} at {case}: {error}", mover.name()))
}
