//! The program of a test's virtual machine: a load on every disk and on memory that checks all reads and reports on the
//! serial console. `scripts/build-guest` links the program statically and puts it into the guest's first file system,
//! where `init` starts it with the console as its standard input and output.
//!
//! Output is in lines. `~D N`, a tick: disk D completed its N-th write. `=N`, a beat: the processors run. Any other
//! line is a JSON object: a report each second, an answer to a command, or an error. Commands are lines, too: `mark
//! ID`, `report`, `finish`, which the power button also means, `end BOOT HOW` ([`ending`]), `channels N` and `xdp HOW`
//! ([`card`]). A line may be lost or come twice when the machine moves to another host; every command may be repeated.
//!
//! Ticks exist because a guest cannot see itself standing still: its clocks stop with it. The host learns the length of
//! a standstill from the arrival times of the ticks.

mod beat;
mod console;
mod disks;
mod echo;
mod memory;
mod orders;
mod random;
mod run;
mod stats;

use std::process::ExitCode;

fn main() -> ExitCode {
    match orders::options::Options::from_kernel().and_then(|options| run::run(&options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::say_text("fatal", &error.to_string());
            console::drain();
            ExitCode::FAILURE
        }
    }
}
