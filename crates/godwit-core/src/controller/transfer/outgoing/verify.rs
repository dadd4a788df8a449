//! Verification: passes in which both nodes read and compare, whichever policy brought the data.

use crate::action::ChunkSlot;
use crate::controller::Controller;
use crate::controller::block_set::BlockSet;
use crate::controller::transfer::outgoing::Source;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::transfer::pass::Pass;
use crate::event::AbortReason;
use crate::request::RequestError;
use crate::units::Generation;

/// Maximum number of 4 KiB blocks left for comparison while the guest is held. Verification passes over the blocks
/// written meanwhile are repeated until no more are left.
const FREEZE_BLOCKS: u64 = 64;

/// Number of written blocks after which blocks are compared again while the switchover waits for the guest's
/// hypervisor.
const CONVERGED_BLOCKS: u64 = 16;

/// Passes after which the guest is held, whatever the number of blocks left.
pub(super) const MAX_VERIFY_PASSES: u32 = 10;

impl Source {
    /// Returns the comparing pass that follows the finished pass, if any. The last blocks are compared while the guest
    /// is held.
    pub(super) fn next_comparison(&self) -> Option<Pass> {
        if !self.options.verify {
            return None;
        }
        match self.pass {
            Pass::Copy | Pass::Compare | Pass::Resend { .. } => Some(Pass::VerifyAll),
            Pass::VerifyAll | Pass::VerifyDirty { .. } if self.dirty_blocks() <= FREEZE_BLOCKS => {
                None
            }
            Pass::VerifyAll => Some(Pass::VerifyDirty { number: 2 }),
            Pass::VerifyDirty { number } => {
                (number < MAX_VERIFY_PASSES).then_some(Pass::VerifyDirty { number: number + 1 })
            }
        }
    }

    /// Returns true if the guest has written to the chunk since its comparison began. The chunk's other blocks may
    /// differ, so the whole chunk is compared again.
    fn is_written_meanwhile(&mut self, slot: ChunkSlot) -> bool {
        let (Some(extent), Some(dirty)) = (
            self.window.get(slot).map(|chunk| chunk.extent),
            &mut self.dirty,
        ) else {
            return false;
        };
        let written = dirty.touches(extent);
        if written {
            dirty.set(extent);
        }
        written
    }

    /// Returns the number of blocks written since they were compared.
    pub(super) fn dirty_blocks(&self) -> u64 {
        self.dirty.as_ref().map_or(0, BlockSet::count)
    }
}

impl Controller {
    /// Handles the destination's comparison of a chunk.
    pub(in crate::controller) fn chunk_compared(
        &mut self,
        slot: ChunkSlot,
        generation: Generation,
        result: Result<bool, RequestError>,
    ) {
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        source.peer.last_heard = self.cx.now;
        if source.generation != generation || source.pass.copies() {
            return;
        }
        match result {
            Ok(true) => self.chunk_done(slot),
            Ok(false) if source.pass == Pass::Compare => {
                let extent = source.window.get(slot).map(|chunk| chunk.extent);
                extent.into_iter().for_each(|extent| source.differs(extent));
                self.chunk_done(slot);
            }
            Ok(false) if source.is_written_meanwhile(slot) => self.chunk_done(slot),
            Ok(false) => {
                source.mismatch = source.window.get(slot).map(|chunk| chunk.extent);
                self.abort_source(AbortReason::VerifyMismatch);
            }
            Err(_) => {
                self.abort_source(AbortReason::DestinationDisk);
            }
        }
    }

    /// Compares blocks again before the running guest's writes exceed the comparisons allowed for a freeze.
    pub(super) fn compare_again(&mut self) {
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let again = source.stage == Stage::Converged
            && source.options.verify
            && source.pauses.current.is_none()
            && source.dirty_blocks() > CONVERGED_BLOCKS;
        if again {
            self.outgoing
                .begin_pass(&mut self.cx, Pass::VerifyDirty { number: 2 });
            self.pump();
        }
    }
}
