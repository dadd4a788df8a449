//! The load of a verifying client: a mix of requests from a seed.

use std::ops::Range;

use crate::nbd::Command;
use crate::random::Random;

/// Longest request in sectors: 64 KiB.
const LONGEST: u64 = 128;
const HOT_SPOTS: u64 = 8;
const HOT_SPOT_SECTORS: u64 = 512;

/// The shape of the load.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Seed of the whole sequence.
    pub seed: u64,
    /// Requests in flight at once.
    pub depth: usize,
    /// Requests per second at most.
    pub rate: Option<u32>,
    pub reads: u64,
    /// True if trim and write-zeroes are among the requests.
    pub zeroes: bool,
}

impl Workload {
    /// Returns a load with sixteen requests in flight, a quarter of them reads, at most 4000 a second. This load leaves
    /// a small machine room for the nodes under test.
    pub const fn new(seed: u64) -> Self {
        Self {
            seed,
            depth: 16,
            rate: Some(4000),
            reads: 25,
            zeroes: true,
        }
    }

    /// Sets the number of requests in flight.
    #[must_use]
    pub const fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
        self
    }

    /// Sets the largest number of requests a second; `None` for no limit.
    #[must_use]
    pub const fn rate(mut self, rate: Option<u32>) -> Self {
        self.rate = rate;
        self
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) command: Command,
    pub(super) fua: bool,
    /// Sectors; empty for a flush.
    pub(super) range: Range<u64>,
}

/// The endless sequence of requests of a workload.
#[derive(Debug)]
pub(super) struct Steps {
    random: Random,
    workload: Workload,
    sectors: u64,
}

impl Steps {
    pub(super) fn new(workload: &Workload, sectors: u64) -> Self {
        Self {
            random: Random::new(workload.seed),
            workload: workload.clone(),
            sectors,
        }
    }

    pub(super) fn next_step(&mut self) -> Step {
        let command = self.command();
        if command == Command::Flush {
            return Step {
                command,
                fua: false,
                range: 0..0,
            };
        }
        let fua = command != Command::Read && self.random.percent(5);
        Step {
            command,
            fua,
            range: self.range(),
        }
    }

    fn command(&mut self) -> Command {
        if self.random.percent(self.workload.reads) {
            return Command::Read;
        }
        match self.random.below(100) {
            0..3 => Command::Flush,
            3..7 if self.workload.zeroes => Command::Trim,
            7..12 if self.workload.zeroes => Command::WriteZeroes,
            _ => Command::Write,
        }
    }

    fn range(&mut self) -> Range<u64> {
        let longest = match self.random.below(4) {
            0 => 1,
            1 | 2 => 16,
            _ => LONGEST,
        };
        let length = (1 + self.random.below(longest)).min(self.sectors);
        let last = self.sectors - length;
        let start = if self.random.percent(50) {
            // The same few places again and again: overlaps, and writes while they are copied.
            let spot = self.random.below(HOT_SPOTS) * (self.sectors / HOT_SPOTS);
            (spot + self.random.below(HOT_SPOT_SECTORS)).min(last)
        } else {
            self.random.below(last + 1)
        };
        start..start + length
    }
}
