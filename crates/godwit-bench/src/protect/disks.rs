//! Disks that are safe at two hosts: a machine protected with `--restart`, beside QEMU's mirror with synchronous writes.

use std::io;
use std::time::Duration;

use godwit_testkit::report::{Report, Target, ratio};
use godwit_testkit::vm::GuestLoad;

use crate::common::{in_turns, named};
use crate::suite::site::{Data, Destination, Site};
use crate::vm::{Godwit, Mover, Qemu, measure_in_step};

const DISK_BYTES: u64 = 256 << 20;
const FIGURES: &str = "mbps_before MB/s, mbps_during MB/s, p50_us_before µs, p50_us_during µs, p99_us_before µs, \
    p99_us_during µs, max_us_before µs, max_us_during µs";
const ABOUT: &str = "A guest writes 4 KiB at random places, one write after the other, and reads them back: before, with one \
    copy of its disk, and during, with a second one at another host that has each write before its acknowledgement.";

/// Measures both in turns.
pub(super) fn measure(rounds: usize, report: &mut Report) -> io::Result<()> {
    report.table("disks", "mover", FIGURES, ABOUT);
    let site = Site::new(
        None,
        DISK_BYTES,
        Destination::SameDisk,
        Data::Random,
        Duration::ZERO,
    )?;
    let mirror = Qemu {
        name: "qemu-write-blocking",
        copy_mode: "write-blocking",
    };
    let movers: [&dyn Mover; 2] = [&Godwit, &mirror];
    let load = GuestLoad {
        rate: 0,
        file_mb: DISK_BYTES >> 21,
        ..GuestLoad::default()
    };
    in_turns(rounds, movers.len(), |_, turn| {
        let mover = movers[turn];
        let mut run = measure_in_step(mover, &site, &load).map_err(named(mover.name()))?;
        run["mover"] = mover.name().into();
        report.add("disks", run)
    })?;
    let of = |mover: &dyn Mover| report.runs("disks").only("mover", mover.name());
    let (ours, theirs) = (of(&Godwit), of(&mirror));
    let targets = [
        ("mbps_during", "writes a second"),
        ("p99_us_during", "p99 of a write"),
    ]
    .map(|(figure, what)| {
        let ratio = ratio(&ours, &theirs, figure);
        let name = format!("synchronous disks, {what} / QEMU's mirror");
        match figure {
            "mbps_during" => Target::at_least(name, 1.0, ratio),
            _ => Target::at_most(name, 1.0, ratio),
        }
    });
    report.targets.extend(targets);
    Ok(())
}
