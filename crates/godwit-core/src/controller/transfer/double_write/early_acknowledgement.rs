//! Double writes that the destination acknowledges before they are on its disk.
//!
//! A guest's write waits for the acknowledgement. Until switchover only the source's disk has to survive, so received
//! data is worth as much to the guest as written data: the destination writes everything before it accepts the disk,
//! and a failed write ends the migration.

use crate::controller::Controller;
use crate::controller::requests::slots::Work;
use crate::event::AbortReason;
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::Extent;
use crate::wire::{Message, TrafficClass};

/// Maximum bytes acknowledged and not written. Further writes are acknowledged once on the disk, so the source, and the
/// guest with it, learns the disk's speed.
const MOST_BYTES: u64 = 512 << 10;

/// Frames acknowledged and not written.
#[derive(Debug, Default)]
pub(in crate::controller) struct Unwritten {
    pub(in crate::controller) frames: u32,
    bytes: u64,
}

impl Controller {
    /// Acknowledges an arrived frame if the frame is a double write and few acknowledged bytes are unwritten.
    pub(in crate::controller) fn acknowledge_early(&mut self, tag: RequestTag) {
        let slot = &self.cx.slots[tag];
        let bytes = slot.extent.map_or(0, Extent::bytes);
        if let Work::DoubleWrite {
            tag: asked,
            generation,
            ..
        } = slot.work
            && let Some(destination) = &mut self.destination
            && destination.unwritten.bytes + bytes <= MOST_BYTES
        {
            destination.unwritten.frames += 1;
            destination.unwritten.bytes += bytes;
            self.cx.slots[tag].acknowledged = true;
            let message = Message::Ack {
                tag: asked,
                generation,
                result: Ok(()),
            };
            self.cx.send(TrafficClass::Sync, message);
        }
    }

    /// Ends the write of a double write acknowledged early. If the write failed, the images differ, and only this node
    /// knows.
    pub(in crate::controller) fn early_write_done(
        &mut self,
        tag: RequestTag,
        result: Result<(), RequestError>,
    ) {
        let bytes = self.cx.slots[tag].extent.map_or(0, Extent::bytes);
        if let Some(destination) = &mut self.destination {
            destination.unwritten.frames -= 1;
            destination.unwritten.bytes -= bytes;
        }
        if let Err(error) = result
            && !self.cx.has_bug(PlantedBug::ForgetFailedWrite)
        {
            self.lose_write(error);
        }
    }

    /// Ends the incoming migration, because its source counts on a write that is not here.
    pub(in crate::controller) fn lose_write(&mut self, error: RequestError) {
        if let Some(migration) = self.cx.authority.receiving() {
            let reason = AbortReason::of_destination(error);
            self.cx
                .send(TrafficClass::Control, Message::Abort { migration, reason });
            let effects = self.cx.authority.stop_receiving(reason);
            self.apply(effects);
        }
    }
}
