//! What a test's virtual machine runs: a load on every disk and on memory that checks whatever it
//! reads, and says on the serial console how it goes. `scripts/build-guest` links it statically and
//! puts it into the guest's first file system, where `init` starts it with the console as its
//! standard input and output.
//!
//! It writes lines. `~D N`, a tick: disk D completed its N-th write. `=N`, a beat: the processors run. Anything else is a JSON object:
//! a report each second, answers to commands, and what went wrong. It reads lines: `mark ID`,
//! `report`, `finish`, which the power button says too, `end BOOT HOW` ([`ending`]), `channels N` and
//! `xdp HOW` ([`card`]). A line may be lost or come twice when the machine moves to another host; every
//! command may be repeated.
//!
//! Ticks exist because a guest cannot see itself standing still: its clocks stop with it. Whoever
//! wants to know how long it stood watches when the ticks arrive.

mod beat;
mod blocks;
mod card;
mod commands;
mod console;
mod echo;
mod ending;
mod files;
mod memory;
mod options;
mod random;
mod run;
mod stats;

use std::process::ExitCode;

fn main() -> ExitCode {
    match options::Options::from_kernel().and_then(|options| run::run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::say_text("fatal", &error.to_string());
            console::drain();
            ExitCode::FAILURE
        }
    }
}
