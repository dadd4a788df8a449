//! Where the disk has holes. A hole is told to the destination in a word instead of being read, however long
//! it is: chunks of it are locked as any other, but are longer, and are looked at once they are locked,
//! because the guest may have written there since.

use core::time::Duration;

use crate::action::{Action, ChunkSlot, Content, DiskOperation, DiskTag};
use crate::controller::governor::tuning::idle_window::QUICK;
use crate::controller::transfer::outgoing::Source;
use crate::controller::transfer::outgoing::delta::COMPARED_SECTORS;
use crate::controller::transfer::policy::Pass;
use crate::controller::transfer::window::ChunkKind;
use crate::controller::{Controller, MigrationOptions};
use crate::planted::PlantedBug;
use crate::request::RequestError;
use crate::units::{Extent, Lba, MAX_EXTENT_SECTORS};

/// Holes end at blocks of 4 KiB, as the chunks that follow them begin.
const BLOCK_SECTORS: u32 = 8;

/// What comes next in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing: the pass has come to its end.
    End,
    /// It is not known whether the extent is a hole.
    Look(Extent),
    /// The extent is to be locked.
    Lock(Extent, ChunkKind),
}

/// What is known of the disk from some place on, and how long a chunk of a hole may be.
#[derive(Debug)]
pub(super) struct Layout {
    start: Lba,
    end: Lba,
    kind: ChunkKind,
    length: HoleLength,
}

impl Layout {
    /// Nothing is known.
    pub(super) const fn new(options: &MigrationOptions) -> Self {
        Self {
            start: Lba(0),
            end: Lba(0),
            kind: ChunkKind::Data,
            length: HoleLength::new(options),
        }
    }

    /// What the extent's start is part of, as far as that is known.
    fn at(&self, extent: Extent) -> Option<(Extent, ChunkKind)> {
        let known = (self.start..self.end).contains(&extent.start());
        let left = self.end.0.saturating_sub(extent.start().0);
        let sectors = left.min(u64::from(extent.sectors())) as u32;
        let part = Extent::new(extent.start(), sectors)?;
        known.then_some((part, self.kind))
    }

    fn learn(&mut self, extent: Extent, kind: ChunkKind) {
        (self.start, self.end, self.kind) = (extent.start(), extent.end(), kind);
    }

    /// A chunk of a hole was acknowledged `took` after it was locked.
    pub(super) fn hole_done(&mut self, took: Duration) {
        self.length.chunk_done(took);
    }
}

/// How long a chunk of a hole may be: a guest that writes there waits for it.
#[derive(Debug)]
struct HoleLength {
    sectors: u32,
    least: u32,
    limit: Duration,
    shortest: Duration,
}

impl HoleLength {
    const fn new(options: &MigrationOptions) -> Self {
        let limit = match options.wake_up_limit {
            Some(promised) if promised.as_nanos() < QUICK.as_nanos() => promised,
            _ => QUICK,
        };
        Self {
            sectors: options.chunk_sectors,
            least: options.chunk_sectors,
            limit,
            shortest: Duration::MAX,
        }
    }

    /// Longer ones may follow as long as they are quick, or take hardly longer than the shortest, which is what
    /// the way there and back takes. Where zeroes have to be written at the destination they take time by
    /// their length.
    fn chunk_done(&mut self, took: Duration) {
        self.shortest = self.shortest.min(took);
        self.sectors = if took <= self.limit.max(self.shortest * 3 / 2) {
            (self.sectors * 2).min(MAX_EXTENT_SECTORS)
        } else {
            (self.sectors / 2).max(self.least)
        };
    }
}

impl Source {
    /// What comes next in the pass, in chunks of `chunk_sectors` at most, but for holes.
    pub(super) fn next_chunk(&self, chunk_sectors: u32) -> Next {
        let head = self.window.pointers.read_head;
        let up_to = |limit: u32| match (self.pass, &self.dirty) {
            (Pass::VerifyDirty { .. }, Some(dirty)) => dirty.next_run(head, limit),
            (pass, _) => match self.wanted_blocks() {
                Some(wanted) => wanted.next_run(head, limit),
                None => self.policy.next(pass, head, limit, self.capacity),
            },
        };
        let most = match self.pass {
            Pass::Compare => chunk_sectors.min(COMPARED_SECTORS),
            _ => chunk_sectors,
        };
        let Some(chunk) = up_to(most) else {
            return Next::End;
        };
        let scattered = self.pass.is_scattered() || self.wanted_blocks().is_some();
        if scattered || !self.options.find_holes {
            return Next::Lock(chunk, ChunkKind::Data);
        }
        let hole = up_to(self.layout.length.sectors).unwrap_or(chunk);
        match self.layout.at(hole) {
            None => Next::Look(hole),
            Some((part, ChunkKind::Hole)) => Next::Lock(part, ChunkKind::Hole),
            // Where it reaches into a hole, zeroes are found in what is read.
            Some((_, ChunkKind::Data)) => Next::Lock(chunk, ChunkKind::Data),
        }
    }

    /// What follows the read head turned out to begin with a hole of so many sectors. A hole shorter than a
    /// chunk is part of that: its blocks of zeroes are left out where the chunk is sent.
    fn learn(&mut self, looked_at: Extent, hole: u32) {
        let whole = hole >= looked_at.sectors();
        let chunk = self.options.chunk_sectors;
        let (sectors, kind) = if whole || hole >= chunk {
            (hole, ChunkKind::Hole)
        } else {
            (chunk, ChunkKind::Data)
        };
        let sectors = sectors.min(looked_at.sectors());
        if let Some(known) = Extent::new(looked_at.start(), sectors) {
            self.layout.learn(known, kind);
        }
    }
}

/// The sectors of a hole that the body reported, in whole blocks; none of one that it could not report.
fn found(looked_at: Extent, result: Result<Content, RequestError>) -> u32 {
    match result {
        Ok(Content::Hole(sectors)) if sectors >= looked_at.sectors() => looked_at.sectors(),
        Ok(Content::Hole(sectors)) => sectors - sectors % BLOCK_SECTORS,
        _ => 0,
    }
}

impl Controller {
    /// Asks the body whether the extent, from the read head on, is a hole.
    pub(super) fn look_ahead(&mut self, extent: Extent) {
        if self.looking_at.is_none() {
            self.looking_at = Some(extent);
            self.act(Action::Disk {
                tag: DiskTag::Layout,
                operation: DiskOperation::FindHole { extent },
            });
        }
    }

    /// The body answered. What it says may be about a migration that is over: nobody relies on it.
    pub(in crate::controller) fn layout_found(&mut self, result: Result<Content, RequestError>) {
        let Some(extent) = self.looking_at.take() else {
            return;
        };
        if let Some(source) = &mut self.source {
            source.learn(extent, found(extent, result));
            self.pump();
        }
    }

    /// The body has looked at a chunk that was a hole before it was locked.
    pub(super) fn hole_looked_at(
        &mut self,
        slot: ChunkSlot,
        result: Result<Content, RequestError>,
    ) {
        let trusts = self.has_bug(PlantedBug::TrustHoles);
        let Some(source) = &mut self.source else {
            return;
        };
        let Some(extent) = source.window.get(slot).map(|chunk| chunk.extent) else {
            return;
        };
        let hole = if trusts {
            extent.sectors()
        } else {
            found(extent, result)
        };
        let waiters = source.window.looked(slot, hole);
        if hole < extent.sectors() {
            let rest = Lba(extent.start().0 + u64::from(hole));
            if let Some(rest) = Extent::new(rest, extent.sectors() - hole) {
                source.learn(rest, 0);
                source
                    .policy
                    .give_up(source.pass, core::iter::once(rest), rest.start());
            }
        }
        self.wake(waiters);
        let Some(source) = &mut self.source else {
            return;
        };
        if source.lets_writes_through()
            && let Some(waiters) = source.unlock(extent)
        {
            self.wake(waiters);
        }
        self.send_read_chunks();
        self.pump();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MigrationId;

    /// The length after many chunks that take `path`, and so much more for each MiB.
    fn settled(path: Duration, each: Duration, promised: Option<Duration>) -> u32 {
        let mut length = HoleLength::new(&MigrationOptions {
            wake_up_limit: promised,
            ..MigrationOptions::new(MigrationId([1; 16]))
        });
        for _ in 0..100 {
            length.chunk_done(path + each * (length.sectors / 2048));
        }
        length.sectors / 2048
    }

    #[test]
    fn holes_are_told_in_long_chunks_unless_that_takes_time_by_their_length() {
        let (none, ms) = (Duration::ZERO, Duration::from_millis(1));
        assert_eq!(settled(none, none, None), 32);
        assert_eq!(settled(50 * ms, none, None), 32, "a long way");
        assert!((8..=16).contains(&settled(none, ms, None)), "a slow disk");
        let promised = Some(Duration::from_millis(2));
        assert!((2..=4).contains(&settled(none, ms, promised)));
        assert!(settled(none, 100 * ms, promised) <= 2);
    }
}
