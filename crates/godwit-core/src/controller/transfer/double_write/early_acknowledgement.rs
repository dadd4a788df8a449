//! Double writes that the destination acknowledges before they are on its disk.
//!
//! A guest's write waits for the acknowledgement. Until switchover the source's disk alone has to
//! survive, so what the destination has received is worth as much to the guest as what it has
//! written: all of it is written before the disk is accepted, and a write that fails ends the
//! migration.

use crate::controller::Controller;
use crate::controller::requests::slots::Work;
use crate::event::AbortReason;
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::Extent;
use crate::wire::{Message, TrafficClass};

/// Most bytes that are acknowledged and not written. What comes on top is acknowledged when it is
/// on the disk: so the source, and the guest with it, learns how fast that is.
const MOST_BYTES: u64 = 512 << 10;

/// What has been acknowledged and not written.
#[derive(Debug, Default)]
pub(in crate::controller) struct Unwritten {
    pub(in crate::controller) frames: u32,
    bytes: u64,
}

impl Controller {
    /// A frame has arrived: acknowledges it if it is a double write and little else that was
    /// acknowledged is not written.
    pub(in crate::controller) fn acknowledge_early(&mut self, tag: RequestTag) {
        let slot = &self.slots[tag];
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
            self.slots[tag].acknowledged = true;
            let message = Message::Ack {
                tag: asked,
                generation,
                result: Ok(()),
            };
            self.send(TrafficClass::Sync, message);
        }
    }

    /// A double write that was acknowledged early is on the disk, or failed: then the images differ,
    /// and only this node knows.
    pub(in crate::controller) fn early_write_done(
        &mut self,
        tag: RequestTag,
        result: Result<(), RequestError>,
    ) {
        let bytes = self.slots[tag].extent.map_or(0, Extent::bytes);
        if let Some(destination) = &mut self.destination {
            destination.unwritten.frames -= 1;
            destination.unwritten.bytes -= bytes;
        }
        if let (Err(error), Some(migration)) = (result, self.authority.receiving())
            && !self.has_bug(PlantedBug::ForgetFailedWrite)
        {
            let reason = AbortReason::of_destination(error);
            self.send(TrafficClass::Control, Message::Abort { migration, reason });
            let effects = self.authority.stop_receiving(reason);
            self.apply(effects);
        }
    }
}
