//! Moves to a node with an older copy of the disk: only differences are sent.
//!
//! If the destination kept the image with which the disk came from there, this node knows the blocks written since. If
//! the image is uncertain, both nodes first read the disk and compare hashes, and differing blocks are sent. Blocks
//! written by the guest in the meantime count as different. A comparison costs both disks a whole read, and the link 64
//! bytes for each 64 KiB.
//!
//! All blocks that the guest writes during such a migration are added to the blocks to send, even if the writes go to
//! both nodes. A later pass of the window over the disk then covers the same blocks as in a whole copy.

use crate::controller::block_set::BlockSet;
use crate::controller::policy::Policy;
use crate::controller::transfer::differences::written::Written;
use crate::controller::transfer::heat::BLOCK_SECTORS;
use crate::controller::transfer::outgoing::{MAX_PULLED, Source};
use crate::controller::transfer::pass::Pass;
use crate::controller::{Controller, DeltaBy, DeltaProgress, OlderCopy};
use crate::planted::PlantedBug;
use crate::units::{Extent, Sectors};

/// Sectors compared at once: 64 KiB. All of them are sent if a byte differs.
pub(super) const COMPARED_SECTORS: u32 = 128;

/// Blocks of the disk that the destination lacks.
#[derive(Debug)]
pub(super) enum Wanted {
    /// The whole disk: the destination has nothing of use.
    All,
    /// Only the blocks written since the disk came from there.
    Written(Written),
    /// The differing blocks found so far by the comparison.
    Differing(BlockSet),
}

impl Wanted {
    /// Returns the blocks that a migration has to send, and its first pass.
    pub(super) fn new(
        written: &mut Option<Written>,
        older: OlderCopy,
        may_compare: bool,
        capacity: Sectors,
    ) -> (Self, Pass) {
        if let OlderCopy::Since(migration) = older
            && let Some(written) = written.take_if(|written| written.since() == migration)
        {
            return (Self::Written(written), Pass::Copy);
        }
        let compares = may_compare
            && !matches!(older, OlderCopy::None | OlderCopy::Zeroes)
            && capacity.bytes() <= MAX_PULLED;
        if compares {
            let nothing = BlockSet::new(capacity, BLOCK_SECTORS);
            return (Self::Differing(nothing), Pass::Compare);
        }
        (Self::All, Pass::Copy)
    }

    /// Returns the blocks; `None` for the whole disk.
    pub(super) const fn blocks(&self) -> Option<&BlockSet> {
        match self {
            Self::All => None,
            Self::Written(written) => Some(written.blocks()),
            Self::Differing(blocks) => Some(blocks),
        }
    }

    const fn blocks_mut(&mut self) -> Option<&mut BlockSet> {
        match self {
            Self::All => None,
            Self::Written(written) => Some(written.blocks_mut()),
            Self::Differing(blocks) => Some(blocks),
        }
    }
}

impl Source {
    /// Returns the blocks of the first copying pass, unless the pass covers the whole disk or the policy keeps the
    /// blocks itself.
    pub(super) fn wanted_blocks(&self) -> Option<&BlockSet> {
        match self.pass {
            Pass::Copy if !self.policy.pulls() => self.wanted.blocks(),
            _ => None,
        }
    }

    /// Notes a write of the guest.
    #[inline]
    pub(in crate::controller) fn guest_writes(&mut self, extent: Extent) {
        self.holes.written(extent);
        let ahead =
            self.wanted_blocks().is_some() && extent.start() >= self.window.pointers.read_head;
        if let Some(blocks) = self.wanted.blocks_mut() {
            let before = blocks.bytes();
            blocks.set(extent);
            if ahead {
                self.counters.pass_total += blocks.bytes() - before;
            }
        }
    }

    /// Notes a differing chunk.
    pub(super) fn differs(&mut self, extent: Extent) {
        if let Some(blocks) = self.wanted.blocks_mut() {
            blocks.set(extent);
        }
    }

    /// Ends a pass that has nothing left to lock: the destination has the rest of the disk. The blocks are not searched
    /// again while chunks are in flight.
    pub(super) fn end_delta(&mut self) {
        if self.wanted_blocks().is_some() {
            self.window.reach_end(self.capacity);
        }
    }

    /// Returns the data left out because the destination has a copy; `None` if the destination has nothing.
    pub(super) fn delta(&self) -> Option<DeltaProgress> {
        let by = match self.wanted {
            Wanted::All => return None,
            Wanted::Written(_) => DeltaBy::Written,
            Wanted::Differing(_) => DeltaBy::Compared,
        };
        Some(DeltaProgress {
            by,
            comparing: self.pass == Pass::Compare,
            bytes_skipped: self.counters.skipped,
        })
    }

    /// Counts the bytes left out by the first copying pass, which begins.
    pub(super) fn count_skipped(&mut self) {
        let wanted = self.wanted.blocks().map(BlockSet::bytes);
        let all = self.capacity.bytes().0;
        self.counters.skipped = wanted.map_or(0, |wanted| all.saturating_sub(wanted));
    }
}

impl Controller {
    /// Notes a write of the guest about to go to this node's image.
    #[inline]
    pub(in crate::controller) fn guest_writes(&mut self, extent: Extent) {
        if let Some(written) = &mut self.differences.written {
            written.mark(extent);
        }
        let forgets = self.cx.has_bug(PlantedBug::DeltaForgetsWrites);
        if !forgets && let Some(source) = &mut self.outgoing.source {
            source.guest_writes(extent);
        }
    }

    /// Returns the blocks written since the disk came here; `None` if they are not known for certain.
    pub fn written(&self) -> Option<&Written> {
        let leaving = self
            .outgoing
            .source
            .as_ref()
            .and_then(|source| source.written());
        leaving.or(self.differences.written.as_ref())
    }

    /// Restores the blocks written since the disk came here, as known to the previous process when it ended in order.
    /// To be called before the first request, and only if the image is unchanged.
    pub fn restore_written(&mut self, written: Written) {
        if self.cx.authority.may_serve() {
            self.differences.written = Some(written);
        }
    }
}

impl Source {
    const fn written(&self) -> Option<&Written> {
        match &self.wanted {
            Wanted::Written(written) => Some(written),
            Wanted::All | Wanted::Differing(_) => None,
        }
    }

    /// Returns the blocks written since the disk came here, if known: the migration is over, and the disk stays.
    pub(super) fn take_written(&mut self) -> Option<Written> {
        match core::mem::replace(&mut self.wanted, Wanted::All) {
            Wanted::Written(written) => Some(written),
            Wanted::All | Wanted::Differing(_) => None,
        }
    }
}
