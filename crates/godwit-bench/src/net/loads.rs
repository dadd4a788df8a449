//! Loads of the guest: real programs at the clients' end.

use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use godwit_testkit::process::{Process, wait_for};
use rustix::process::Signal;

use super::iperf;
use super::site::{GUEST, Site};

/// Duration of a load in seconds, longer than any move.
const SECONDS: &str = "3600";
/// Longest time for a program to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// The load while a machine moves, beside the few clocked requests and pings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Load {
    Quiet,
    /// A TCP stream of iperf3 to the guest at full speed (the paper's Fig. 10-13).
    Stream,
    /// Sixteen connections of wrk, each requesting 10 KiB from the guest's nginx again and again (the paper's Fig.
    /// 14-17).
    Web,
}

impl Load {
    pub(super) const ALL: [Self; 3] = [Self::Quiet, Self::Stream, Self::Web];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Stream => "stream",
            Self::Web => "web",
        }
    }

    /// Returns the rate of the clocked clients' requests, an upper limit for a slow guest. The rate is lower where
    /// requests would take an emulated processor from the load.
    pub(super) const fn requests_per_second(self) -> u32 {
        match self {
            Self::Quiet => 1000,
            Self::Stream | Self::Web => 200,
        }
    }

    /// Starts the load's program.
    pub(super) fn start(self, site: &Site) -> io::Result<Option<Running>> {
        let mut command = site.clients().command();
        match self {
            Self::Quiet => return Ok(None),
            Self::Stream => {
                command.args(iperf::command(iperf::MOVING_PORT));
                command.args(["-t", SECONDS]);
            }
            Self::Web => {
                command.args([
                    "wrk",
                    "-t",
                    "1",
                    "-c",
                    "16",
                    "--timeout",
                    "30s",
                    "-d",
                    SECONDS,
                ]);
                command.arg(format!("http://{GUEST}/10k"));
            }
        }
        Running::start(command).map(Some)
    }
}

/// A program that loads the guest until it is ended.
#[derive(Debug)]
pub(super) struct Running(Process);

impl Running {
    fn start(mut command: Command) -> io::Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Process::spawn(&mut command).map(Self)
    }

    /// Returns true if the program has ended by itself.
    pub(super) fn has_ended(&mut self) -> bool {
        self.0.ended().is_some()
    }

    /// Interrupts the program, so that the guest's server sees an orderly end.
    pub(super) fn end(mut self) {
        self.0.signal(Signal::INT);
        // A program that ignores the signal is killed when the handle is dropped.
        let _ = wait_for(PATIENCE, || self.0.ended());
    }
}
