//! The options of a run.

use std::time::Duration;

use clap::Args;

use crate::net::peers::Peer;

/// A machine's network card, under load and while the machine moves, beside QEMU's own and others
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// One short round: shows that everything runs, and little more
    #[arg(long)]
    pub(crate) quick: bool,
    /// Number of rounds, each with a turn of every peer [default: 5, and 1 with --quick]
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds of each measurement under steady load [default: 3, and 1 with --quick]
    #[arg(long)]
    seconds: Option<u64>,
    /// Only these peers, separated by commas
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Peer>,
}

impl Options {
    /// Returns the number of rounds, at least one.
    pub(crate) fn rounds(&self) -> usize {
        let usual = if self.quick { 1 } else { 5 };
        self.rounds.unwrap_or(usual).max(1)
    }

    /// Returns the seconds of each steady load, at least one: the minimum of iperf3.
    pub(crate) fn seconds(&self) -> u64 {
        let usual = if self.quick { 1 } else { 3 };
        self.seconds.unwrap_or(usual).max(1)
    }

    /// Returns the duration of a load before and after a move.
    pub(crate) fn around(&self) -> Duration {
        Duration::from_millis(if self.quick { 1500 } else { 3000 })
    }

    /// Returns the peers to measure, in the order of the report.
    pub(crate) fn peers(&self) -> Vec<Peer> {
        let chosen = |peer: &Peer| self.only.is_empty() || self.only.contains(peer);
        Peer::ALL.into_iter().filter(chosen).collect()
    }
}
