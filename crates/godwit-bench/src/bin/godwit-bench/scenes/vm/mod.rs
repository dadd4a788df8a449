//! The scene `vm`: a machine moves with its disk while its guest works and verifies. Godwit and QEMU, driven as by
//! libvirt, move it in turns.

mod cell;
mod end;
mod godwit;
mod measure;
mod mover;
mod qemu;
pub(crate) mod targets;

use std::io;
use std::time::Duration;

use godwit_testkit::vm::GuestLoad;

pub(crate) use self::cell::load;
use self::measure::{BLOCK, measure};
use crate::options::{Extent, Options};
use crate::report::VmMove;
use crate::site::{Data, Destination, Site};
use crate::suite::Suite;

/// Longest time for a move.
const LIMIT: Duration = Duration::from_secs(60);
/// Writes a second of a paced guest.
const PACED: u64 = 500;

/// Runs the scene.
///
/// # Errors
/// A mover fails, a guest does not verify, or the machine is too noisy.
pub(crate) fn run(options: &Options, suite: &mut Suite) -> io::Result<()> {
    let extent = suite.report.extent;
    let rounds = options.rounds.unwrap_or(match extent {
        Extent::Quick => 1,
        Extent::Full => 5,
    });
    let loads: &[u64] = match extent {
        Extent::Quick => &[PACED],
        Extent::Full => &[PACED, 0],
    };
    let bytes = options.migrate.image_bytes(extent);
    let site = Site::new(
        None,
        bytes,
        Destination::SameDisk,
        Data::Random,
        options.settle(extent),
    )?;
    let movers = mover::all();
    cell::print_header();
    for &rate in loads {
        let load = guest_load(rate, bytes);
        let mbps = (rate > 0).then_some(rate as f64 * BLOCK / 1e6);
        let mut moves: Vec<Vec<VmMove>> = movers.iter().map(|_| Vec::new()).collect();
        for round in 0..rounds.max(1) {
            for turn in 0..movers.len() {
                let index = (round + turn) % movers.len();
                let mover = movers[index].as_ref();
                let measured = measure(mover, &site, &load, LIMIT).map_err(|error| {
                    let name = mover.name();
                    io::Error::new(error.kind(), format!("{name} with a machine: {error}"))
                })?;
                cell::print(mbps, mover.name(), &measured);
                moves[index].push(measured);
            }
        }
        let best = cell::best_before(moves.iter().flatten());
        let cells = movers
            .iter()
            .zip(moves)
            .map(|(mover, moves)| cell::summary(mbps, mover.name(), bytes, LIMIT, best, moves));
        suite.report.vm.extend(cells);
        suite.save()?;
    }
    Ok(())
}

/// Returns a load with a file of half of the disk, and memory that is partly rewritten.
fn guest_load(rate: u64, bytes: u64) -> GuestLoad {
    GuestLoad {
        rate,
        file_mb: bytes >> 21,
        ..GuestLoad::default()
    }
}
