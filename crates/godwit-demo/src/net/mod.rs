//! A machine whose NIC moves along, there and back between two nodes on two hosts of one network. A client outside
//! holds a TCP conversation of which every byte is checked, and sends a thousand pings a second.

mod report;
mod scene;

use std::process::ExitCode;

use clap::Args;
use godwit_testkit::report::conclude;

/// Moves a virtual machine between two hosts while a client outside watches the network
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of moves
    #[arg(long, default_value_t = 20)]
    moves: usize,
    /// MiB of the machine's disk
    #[arg(long, default_value_t = 64)]
    disk_mib: u64,
}

pub(crate) fn play(arguments: &Arguments) -> ExitCode {
    let report = match scene::play(arguments.moves, arguments.disk_mib) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("the demo could not finish: {error}");
            return ExitCode::FAILURE;
        }
    };
    report.tell();
    conclude("demo-net", &report, report.is_good())
}
