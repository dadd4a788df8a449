//! Makes durable what has come here, and then that it has.

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

/// So many blocks may come here before that is made durable though nobody asked: 64 MiB. After a power loss they
/// would be pulled again.
const BLOCKS: u64 = (64 << 20) / 4096;

/// How far a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checkpoint {
    /// None is under way.
    None,
    /// What came here before it began is being made durable.
    Flushing,
    /// That it has come is being stored.
    Storing,
    /// That all of the disk is here is being stored as a part of who owns it.
    Ending,
}

impl Lacking {
    /// What was changed is stored, but for what has come since the flush began: that is stored the next time.
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

    /// Whether the other node can be told, once that is durable, that nothing of what it has is missing here.
    fn owes_word(&self) -> bool {
        self.needs_source() && !self.missing.needs_source()
    }
}

impl Controller {
    /// Whether a flush, or a write that must be durable, has to wait for a checkpoint.
    #[inline]
    pub(in crate::controller) fn needs_checkpoint(&self) -> bool {
        self.lacking.as_ref().is_some_and(|lacking| lacking.unsaved)
            && !self.has_bug(PlantedBug::FlushWithoutCheckpoint)
    }

    /// The request is answered after a checkpoint that begins now or later.
    pub(in crate::controller) fn wait_for_checkpoint(&mut self, tag: RequestTag) {
        self.slots[tag].stage = WorkStage::Storing;
        if let Some(lacking) = &mut self.lacking {
            self.slots.push(&mut lacking.for_next, tag);
        }
        self.begin_checkpoint();
    }

    /// Begins a checkpoint once enough has come here, or all of the disk.
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
        self.act(Action::Disk {
            tag: DiskTag::Checkpoint,
            operation: DiskOperation::Flush,
        });
    }

    /// What came here before the checkpoint began is durable, or is not.
    pub(in crate::controller) fn checkpoint_flushed(&mut self, result: Result<(), RequestError>) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        match result {
            Ok(()) => {
                lacking.checkpoint = Checkpoint::Storing;
                lacking.begin_to_store();
                self.act(Action::StoreMissing);
            }
            Err(error) => {
                lacking.checkpoint = Checkpoint::None;
                lacking.resumes = Some(self.now.after(REST));
                self.end_checkpoint(Err(error));
            }
        }
    }

    /// What [`Action::StoreMissing`] has to store: the pieces of [`Missing`](crate::Missing) that have changed since it was
    /// stored last. Where nothing of this disk was stored, it is all pieces, [`Missing::heat_pieces`](crate::Missing::heat_pieces) and
    /// [`Missing::pieces_at_source`](crate::Missing::pieces_at_source) belong to it, and pieces that are not named lack
    /// nothing. What has come here since the flush began may not be durable, so it counts as missing.
    pub fn missing_to_store(&self) -> Option<Vec<WordPiece>> {
        let lacking = self.lacking.as_ref()?;
        Some(lacking.to_store().collect())
    }

    /// What [`Action::StoreMissing`] asked for is durable.
    pub fn handle_missing_stored(&mut self, now: Time) {
        self.now = now;
        if let Some(destination) = &mut self.destination
            && core::mem::take(&mut destination.storing_missing)
        {
            // What the disk will lack was the last that had to become durable.
            let effects = self.authority.flushed();
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

    /// Stores that all of the disk is here, if it is, durably, and once it is stored that this node is the owner.
    /// Not before what was asked for has arrived, so that nothing arrives that nobody asked for.
    pub(in crate::controller) fn store_that_it_is_whole(&mut self) {
        // A disk that leaves says nothing else of who owns it meanwhile.
        let leaves = self.source.is_some();
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
            let effects = self.authority.whole();
            self.apply(effects);
        }
    }

    /// Tells the node that gave the disk away that it is needed no more, if that is so, though some of the image is
    /// missing.
    pub(super) fn tell_of_repayment(&mut self) {
        let repaid = self.lacking.as_ref().filter(|lacking| lacking.is_repaid);
        if let Some(migration) = repaid.map(|lacking| lacking.migration)
            && self.pull_is_up
        {
            self.send(TrafficClass::Pull, Message::Whole { migration });
        }
    }

    /// Those who waited for the checkpoint are answered, and another begins if there are others.
    fn end_checkpoint(&mut self, result: Result<(), RequestError>) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        let mut waited = core::mem::replace(&mut lacking.for_this, TagList::EMPTY);
        while let Some(tag) = self.slots.pop(&mut waited) {
            self.slots[tag].stage = WorkStage::Done;
            self.slots[tag].result = result;
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

    /// More may have come here while the checkpoint lasted.
    fn checkpoint_if_due_again(&mut self) {
        if self.needs_checkpoint() {
            self.checkpoint_if_due();
        }
    }
}
