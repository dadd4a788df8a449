//! The main demo: a disk with a file system and a running load moves between two nodes and back, and independent
//! programs check everything.
//!
//! The disk's first half holds an ext4 file system without any writer, and must come out byte-identical. The second
//! half belongs to fio, which writes random blocks with checksums all the time and reads every one back.
//!
//! With `--rates` the disk also moves at five fixed rates, and the report compares their costs.

mod guest_disk;
mod report;
mod run;

use std::process::ExitCode;

fn main() -> ExitCode {
    let rates = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => false,
        [option] if option == "--rates" => true,
        _ => {
            eprintln!("usage: godwit-demo [--rates]");
            return ExitCode::from(2);
        }
    };
    match run::demo(rates) {
        Ok(problems) if problems.is_empty() => ExitCode::SUCCESS,
        Ok(problems) => {
            eprintln!("\nThe demo found problems:");
            for problem in problems {
                eprintln!("  - {problem}");
            }
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("\nThe demo could not finish: {error}");
            ExitCode::FAILURE
        }
    }
}
