//! Unmodified RDMA programs of Debian move between virtual machines while they run.

mod cases;
mod report;
mod run;

use std::process::ExitCode;

use clap::Args;

/// Moves RDMA programs between virtual machines with soft-RoCE
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Only programs whose name contains this; more than once for several
    #[arg(long)]
    only: Vec<String>,
    /// Number of moves of each pair of checking processes
    #[arg(long, default_value_t = 2)]
    moves: usize,
    /// Packets that are lost while a checking process moves, in percent
    #[arg(long, default_value_t = 0.0)]
    loss: f64,
    /// Make the device's objects ahead of each moving process
    #[arg(long)]
    pre_setup: bool,
    /// Move a program with each of these numbers of queue pairs, without pre-setup and with it, and nothing else
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096))]
    qps: Vec<u32>,
    /// Keep the virtual machines' logs
    #[arg(long)]
    keep_logs: bool,
}

impl Arguments {
    /// Returns true if the program `name` is to run.
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part))
    }
}

pub(crate) fn play(arguments: &Arguments) -> ExitCode {
    match run::run(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("godwit-demo: {error}");
            ExitCode::FAILURE
        }
    }
}
