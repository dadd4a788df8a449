//! Checkpoints: make arrived data durable, and then the fact that it has arrived.

use crate::action::{Action, DiskOperation, DiskTag};
use crate::controller::Controller;
use crate::controller::requests::slots::{TagList, WorkStage};
use crate::controller::transfer::remainder::lacking::Lacking;
use crate::controller::transfer::remainder::lacking::pulling::REST;
use crate::controller::transfer::remainder::missing::WordPiece;
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::Time;
use crate::wire::{Message, TrafficClass};

/// Blocks that may arrive before a checkpoint begins without a request: 64 MiB. After a power loss these blocks would
/// be pulled again.
const BLOCKS: u64 = (64 << 20) / 4096;

/// Progress of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checkpoint {
    /// None is under way.
    None,
    /// Data that arrived before the checkpoint is being made durable.
    Flushing,
    /// The list of missing blocks is being stored.
    Storing,
    /// The record of a whole disk is being stored.
    Ending,
}

impl Lacking {
    /// Moves the changed pieces to the pieces being stored. Blocks that arrived after the flush began are stored the
    /// next time.
    fn begin_to_store(&mut self) {
        self.storing = core::mem::replace(&mut self.changed, self.storing.like());
        for piece in self.young.groups() {
            self.changed.set_number(piece);
        }
    }

    fn to_store(&self) -> impl Iterator<Item = WordPiece> {
        self.storing.numbers().map(|piece| {
            let (missing, young) = (self.missing.piece(piece), self.young.group(piece));
            (piece, core::array::from_fn(|at| missing[at] | young[at]))
        })
    }

    /// Returns true if the other node can be told, once the checkpoint is durable, about its release: none of its
    /// blocks are missing here.
    fn owes_word(&self) -> bool {
        self.needs_source() && !self.missing.needs_source()
    }
}

impl Controller {
    /// Returns true if a flush, or a write that must be durable, has to wait for a checkpoint.
    #[inline]
    pub(in crate::controller) fn needs_checkpoint(&self) -> bool {
        self.lacking.as_ref().is_some_and(|lacking| lacking.unsaved)
            && !self.cx.has_bug(PlantedBug::FlushWithoutCheckpoint)
    }

    /// Answers the request after a checkpoint that begins now or later.
    pub(in crate::controller) fn wait_for_checkpoint(&mut self, tag: RequestTag) {
        self.cx.slots[tag].stage = WorkStage::Storing;
        if let Some(lacking) = &mut self.lacking {
            self.cx.slots.push(&mut lacking.for_next, tag);
        }
        self.begin_checkpoint();
    }

    /// Begins a checkpoint once enough blocks have arrived, or the whole disk.
    pub(super) fn checkpoint_if_due(&mut self) {
        let due = self.lacking.as_ref().is_some_and(|lacking| {
            lacking.missing.blocks().count() == 0
                || lacking.young.count() >= BLOCKS
                || lacking.owes_word()
        });
        if due {
            self.begin_checkpoint();
        }
    }

    fn begin_checkpoint(&mut self) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        if lacking.checkpoint != Checkpoint::None {
            return;
        }
        lacking.checkpoint = Checkpoint::Flushing;
        lacking.young.empty();
        lacking.for_this = core::mem::replace(&mut lacking.for_next, TagList::EMPTY);
        self.cx.act(Action::Disk {
            tag: DiskTag::Checkpoint,
            operation: DiskOperation::Flush,
        });
    }

    /// Handles the end of the checkpoint's flush.
    pub(in crate::controller) fn checkpoint_flushed(&mut self, result: Result<(), RequestError>) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        match result {
            Ok(()) => {
                lacking.checkpoint = Checkpoint::Storing;
                lacking.begin_to_store();
                self.cx.act(Action::StoreMissing);
            }
            Err(error) => {
                lacking.checkpoint = Checkpoint::None;
                lacking.resumes = Some(self.cx.now.after(REST));
                self.end_checkpoint(Err(error));
            }
        }
    }

    /// Returns the content for [`Action::StoreMissing`]: the pieces of [`Missing`](crate::Missing) that have changed
    /// since the last store. For the first store of a disk this means all pieces together with
    /// [`Missing::heat_pieces`](crate::Missing::heat_pieces) and
    /// [`Missing::pieces_at_source`](crate::Missing::pieces_at_source); pieces not named lack nothing. Blocks that
    /// arrived after the flush began may not be durable, so they count as missing.
    pub fn missing_to_store(&self) -> Option<Vec<WordPiece>> {
        let lacking = self.lacking.as_ref()?;
        Some(lacking.to_store().collect())
    }

    /// Notes that the content of [`Action::StoreMissing`] is durable.
    pub fn handle_missing_stored(&mut self, now: Time) {
        self.cx.now = now;
        if let Some(destination) = &mut self.destination
            && core::mem::take(&mut destination.storing_missing)
        {
            // The list of missing blocks was the last item that had to become durable.
            let effects = self.cx.authority.flushed();
            self.apply(effects);
            return self.run_ready();
        }
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        if lacking.checkpoint != Checkpoint::Storing {
            return;
        }
        lacking.checkpoint = Checkpoint::None;
        lacking.unsaved = lacking.young.count() > 0;
        if lacking.owes_word() && !lacking.missing.was_at_source(&lacking.young) {
            lacking.is_repaid = true;
            self.tell_of_repayment();
        }
        self.end_checkpoint(Ok(()));
        self.store_that_it_is_whole();
        self.run_ready();
    }

    /// Stores the record of a whole disk, if the whole disk is durably here and this node's ownership is stored. The
    /// store waits for outstanding pulls, so that no data arrives unasked.
    pub(in crate::controller) fn store_that_it_is_whole(&mut self) {
        // A departing disk changes its ownership record only by its departure.
        let leaves = self.outgoing.source.is_some();
        let Some(lacking) = self.lacking.as_mut().filter(|_| !leaves) else {
            return;
        };
        let rests = matches!(lacking.checkpoint, Checkpoint::None | Checkpoint::Ending);
        if rests
            && lacking.missing.blocks().count() == 0
            && !lacking.unsaved
            && lacking.nothing_comes()
        {
            lacking.checkpoint = Checkpoint::Ending;
            let effects = self.cx.authority.whole();
            self.apply(effects);
        }
    }

    /// Tells the node that gave the disk away about its release, if the node is no longer needed. Blocks of the image
    /// may still be missing.
    pub(super) fn tell_of_repayment(&mut self) {
        let repaid = self.lacking.as_ref().filter(|lacking| lacking.is_repaid);
        if let Some(migration) = repaid.map(|lacking| lacking.migration)
            && self.pull_link.is_up()
        {
            self.cx
                .send(TrafficClass::Pull, Message::Whole { migration });
        }
    }

    /// Answers the requests that waited for the checkpoint, and begins the next checkpoint if others wait.
    fn end_checkpoint(&mut self, result: Result<(), RequestError>) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        let mut waited = core::mem::replace(&mut lacking.for_this, TagList::EMPTY);
        while let Some(tag) = self.cx.slots.pop(&mut waited) {
            self.cx.slots[tag].stage = WorkStage::Done;
            self.cx.slots[tag].result = result;
            self.finish(tag);
        }
        let again = self
            .lacking
            .as_ref()
            .is_some_and(|lacking| !lacking.for_next.is_empty());
        if again {
            self.begin_checkpoint();
        } else if result.is_ok() {
            self.checkpoint_if_due_again();
        }
    }

    /// More blocks may have arrived during the checkpoint.
    fn checkpoint_if_due_again(&mut self) {
        if self.needs_checkpoint() {
            self.checkpoint_if_due();
        }
    }
}
