//! Sizes of disks, loads and rounds.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::load::{Kind, Plan};

const MIB: u64 = 1 << 20;

/// The selectable sizes; a quick run has smaller defaults.
#[derive(Clone, Debug, Args, Serialize)]
pub(super) struct Sizes {
    /// Small disks, one round, few machines: shows in three minutes that everything works, and measures little
    #[arg(long)]
    pub(super) quick: bool,
    /// Repetitions of each measurement; medians are reported [default: 3; quick: 1]
    #[arg(long)]
    rounds: Option<usize>,
    /// Bandwidth of the link in either direction, in Mbit/s [default: 1000]
    #[arg(long)]
    link_mbit: Option<u64>,
    /// Size of a disk in MiB [default: 4096; quick: 512]
    #[arg(long)]
    disk_mib: Option<u64>,
    /// MiB of the disk from its base image [default: 256; quick: 32]
    #[arg(long)]
    base_mib: Option<u64>,
    /// MiB that the loads work on [default: 1024; quick: 96]
    #[arg(long)]
    load_mib: Option<u64>,
    /// Seconds after which a move that has not ended is given up [default: 120; quick: 10]
    #[arg(long)]
    limit: Option<u64>,
    /// Numbers of machines that move at once [default: 1,10,20,30; quick: 1,8]
    #[arg(long, value_delimiter = ',')]
    machines: Option<Vec<usize>>,
    /// MiB that each of these machines works on [default: 32; quick: 12]
    #[arg(long)]
    machine_mib: Option<u64>,
    /// MiB of the loads that compare the node's choice with every policy [default: 128; quick: 32]
    #[arg(long)]
    choice_mib: Option<u64>,
    /// MiB of data on the thin disk of 100 GiB, and on the full disk [default: 1024; quick: 96]
    #[arg(long)]
    thin_mib: Option<u64>,
    /// The source's disks are in memory, too: for a machine whose disk is too slow or stalls
    #[arg(long)]
    pub(super) source_in_memory: bool,
}

impl Sizes {
    fn chosen(&self, asked: Option<u64>, usual: u64, quick: u64) -> u64 {
        asked
            .unwrap_or(if self.quick { quick } else { usual })
            .max(1)
    }

    pub(super) fn rounds(&self) -> usize {
        let usual = if self.quick { 1 } else { 3 };
        self.rounds.unwrap_or(usual).max(1)
    }

    pub(super) fn link_mbit(&self) -> u64 {
        self.chosen(self.link_mbit, 1000, 1000)
    }

    pub(super) fn disk(&self) -> u64 {
        self.chosen(self.disk_mib, 4096, 512) * MIB
    }

    pub(super) fn base(&self) -> u64 {
        self.chosen(self.base_mib, 256, 32) * MIB
    }

    fn load(&self) -> u64 {
        self.chosen(self.load_mib, 1024, 96) * MIB
    }

    pub(super) fn limit(&self) -> Duration {
        Duration::from_secs(self.chosen(self.limit, 120, 10))
    }

    pub(super) fn machines(&self) -> Vec<usize> {
        let usual: &[usize] = if self.quick {
            &[1, 8]
        } else {
            &[1, 10, 20, 30]
        };
        let asked = self.machines.clone();
        let mut machines = asked.unwrap_or_else(|| usual.to_vec());
        machines.retain(|machines| *machines > 0);
        machines.sort_unstable();
        machines
    }

    pub(super) fn machine(&self) -> u64 {
        self.chosen(self.machine_mib, 32, 12) * MIB
    }

    pub(super) fn choice(&self) -> u64 {
        self.chosen(self.choice_mib, 128, 32) * MIB
    }

    pub(super) fn thin(&self) -> u64 {
        self.chosen(self.thin_mib, 1024, 96) * MIB
    }

    /// Returns the bytes of memory for a node's disks: the maximum over all measurements.
    pub(super) fn room(&self) -> u64 {
        let many = self.machines().last().copied().unwrap_or(0) as u64 * self.machine();
        [
            self.base() + self.load(),
            many,
            2 * self.choice(),
            self.thin() + self.thin() / 8,
        ]
        .into_iter()
        .max()
        .unwrap_or(0)
            + (256 << 20)
    }

    /// Returns the bytes per second that the link carries.
    pub(super) fn link_bytes(&self) -> f64 {
        self.link_mbit() as f64 * 125_000.0
    }

    /// Writes the region in blocks of 256 KiB, reads the region, and begins again.
    pub(super) fn ior(&self) -> Plan {
        self.plan(Kind::Ior, self.load(), None)
    }

    /// Writes blocks of 256 KiB at 6 MB a second.
    pub(super) fn async_wr(&self) -> Plan {
        self.plan(Kind::AsyncWr, self.load(), Some(6_000_000))
    }

    fn plan(&self, kind: Kind, bytes: u64, rate: Option<u64>) -> Plan {
        Plan {
            kind,
            region: self.base()..self.base() + bytes,
            rate,
            seed: 1,
        }
    }
}
