//! What loads the guest: real programs, at the clients' end.

pub(crate) mod iperf;

use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use godwit_testkit::process::{Process, wait_for};
use rustix::process::Signal;
use serde::Serialize;

use crate::site::{GUEST, Site};

/// Longer than any move.
const SECONDS: &str = "3600";
/// How long a program may take to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// What goes on while a machine moves, beside the few requests and pings that are clocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Load {
    /// Nothing.
    Quiet,
    /// A TCP stream of iperf3 to the guest, as fast as it takes it (the paper's Fig. 10-13).
    Stream,
    /// Sixteen connections on which wrk asks the guest's nginx for 10 KiB again and again (the paper's Fig. 14-17).
    Web,
}

impl Load {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Quiet, Self::Stream, Self::Web];

    /// Its name in the report.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Stream => "stream",
            Self::Web => "web",
        }
    }

    /// How often the clocked clients ask beside it, as far as the guest comes to it: less often where their requests
    /// would take an emulated processor from the load.
    pub(crate) const fn requests_per_second(self) -> u32 {
        match self {
            Self::Quiet => 1000,
            Self::Stream | Self::Web => 200,
        }
    }

    /// Starts it.
    ///
    /// # Errors
    /// When its program does not start.
    pub(crate) fn start(self, site: &Site) -> io::Result<Option<Running>> {
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
pub(crate) struct Running(Process);

impl Running {
    fn start(mut command: Command) -> io::Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Process::spawn(&mut command).map(Self)
    }

    /// Whether it has ended by itself.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.ended().is_some()
    }

    /// Ends it as a person would, so that the guest's server hears of it.
    pub(crate) fn end(mut self) {
        self.0.signal(Signal::INT);
        // One that does not obey is killed with its handle.
        let _ = wait_for(PATIENCE, || self.0.ended());
    }
}
