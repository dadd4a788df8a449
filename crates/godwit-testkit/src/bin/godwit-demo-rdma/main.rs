//! Unmodified RDMA programs of Debian move between virtual machines while they run.

mod holder;
mod programs;
mod report;
mod run;

use std::process::ExitCode;

use clap::Parser;

/// Moves RDMA programs between virtual machines with soft-RoCE
#[derive(Parser)]
struct Arguments {
    /// Only programs whose name contains this
    #[arg(long, default_value = "")]
    only: String,
    /// Keep the virtual machines' logs
    #[arg(long)]
    keep_logs: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run::run(&arguments.only, arguments.keep_logs) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("godwit-demo-rdma: {error}");
            ExitCode::FAILURE
        }
    }
}
