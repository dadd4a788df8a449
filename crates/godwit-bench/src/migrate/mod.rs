//! The scene `migrate`: a disk moves while its guest works, moved by Godwit and by its peers in turns.

mod case;
mod measure;
mod movers;
mod quality;
mod selection;
pub(crate) mod targets;

use std::io;
use std::time::Duration;

use godwit_testkit::report::Report;
use serde_json::Value;

pub(crate) use self::case::random_writes;
use self::case::{Case, Rate, Workload};
use self::measure::{Quiet, measure};
use self::movers::Mover;
pub(crate) use self::selection::Selection;
use crate::common::{GUEST, in_turns, named};
use crate::suite::site::Site;
use crate::suite::{Extent, Options};

/// Lower bound of a move's limit in seconds, however fast an idle disk moves. A quick run has the shorter one: its
/// disks are small, and most moves of peers run into the limit.
const LEAST_LIMIT: (u64, u64) = (20, 30);
/// Limit of a move relative to the time of an idle disk.
const LIMIT_FACTOR: f64 = 6.0;
/// Longest time for the move of an idle disk.
const PATIENCE: Duration = Duration::from_secs(600);

pub(crate) fn run(options: &Options, extent: Extent, report: &mut Report) -> io::Result<()> {
    let rounds = options.rounds.unwrap_or(extent.of(1, 5));
    let movers = options.migrate.movers(extent)?;
    let bytes = options.migrate.image_bytes(extent);
    let figures =
        format!("lm_seconds s, wire_bytes B, cpu_seconds_per_gb s, {GUEST}, blackout_ms ms");
    report.table("migrate", "case, mover", &figures, ABOUT);
    let mut place: Option<(Case, Site, Duration)> = None;
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
        in_turns(rounds, movers.len(), |_, turn| {
            let mover = movers[turn].as_ref();
            let of_case = report.runs("migrate").only("case", case.to_string());
            // The mover has failed to converge, and its futile writes would disturb the rest.
            if !of_case.only("mover", mover.name()).all("converged") {
                return Ok(());
            }
            let run = measured(mover, site, &case, extent, *limit)?;
            report.add("migrate", run)
        })?;
        report.mark_noisy("migrate", quality::is_noisy);
    }
    Ok(())
}

const ABOUT: &str = "A disk moves while its guest works. A move without a time had not converged when it was given up, and was \
    not repeated. \"To memory\": the destination's disk is one in memory, what one machine has in place of a second disk. \
    \"Files\": the disk is full of the files below /usr of the machine, and what the guest writes compresses to half; \
    everywhere else nothing makes the data shorter.";

/// Returns the limit of a move at this site, derived from QEMU's plain mirror of an idle disk.
fn limit(site: &Site, idle: &Case, extent: Extent) -> io::Result<Duration> {
    let plain = movers::qemu::Qemu {
        mode: movers::qemu::CopyMode::Background,
        encrypted: false,
    };
    let run = measured(&plain, site, idle, extent, PATIENCE)?;
    let seconds = run["seconds"].as_f64().unwrap_or_default() * LIMIT_FACTOR;
    let least = extent.of(LEAST_LIMIT.0, LEAST_LIMIT.1);
    Ok(Duration::from_secs_f64(seconds).max(Duration::from_secs(least)))
}

fn measured(
    mover: &dyn Mover,
    site: &Site,
    case: &Case,
    extent: Extent,
    limit: Duration,
) -> io::Result<Value> {
    measure(mover, site, case, Quiet::new(extent), limit)
        .map_err(named(&format!("{} at {case}", mover.name())))
}
