//! The main job, shown: a disk with a file system and a running load moves between two nodes and
//! back, and everything is checked by programs that are not Godwit.
//!
//! The disk's first half holds an ext4 file system that nobody writes to, so it must come out
//! byte-identical; its second half belongs to fio, which writes random blocks with checksums all
//! the time and reads every one back.
//!
//! With `--rates` the disk also moves at five fixed rates, and the report compares what they cost.

mod guest_disk;
mod report;
mod run;

use std::process::ExitCode;

use clap::Args;

use crate::tell;

/// Moves a busy disk between two nodes and back
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Move the disk at five fixed rates, too, and compare what they cost
    #[arg(long)]
    rates: bool,
}

pub(crate) fn play(arguments: &Arguments) -> ExitCode {
    tell(run::demo(arguments.rates))
}
