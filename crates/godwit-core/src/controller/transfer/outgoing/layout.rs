//! Holes of the disk. A hole of any length is announced to the destination in one frame instead of being read. Chunks
//! of a hole are locked like any other chunks but are longer. A locked chunk is examined again, because the guest may
//! have written there since.

use core::time::Duration;

use crate::action::{Action, ChunkSlot, Content, DiskOperation, DiskTag};
use crate::controller::cx::Cx;
use crate::controller::governor::tuning::idle_window::QUICK;
use crate::controller::policy::Policy;
use crate::controller::transfer::outgoing::delta::COMPARED_SECTORS;
use crate::controller::transfer::outgoing::{Outgoing, Source};
use crate::controller::transfer::pass::Pass;
use crate::controller::transfer::window::ChunkKind;
use crate::controller::{Controller, MigrationOptions};
use crate::planted::PlantedBug;
use crate::request::RequestError;
use crate::units::{Extent, Lba, MAX_EXTENT_SECTORS};

/// Unit of a hole's end, because the following chunk begins there: 4 KiB.
const BLOCK_SECTORS: u32 = 8;

/// The next step of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The pass has ended.
    End,
    /// Examine the extent, which may be a hole.
    Look(Extent),
    /// Lock the extent.
    Lock(Extent, ChunkKind),
}

/// Knowledge about the disk from some place on, and the maximum length of a hole's chunk.
#[derive(Debug)]
pub(super) struct Layout {
    start: Lba,
    end: Lba,
    kind: ChunkKind,
    length: HoleLength,
}

impl Layout {
    /// Starts without knowledge.
    pub(super) const fn new(options: &MigrationOptions) -> Self {
        Self {
            start: Lba(0),
            end: Lba(0),
            kind: ChunkKind::Data,
            length: HoleLength::new(options),
        }
    }

    /// Returns the known part at the extent's start, and its kind.
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

    /// Notes a hole's chunk acknowledged `took` after its lock.
    pub(super) fn hole_done(&mut self, took: Duration) {
        self.length.chunk_done(took);
    }
}

/// Maximum length of a hole's chunk: a guest that writes there waits for the chunk.
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

    /// Allows longer chunks while chunks are quick, or hardly slower than the quickest, which measures the round trip.
    /// Zeroes that have to be written at the destination take time by their length.
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
    /// Returns the next step of the pass, in chunks of at most `chunk_sectors`, except for holes.
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
            // Zeroes of a hole inside the chunk are found when the chunk is read.
            Some((_, ChunkKind::Data)) => Next::Lock(chunk, ChunkKind::Data),
        }
    }

    /// Notes that the extent behind the read head begins with a hole of `hole` sectors. A hole shorter than a chunk
    /// becomes part of a chunk, whose blocks of zeroes are left out when the chunk is sent.
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

/// Returns the sectors of the reported hole in whole blocks; zero if the body could not report a hole.
fn found(looked_at: Extent, result: Result<Content, RequestError>) -> u32 {
    match result {
        Ok(Content::Hole(sectors)) if sectors >= looked_at.sectors() => looked_at.sectors(),
        Ok(Content::Hole(sectors)) => sectors - sectors % BLOCK_SECTORS,
        _ => 0,
    }
}

impl Outgoing {
    /// Asks the body if the extent, from the read head on, is a hole.
    pub(super) fn look_ahead(&mut self, cx: &mut Cx, extent: Extent) {
        if self.looking_at.is_none() {
            self.looking_at = Some(extent);
            cx.act(Action::Disk {
                tag: DiskTag::Layout,
                operation: DiskOperation::FindHole { extent },
            });
        }
    }
}

impl Controller {
    /// Handles the body's answer. The answer may belong to a finished migration, so nothing relies on it.
    pub(in crate::controller) fn layout_found(&mut self, result: Result<Content, RequestError>) {
        let Some(extent) = self.outgoing.looking_at.take() else {
            return;
        };
        if let Some(source) = &mut self.outgoing.source {
            source.learn(extent, found(extent, result));
            self.pump();
        }
    }

    /// Handles the body's second look at a hole's chunk after the chunk was locked.
    pub(super) fn hole_looked_at(
        &mut self,
        slot: ChunkSlot,
        result: Result<Content, RequestError>,
    ) {
        let trusts = self.cx.has_bug(PlantedBug::TrustHoles);
        let Some(source) = &mut self.outgoing.source else {
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
        self.cx.wake(waiters);
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        if source.lets_writes_through()
            && let Some(waiters) = source.unlock(extent)
        {
            self.cx.wake(waiters);
        }
        self.outgoing.send_read_chunks(&mut self.cx);
        self.pump();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::MigrationId;

    /// Returns the length after many chunks that take `path`, plus `each` for each MiB.
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
