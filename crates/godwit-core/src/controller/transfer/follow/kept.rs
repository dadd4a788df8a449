//! The writes behind each checkpoint of a disk that follows, which are kept apart from the disk until told otherwise.
//!
//! ```text
//!  source                             destination
//!  ══ writes of epoch 1 ═════════════► to the disk
//!  ── CheckpointMark(1) ─────────────► CheckpointMarked(1) once they are there
//!  ══ writes of epoch 2 ═════════════► kept
//!  ── CheckpointMark(2) ─────────────► CheckpointMarked(2)
//!  ══ writes of epoch 3 ═════════════► kept
//!                                      apply_checkpoints(2): epoch 2 goes to the disk
//!                                      take: epoch 3 is dropped
//! ```
//!
//! Nothing goes on from a disk before its first checkpoint, so the writes of epoch 1 need not be kept: a long first copy
//! of the machine's memory costs no space here.

use crate::action::{Action, Content, DiskOperation, DiskTag};
use crate::controller::Controller;
use crate::controller::requests::slots::{TagList, Work, WorkStage};
use crate::controller::transfer::receive::Destination;
use crate::event::{AbortReason, Event};
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, MigrationId, Time};

/// Maximum bytes kept and acknowledged while earlier writes are being applied. Further writes are acknowledged once those
/// are on the disk, so the source, and the guest with it, learns the disk's speed.
const MOST_BYTES: u64 = 64 << 20;

/// The checkpoints of a disk that follows here; 0 stands for none.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::controller) struct Kept {
    /// The last checkpoint whose mark has come.
    marked: u64,
    /// The last checkpoint with all its writes here.
    here: u64,
    /// The last checkpoint that is to be applied.
    ordered: u64,
    /// The last checkpoint that the body was told to apply.
    begun: u64,
    /// True while the body applies it.
    applying: bool,
    /// Bytes kept since then.
    bytes: u64,
    /// Kept writes that are not acknowledged.
    withheld: TagList,
}

impl Kept {
    /// Returns true once a checkpoint is to be applied.
    pub(in crate::controller) const fn is_begun(&self) -> bool {
        self.ordered > 0
    }
}

impl Destination {
    /// Returns the checkpoints of a disk that follows with them.
    pub(in crate::controller) fn kept(&mut self) -> Option<&mut Kept> {
        self.following.as_mut()?.kept.as_mut()
    }

    /// Returns the epoch of a write that comes now, if such writes are kept.
    pub(in crate::controller) fn kept_epoch(&self) -> Option<u64> {
        let kept = self.following?.kept?;
        (kept.marked > 0).then(|| kept.marked.saturating_add(1))
    }

    /// Returns true while kept writes are being applied.
    pub(in crate::controller) fn is_applying(&self) -> bool {
        let kept = self.following.and_then(|it| it.kept);
        kept.is_some_and(|kept| kept.applying)
    }
}

impl Controller {
    /// Keeps an arrived double write for the checkpoint that ends its epoch.
    pub(in crate::controller) fn keep(&mut self, tag: RequestTag, epoch: u64) {
        let slot = &mut self.cx.slots[tag];
        let (Work::DoubleWrite { zeroes, unmap, .. }, Some(extent)) = (slot.work, slot.extent)
        else {
            return;
        };
        slot.stage = WorkStage::Here {
            at_disk: true,
            at_destination: false,
        };
        let operation = match zeroes {
            true => DiskOperation::KeepZeroes {
                extent,
                unmap,
                epoch,
            },
            false => DiskOperation::Keep { extent, epoch },
        };
        let tag = DiskTag::Replica(tag);
        self.cx.act(Action::Disk { tag, operation });
    }

    /// Withholds the acknowledgement of a finished frame while too much was kept. Nothing but a kept write finishes while
    /// others are applied. Returns false if the frame is to be answered.
    pub(in crate::controller) fn withhold(&mut self, tag: RequestTag) -> bool {
        let kept = self.destination.as_mut().and_then(Destination::kept);
        let Some(kept) = kept.filter(|it| it.applying) else {
            return false;
        };
        kept.bytes += self.cx.slots[tag].extent.map_or(0, Extent::bytes);
        let withheld = kept.bytes > MOST_BYTES;
        if withheld {
            self.cx.slots.push(&mut kept.withheld, tag);
        }
        withheld
    }

    /// Handles the source's mark of a checkpoint.
    pub(in crate::controller) fn checkpoint_marked(&mut self, migration: MigrationId, number: u64) {
        self.destination_heard();
        let receives = self.cx.authority.receiving() == Some(migration);
        let Some(destination) = self.destination.as_mut().filter(|_| receives) else {
            return;
        };
        if destination.following.is_some_and(|it| it.severed) {
            return;
        }
        match destination.kept() {
            Some(kept) if number.checked_sub(1) == Some(kept.marked) => kept.marked = number,
            _ => {
                self.cancel(self.cx.now, AbortReason::Protocol);
                return;
            }
        }
        self.tell_marked();
    }

    /// Tells of the checkpoints with all their writes here.
    pub(in crate::controller) fn tell_marked(&mut self) {
        let Some(migration) = self.cx.authority.receiving() else {
            return;
        };
        let arrived = self.destination.as_mut().filter(|it| it.in_flight == 0);
        let Some(kept) = arrived.and_then(Destination::kept) else {
            return;
        };
        while kept.here < kept.marked {
            kept.here += 1;
            let number = kept.here;
            self.cx
                .notify(Event::CheckpointMarked { migration, number });
        }
    }

    /// Applies the kept writes of all epochs up to this checkpoint to the disk, because the checkpoint is whole. Returns
    /// false unless [`Event::CheckpointMarked`] has told of the checkpoint, and the disk follows still.
    pub fn apply_checkpoints(&mut self, now: Time, number: u64) -> bool {
        self.cx.now = now;
        let receives = self.cx.authority.receiving().is_some();
        let destination = self.destination.as_mut().filter(|_| receives);
        let Some(kept) = destination.and_then(Destination::kept) else {
            return false;
        };
        let known = (1..=kept.here).contains(&number);
        if known {
            kept.ordered = kept.ordered.max(number);
        }
        self.apply_kept();
        known
    }

    /// Begins to apply what is to be applied, unless something is being applied.
    fn apply_kept(&mut self) {
        let kept = self.destination.as_mut().and_then(Destination::kept);
        if let Some(kept) = kept.filter(|it| it.begun < it.ordered && !it.applying) {
            kept.begun = kept.ordered;
            kept.applying = true;
            kept.bytes = 0;
            let through = kept.begun;
            self.cx.act(Action::ApplyKept { through });
        }
    }

    /// Handles the end of the last [`Action::ApplyKept`].
    pub fn handle_kept_applied(&mut self, now: Time, result: Result<(), RequestError>) {
        self.cx.now = now;
        let kept = self.destination.as_mut().and_then(Destination::kept);
        let Some(kept) = kept.filter(|it| it.applying) else {
            return;
        };
        kept.applying = false;
        let mut withheld = core::mem::take(&mut kept.withheld);
        match result {
            Ok(()) => {
                if self.cx.has_bug(PlantedBug::KeptClearedEarly) {
                    self.cx.act(Action::DropKept);
                }
                self.apply_kept();
            }
            Err(error) => {
                self.lose_write(error);
                let reason = AbortReason::of_destination(error);
                let effects = self.cx.authority.fail_taking(reason);
                self.apply(effects);
            }
        }
        while let Some(tag) = self.cx.slots.pop(&mut withheld) {
            self.answer_replica(tag, Ok(Content::Data), Ok(false));
        }
        self.flush_when_written();
        self.run_ready();
    }

    /// Drops the kept writes of a migration that has ended, or of epochs that the taken disk does not have.
    pub(in crate::controller) fn drop_kept(&mut self) {
        let kept = self.destination.as_mut().and_then(Destination::kept);
        if let Some(kept) = kept {
            kept.ordered = kept.begun;
            self.cx.act(Action::DropKept);
        }
    }
}
