//! The idle-copy scene: moves a disk that no guest uses.

use std::io;

use godwit_bench::idle_copy::{IdleDisk, Way};
use godwit_bench::interrupt;
use godwit_testkit::process::scratch_dir;
use godwit_testkit::report::median;

use crate::noise::{AGREE, await_quiet, disagree};
use crate::options::{Extent, Options};
use crate::report::targets::Target;
use crate::report::{IdleCopy, IdleCopyRound};
use crate::suite::Suite;

const GIB: u64 = 1 << 30;

const WAYS: [Way; 5] = [Way::Godwit, Way::Disk, Way::Nbdcopy, Way::Loopback, Way::Cp];

/// Moves and copies the disk, in an order that rotates from round to round.
pub(crate) fn run(options: &Options, suite: &mut Suite) -> io::Result<()> {
    let full = suite.report.extent == Extent::Full;
    let bytes = if full { 4 * GIB } else { 2 * GIB };
    let rounds = options.rounds.unwrap_or(if full { 5 } else { 2 });
    let dir = scratch_dir()?;
    println!("idle copy: filling a disk of {} GiB", bytes / GIB);
    let mut disk = IdleDisk::create(dir.path(), bytes)?;
    println!(
        "{:<10} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "idle copy", "godwit s", "nbdcopy s", "cp s", "disk s", "loopback s"
    );
    let mut all = Vec::new();
    for number in 0..rounds {
        let mut round = IdleCopyRound::default();
        for turn in 0..WAYS.len() {
            interrupt::check()?;
            await_quiet()?;
            let way = WAYS[(number + turn) % WAYS.len()];
            *round.of(way) = disk.seconds(way)?;
        }
        print(&format!("round {}", number + 1), &round);
        all.push(round);
        suite.report.idle_copy = Some(IdleCopy::new(bytes, all.clone()));
        suite.save()?;
    }
    Ok(())
}

/// Returns the target of the scene.
pub(crate) fn target(idle: &IdleCopy) -> Target {
    Target::at_least(
        "idle copy: share of the lower of the disk's and loopback's limits",
        0.9,
        idle.limit_seconds / idle.godwit_seconds,
    )
}

impl IdleCopyRound {
    const fn of(&mut self, way: Way) -> &mut f64 {
        match way {
            Way::Godwit | Way::GodwitTls => &mut self.godwit,
            Way::Nbdcopy => &mut self.nbdcopy,
            Way::Cp => &mut self.cp,
            Way::Disk => &mut self.disk,
            Way::Loopback => &mut self.loopback,
        }
    }
}

impl IdleCopy {
    fn new(bytes: u64, rounds: Vec<IdleCopyRound>) -> Self {
        let each = |pick: fn(&IdleCopyRound) -> f64| rounds.iter().map(pick).collect::<Vec<_>>();
        let of = |pick| median(&each(pick));
        let (disk, loopback) = (of(|round| round.disk), of(|round| round.loopback));
        Self {
            godwit_seconds: of(|round| round.godwit),
            nbdcopy_seconds: of(|round| round.nbdcopy),
            cp_seconds: of(|round| round.cp),
            limit_seconds: disk.max(loopback),
            disk_limit_seconds: disk,
            loopback_limit_seconds: loopback,
            image_bytes: bytes,
            noisy: disagree(&each(|round| round.disk), AGREE),
            rounds,
        }
    }
}

fn print(name: &str, round: &IdleCopyRound) {
    println!(
        "{name:<10} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2}",
        round.godwit, round.nbdcopy, round.cp, round.disk, round.loopback
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_limit_is_the_one_that_counts() {
        let round = |godwit, disk| IdleCopyRound {
            godwit,
            disk,
            loopback: 2.0,
            ..IdleCopyRound::default()
        };
        let idle = IdleCopy::new(1, vec![round(4.0, 3.0), round(5.0, 3.5), round(4.0, 3.6)]);
        assert!(!idle.noisy);
        let target = target(&idle);
        assert_eq!(target.value, Some(3.5 / 4.0));
        assert!(!target.met);
        let fast_disk = IdleCopy::new(1, vec![round(2.0, 1.0)]);
        assert_eq!(fast_disk.limit_seconds.to_bits(), 2.0_f64.to_bits());
    }
}
