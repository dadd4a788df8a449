//! A machine whose NIC moves with it: two nodes on two hosts of one network, a client outside with a TCP
//! conversation of which every byte is checked and a thousand pings a second, and moves there and back.

mod report;
mod scene;

use std::process::ExitCode;

use clap::Parser;
use godwit_testkit::report::conclude;

/// Moves a virtual machine between two hosts while a client outside watches its network
#[derive(Debug, Parser)]
struct Arguments {
    /// How often it moves
    #[arg(long, default_value_t = 20)]
    moves: usize,
    /// MiB of its disk
    #[arg(long, default_value_t = 64)]
    disk_mib: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
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
