//! Moves without a copy of memory: virtual machines of different sizes under memory and disk load move between two
//! nodes that map the same memory, while their guests check all reads.

mod report;
mod scene;

use std::process::ExitCode;

use clap::Args;
use godwit_testkit::report::conclude;

use report::Report;
use scene::Scene;

/// Moves running virtual machines between two nodes that share memory
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// MiB of memory of each guest
    #[arg(long, value_delimiter = ',', default_values_t = [1024, 4096])]
    guest_mib: Vec<u64>,
    /// Round trips of each guest, for each kind of move
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// MiB of each of the two disks
    #[arg(long, default_value_t = 96)]
    disk_mib: u64,
}

pub(crate) fn play(arguments: Arguments) -> ExitCode {
    let mut report = Report::default();
    // Guests in sequence: for a moment, a guest may have twice as much memory as its size.
    for guest_mib in arguments.guest_mib {
        let scene = Scene {
            guest_mib,
            rounds: arguments.rounds,
            disk_mib: arguments.disk_mib,
        };
        match scene.play() {
            Ok(played) => report.add(played),
            Err(error) => {
                eprintln!("\nguest of {guest_mib} MiB: the demo could not finish: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    report.judge();
    conclude("demo-memory", &report, report.is_good())
}
