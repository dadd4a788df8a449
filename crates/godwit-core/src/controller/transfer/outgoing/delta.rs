//! A disk that goes to a node which has an older copy of it: only what differs is sent.
//!
//! Where the destination kept the image with which the disk came from there, this node knows what was written since.
//! Where that is not certain, both nodes read the disk and compare hashes first, and what differs is sent; what the
//! guest writes meanwhile is taken to differ. A comparison costs both disks a whole read and the link 64 bytes for
//! each 64 KiB.
//!
//! Whatever the guest writes while such a migration runs is added to what has to be sent, whether it goes to both
//! nodes or not. So wherever the window goes over the disk again, it finds what it would find in a whole copy.

use crate::controller::transfer::differences::written::Written;
use crate::controller::transfer::dirty::DirtyBitmap;
use crate::controller::transfer::outgoing::{MAX_PULLED, Source};
use crate::controller::transfer::policy::{Pass, Policy};
use crate::controller::transfer::push_pull::BLOCK_SECTORS;
use crate::controller::{Controller, DeltaBy, DeltaProgress, OlderCopy, PolicyOptions};
use crate::planted::PlantedBug;
use crate::units::{Extent, Sectors};

/// A comparison looks at so much at once: 64 KiB. All of it is sent where a byte differs.
pub(super) const COMPARED_SECTORS: u32 = 128;

/// What of the disk the destination does not have.
#[derive(Debug)]
pub(super) enum Wanted {
    /// It has nothing that is of use.
    All,
    /// Nothing but what was written since the disk came from there.
    Written(Written),
    /// What was found to differ, as far as the comparison has come.
    Differing(DirtyBitmap),
}

impl Wanted {
    /// What a migration has to send, and the pass with which it begins.
    pub(super) fn new(
        written: &mut Option<Written>,
        older: OlderCopy,
        policy: PolicyOptions,
        capacity: Sectors,
    ) -> (Self, Pass) {
        if let OlderCopy::Since(migration) = older
            && let Some(written) = written.take_if(|written| written.since() == migration)
        {
            return (Self::Written(written), Pass::Copy);
        }
        // Who pushes and pulls wants the disk to leave soon.
        let compares = !matches!(policy, PolicyOptions::PushPull(_))
            && !matches!(older, OlderCopy::None | OlderCopy::Zeroes)
            && capacity.bytes() <= MAX_PULLED;
        if compares {
            let nothing = DirtyBitmap::new(capacity, BLOCK_SECTORS);
            return (Self::Differing(nothing), Pass::Compare);
        }
        (Self::All, Pass::Copy)
    }

    /// The blocks; nothing where that is all of the disk.
    pub(super) const fn blocks(&self) -> Option<&DirtyBitmap> {
        match self {
            Self::All => None,
            Self::Written(written) => Some(written.blocks()),
            Self::Differing(blocks) => Some(blocks),
        }
    }

    const fn blocks_mut(&mut self) -> Option<&mut DirtyBitmap> {
        match self {
            Self::All => None,
            Self::Written(written) => Some(written.blocks_mut()),
            Self::Differing(blocks) => Some(blocks),
        }
    }
}

impl Source {
    /// The blocks that the first copying pass goes over, where those are not all, and its policy does not keep them
    /// itself.
    pub(super) const fn wanted_blocks(&self) -> Option<&DirtyBitmap> {
        match (self.pass, &self.policy) {
            (_, Policy::PushPull(_)) => None,
            (Pass::Copy, _) => self.wanted.blocks(),
            _ => None,
        }
    }

    /// The guest writes here.
    #[inline]
    pub(in crate::controller) fn guest_writes(&mut self, extent: Extent) {
        self.holes.written(extent);
        let ahead =
            self.wanted_blocks().is_some() && extent.start() >= self.window.pointers.read_head;
        if let Some(blocks) = self.wanted.blocks_mut() {
            let before = blocks.bytes();
            blocks.set(extent);
            if ahead {
                self.pass_total += blocks.bytes() - before;
            }
        }
    }

    /// A chunk turned out to differ.
    pub(super) fn differs(&mut self, extent: Extent) {
        if let Some(blocks) = self.wanted.blocks_mut() {
            blocks.set(extent);
        }
    }

    /// The pass has nothing left to lock: of the rest of the disk nothing is wanted, so that the destination has it. It
    /// is not looked through again for as long as chunks are on their way.
    pub(super) fn end_delta(&mut self) {
        if self.wanted_blocks().is_some() {
            self.window.reach_end(self.capacity);
        }
    }

    /// What is not sent, because the destination has it; nothing where it has nothing.
    pub(super) fn delta(&self) -> Option<DeltaProgress> {
        let by = match self.wanted {
            Wanted::All => return None,
            Wanted::Written(_) => DeltaBy::Written,
            Wanted::Differing(_) => DeltaBy::Compared,
        };
        Some(DeltaProgress {
            by,
            comparing: self.pass == Pass::Compare,
            bytes_skipped: self.skipped,
        })
    }

    /// The first copying pass begins: what it leaves out.
    pub(super) fn count_skipped(&mut self) {
        let wanted = self.wanted.blocks().map(DirtyBitmap::bytes);
        let all = self.capacity.bytes().0;
        self.skipped = wanted.map_or(0, |wanted| all.saturating_sub(wanted));
    }
}

impl Controller {
    /// The guest is about to write here, in this node's image.
    #[inline]
    pub(in crate::controller) fn guest_writes(&mut self, extent: Extent) {
        if let Some(written) = &mut self.written {
            written.mark(extent);
        }
        let forgets = self.has_bug(PlantedBug::DeltaForgetsWrites);
        if !forgets && let Some(source) = &mut self.source {
            source.guest_writes(extent);
        }
    }

    /// What was written since the disk came here; nothing where that is not known for certain.
    pub fn written(&self) -> Option<&Written> {
        let leaving = self.source.as_ref().and_then(|source| source.written());
        leaving.or(self.written.as_ref())
    }

    /// What was written since the disk came here, as the process before this one knew when it ended in order. To be
    /// given before the first request, and only if the image is as it was then.
    pub fn restore_written(&mut self, written: Written) {
        if self.authority.may_serve() {
            self.written = Some(written);
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

    /// The migration is over, and the disk stays: what was written since it came here, if that is known.
    pub(super) fn take_written(&mut self) -> Option<Written> {
        match core::mem::replace(&mut self.wanted, Wanted::All) {
            Wanted::Written(written) => Some(written),
            Wanted::All | Wanted::Differing(_) => None,
        }
    }
}
