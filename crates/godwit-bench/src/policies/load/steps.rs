//! The requests of a load, one block after another.

use std::ops::Range;

use godwit_testkit::random::Random;

use super::content::BLOCK;

/// A kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Writes its region once.
    Idle,
    /// Writes all of its region, then reads it, over and over, like IOR.
    Ior,
    /// Writes its region from start to end at a pace, again and again, like AsyncWR.
    AsyncWr,
    /// Writes random blocks of its region; every fourth request is a read.
    Random,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Ior => "ior",
            Self::AsyncWr => "async-wr",
            Self::Random => "random",
        }
    }
}

/// The plan of a load.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    /// Byte range of the disk to work on, in whole blocks.
    pub(crate) region: Range<u64>,
    /// Bytes per second; `None` for full speed.
    pub(crate) rate: Option<u64>,
    pub(crate) seed: u64,
}

/// A request for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Write(usize),
    Read(usize),
}

pub(super) struct Steps {
    kind: Kind,
    first: usize,
    blocks: usize,
    /// Number of steps taken.
    taken: u64,
    random: Random,
}

impl Steps {
    pub(super) const fn new(plan: &Plan) -> Self {
        let block = BLOCK as u64;
        Self {
            kind: plan.kind,
            first: (plan.region.start / block) as usize,
            blocks: ((plan.region.end - plan.region.start) / block) as usize,
            taken: 0,
            random: Random::new(plan.seed),
        }
    }

    /// Returns the number of completed passes over the region.
    pub(super) fn passes(&self) -> u64 {
        let pass = match self.kind {
            Kind::Ior => 2 * self.blocks,
            _ => self.blocks,
        };
        self.taken / (pass as u64).max(1)
    }

    pub(super) fn next(&mut self) -> Option<Step> {
        let turn = (self.taken % (2 * self.blocks as u64).max(1)) as usize;
        if self.kind == Kind::Idle && self.taken == self.blocks as u64 {
            return None;
        }
        self.taken += 1;
        let random = |random: &mut Random| self.first + random.below(self.blocks as u64) as usize;
        match self.kind {
            Kind::Ior if turn < self.blocks => Some(Step::Write(self.first + turn)),
            Kind::Ior => Some(Step::Read(self.first + turn - self.blocks)),
            Kind::AsyncWr => Some(Step::Write(self.first + turn % self.blocks)),
            // The first pass writes every block once before blocks are chosen.
            Kind::Random if self.taken <= self.blocks as u64 => {
                Some(Step::Write(self.first + turn))
            }
            Kind::Idle => Some(Step::Write(self.first + turn)),
            Kind::Random if self.random.below(4) == 0 => Some(Step::Read(random(&mut self.random))),
            Kind::Random => Some(Step::Write(random(&mut self.random))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(kind: Kind) -> Steps {
        let block = BLOCK as u64;
        Steps::new(&Plan {
            kind,
            region: 2 * block..4 * block,
            rate: None,
            seed: 1,
        })
    }

    #[test]
    fn ior_writes_all_and_then_reads_all() {
        let mut ior = steps(Kind::Ior);
        let taken: Vec<_> = (0..5).filter_map(|_| ior.next()).collect();
        let expected = [
            Step::Write(2),
            Step::Write(3),
            Step::Read(2),
            Step::Read(3),
            Step::Write(2),
        ];
        assert_eq!(taken, expected);
        assert_eq!(ior.passes(), 1);
    }

    #[test]
    fn async_wr_only_writes_and_random_begins_with_all_of_its_region() {
        let mut wr = steps(Kind::AsyncWr);
        let taken: Vec<_> = (0..3).filter_map(|_| wr.next()).collect();
        assert_eq!(taken, [Step::Write(2), Step::Write(3), Step::Write(2)]);
        let mut random = steps(Kind::Random);
        let taken: Vec<_> = (0..200).filter_map(|_| random.next()).collect();
        assert_eq!(taken[..2], [Step::Write(2), Step::Write(3)]);
        let reads = taken.iter().filter(|step| matches!(step, Step::Read(_)));
        assert!((20..80).contains(&reads.count()));
        let mut idle = steps(Kind::Idle);
        assert_eq!((0..5).filter_map(|_| idle.next()).count(), 2);
        assert_eq!(idle.passes(), 1);
    }
}
