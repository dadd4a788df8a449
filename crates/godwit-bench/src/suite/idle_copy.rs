//! The scene `idle-copy`: a disk that no guest uses moves, and is copied in other ways.

use std::io;

use godwit_testkit::process::scratch_dir;
use godwit_testkit::report::{Report, Runs, Target};
use serde_json::json;

use super::idle_disk::{IdleDisk, Way};
use super::noise::{AGREE, await_quiet, disagree};
use super::{Extent, Options};
use crate::common::in_turns;

const GIB: u64 = 1 << 30;
const WAYS: [Way; 5] = [Way::Godwit, Way::Disk, Way::Nbdcopy, Way::Loopback, Way::Cp];

/// Moves and copies the disk.
pub(crate) fn run(options: &Options, extent: Extent, report: &mut Report) -> io::Result<()> {
    let rounds = options.rounds.unwrap_or(extent.of(2, 5));
    measure(report, &WAYS, extent.of(2 * GIB, 4 * GIB), rounds)?;
    report.mark_noisy("idle-copy", |_, all| {
        disagree(&all.only("way", Way::Disk.name()).values("seconds"), AGREE)
    });
    Ok(())
}

/// Measures these ways in turns.
pub(crate) fn measure(
    report: &mut Report,
    ways: &[Way],
    bytes: u64,
    rounds: usize,
) -> io::Result<()> {
    let dir = scratch_dir()?;
    println!("filling a disk of {} MiB", bytes >> 20);
    let mut disk = IdleDisk::create(dir.path(), bytes)?;
    let about = "Seconds for a disk that nobody uses.";
    report.table("idle-copy", "way", "seconds s", about);
    in_turns(rounds, ways.len(), |round, turn| {
        await_quiet()?;
        let (way, seconds) = (ways[turn].name(), disk.seconds(ways[turn])?);
        let run = json!({"way": way, "round": round, "seconds": seconds, "image_bytes": bytes});
        report.add("idle-copy", run)
    })
}

/// Returns the target of the scene.
pub(crate) fn target(runs: &Runs<'_>) -> Option<Target> {
    let of = |way: Way| runs.only("way", way.name()).median("seconds");
    let limit = of(Way::Disk)?.max(of(Way::Loopback)?);
    let share = of(Way::Godwit).map(|seconds| limit / seconds);
    let name = "idle copy: share of the lower of the disk's and loopback's limits";
    Some(Target::at_least(name, 0.9, share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_limit_is_the_one_that_counts() {
        let value = |godwit, disk| {
            let times = [
                (Way::Godwit, godwit),
                (Way::Disk, disk),
                (Way::Loopback, 2.0),
            ];
            let rows = times.map(|(way, seconds)| json!({"way": way.name(), "seconds": seconds}));
            target(&Runs(rows.iter().collect())).unwrap().measured
        };
        assert_eq!(value(4.0, 3.5), Some(3.5 / 4.0));
        assert_eq!(value(2.0, 1.0), Some(1.0));
        assert!(target(&Runs(Vec::new())).is_none());
    }
}
