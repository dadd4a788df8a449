//! Verification: passes in which both nodes read and compare, whichever policy brought the data.

use crate::action::ChunkSlot;
use crate::controller::Controller;
use crate::controller::transfer::dirty::DirtyBitmap;
use crate::controller::transfer::outgoing::Source;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::transfer::policy::Pass;
use crate::event::AbortReason;
use crate::request::RequestError;
use crate::units::Generation;

/// Verification passes are repeated over what was written meanwhile until no more than this many
/// 4 KiB blocks are left; those are compared while the guest is held.
const FREEZE_BLOCKS: u64 = 64;

/// While the switchover waits for the guest's hypervisor, blocks are compared again when more than
/// this many were written.
const CONVERGED_BLOCKS: u64 = 16;

/// After this many passes the guest is held however many blocks are left.
pub(super) const MAX_VERIFY_PASSES: u32 = 10;

impl Source {
    /// The comparing pass that follows the one which came to its end, if one does. The last blocks are compared
    /// while the guest is held.
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

    /// Blocks that were written since they were compared.
    pub(super) fn dirty_blocks(&self) -> u64 {
        self.dirty.as_ref().map_or(0, DirtyBitmap::count)
    }
}

impl Controller {
    /// The destination compared a chunk.
    pub(in crate::controller) fn chunk_compared(
        &mut self,
        slot: ChunkSlot,
        generation: Generation,
        result: Result<bool, RequestError>,
    ) {
        let Some(source) = &mut self.source else {
            return;
        };
        source.last_heard = self.now;
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
            Ok(false) => {
                source.mismatch = source.window.get(slot).map(|chunk| chunk.extent);
                self.abort_source(AbortReason::VerifyMismatch);
            }
            Err(_) => {
                self.abort_source(AbortReason::DestinationDisk);
            }
        }
    }

    /// While the guest runs on behind double writes, what it wrote is compared before that becomes
    /// more than can be compared in the moment in which it stands still.
    pub(super) fn compare_again(&mut self) {
        let Some(source) = &mut self.source else {
            return;
        };
        let again = source.stage == Stage::Converged
            && source.options.verify
            && source.pause.is_none()
            && source.dirty_blocks() > CONVERGED_BLOCKS;
        if again {
            self.begin_pass(Pass::VerifyDirty { number: 2 });
            self.pump();
        }
    }
}
