//! The image left behind by a disk. A durable image is the disk as of the switchover while nobody writes to the image.
//! If the disk comes back, only the blocks written since then have to be sent.

use crate::action::{Action, DiskOperation, DiskTag};
use crate::controller::Controller;
use crate::controller::cx::Cx;
use crate::event::Event;
use crate::planted::PlantedBug;
use crate::request::RequestError;
use crate::units::MigrationId;

/// Progress of a departed disk's image towards a base for the disk's return.
#[derive(Debug, Default)]
pub(in crate::controller) struct BecomingBase {
    /// True while the flush is at the disk, even if the flush is no longer needed.
    flushing: bool,
    /// The migration by which the disk left, while the image is unchanged since.
    of: Option<MigrationId>,
    /// True if the disk left without a part that this image lacks too.
    partial: bool,
}

impl BecomingBase {
    /// Makes this node's image durable after the disk has left by this migration. An image that cannot be flushed now,
    /// because a flush for an earlier departure is still under way, is not a base.
    pub(in crate::controller) fn keep_as_base(&mut self, cx: &mut Cx, migration: MigrationId) {
        if cx.has_bug(PlantedBug::BaseUnflushed) {
            return cx.notify(Event::BecameBase { migration });
        }
        if self.flushing || self.partial {
            return;
        }
        self.flushing = true;
        self.of = Some(migration);
        cx.act(Action::Disk {
            tag: DiskTag::BaseFlush,
            operation: DiskOperation::Flush,
        });
    }

    /// Notes that the image is about to be written to.
    pub(in crate::controller) const fn spoil_base(&mut self) {
        self.of = None;
        self.partial = false;
    }

    /// Handles the end of the image's flush.
    pub(in crate::controller) fn base_flushed(
        &mut self,
        cx: &mut Cx,
        result: Result<(), RequestError>,
    ) {
        self.flushing = false;
        if let (Some(migration), Ok(())) = (self.of.take(), result) {
            cx.notify(Event::BecameBase { migration });
        }
    }
}

impl Controller {
    /// Notes that the disk left without a part, and this node's image lacks or may lack the same part: the image is not
    /// a base for anyone. For a process that starts, before the first request.
    pub const fn is_no_base(&mut self) {
        self.differences.base.partial = true;
    }
}
