//! The image that stays where a disk was: it is the disk as it was when it changed hands, once everything in it is
//! durable, and as long as nobody writes to it. If the disk comes back, only what was written since has to be sent.

use crate::action::{Action, DiskOperation, DiskTag};
use crate::controller::Controller;
use crate::event::Event;
use crate::planted::PlantedBug;
use crate::request::RequestError;
use crate::units::MigrationId;

/// How far the image of a disk that has left is on its way to be what a return can start from.
#[derive(Debug, Default)]
pub(in crate::controller) struct BecomingBase {
    /// The flush is at the disk. It outlives the wish for it.
    flushing: bool,
    /// The migration by which the disk left, as long as the image is as it was then.
    of: Option<MigrationId>,
    /// The disk left without a part that this image does not have either.
    partial: bool,
}

impl Controller {
    /// The disk has left by this migration, and this node's image was the disk until then: what of it is not durable
    /// is made so. One that cannot be flushed now, because it still is for an earlier departure, is no base.
    pub(in crate::controller) fn keep_as_base(&mut self, migration: MigrationId) {
        if self.has_bug(PlantedBug::BaseUnflushed) {
            return self.notify(Event::BecameBase { migration });
        }
        if self.base.flushing || self.base.partial {
            return;
        }
        self.base.flushing = true;
        self.base.of = Some(migration);
        self.act(Action::Disk {
            tag: DiskTag::BaseFlush,
            operation: DiskOperation::Flush,
        });
    }

    /// The image is about to be written to.
    pub(in crate::controller) const fn spoil_base(&mut self) {
        self.base.of = None;
        self.base.partial = false;
    }

    /// The disk left without a part that this node's image does not have either, or may have: the image is the disk as it
    /// was then for nobody. For a process that starts, before the first request.
    pub const fn is_no_base(&mut self) {
        self.base.partial = true;
    }

    /// The image is durable, or is not.
    pub(in crate::controller) fn base_flushed(&mut self, result: Result<(), RequestError>) {
        self.base.flushing = false;
        if let (Some(migration), Ok(())) = (self.base.of.take(), result) {
            self.notify(Event::BecameBase { migration });
        }
    }
}
