//! Frames that arrive from other nodes.

pub(super) mod compression;
pub(super) mod gathering;
pub(super) mod link_signal;
pub(super) mod links;
pub(super) mod pulling;
pub(super) mod sending;

use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::SECTOR_SIZE;
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{Admission, HOLE_PIECE_SECTORS};

use crate::engine::connections::receive::Lost;
use crate::engine::connections::{ConnectionKey, Head, Life, Parse, Party};
use crate::engine::run::Engine;
use crate::engine::slots::{Class, Owner};
use godwit_io::stream::Frame;

impl Engine {
    /// Handles the start of a peer's frame; `payload` bytes for a buffer follow, uncompressed or compressed.
    pub(super) fn peer_frame(
        &mut self,
        key: ConnectionKey,
        message: Message,
        payload: u32,
        compressed: bool,
    ) -> Result<(), Lost> {
        let pulls_as = self.pulls_on(key);
        let Some(connection) = self.connections.get_mut(key) else {
            return Ok(());
        };
        let Party::Peer { class, uses } = connection.party else {
            return Ok(());
        };
        if !message.belongs_on(class) {
            return Err(Lost::Unexpected(message));
        }
        let forwards = matches!(
            message,
            Message::Forward { .. }
                | Message::ForwardBegin { .. }
                | Message::ClientAttached
                | Message::FenceReached { .. }
        );
        let answers = matches!(
            message,
            Message::ForwardReply { .. } | Message::Fence { .. }
        );
        let wanted = match (forwards, answers) {
            _ if matches!(class, TrafficClass::Pull | TrafficClass::Image) => {
                pulls_as == Some(class)
            }
            (true, _) => uses.served,
            (_, true) => uses.forwarding,
            _ => uses.migration,
        };
        if !wanted {
            let forwarded = forwards || answers;
            if forwarded && connection.life == Life::Open {
                return Err(Lost::Unexpected(message));
            }
            // The migration has ended; frames still under way are dropped.
            if payload > 0 {
                connection.parse = Parse::Discard { remaining: payload };
            }
            return Ok(());
        }
        match message {
            Message::Pulled { slot, extent, .. }
                if !self.core.expects_pulled(class, slot, extent) =>
            {
                return Err(Lost::Unexpected(message));
            }
            Message::Copy { .. }
            | Message::DoubleWrite { .. }
            | Message::DelayedWrite { .. }
            | Message::Verify { .. }
            | Message::VerifyHole { .. }
            | Message::Pulled { .. }
            | Message::Forward { .. } => {
                let packed = compressed.then_some(payload);
                self.admit(key, Head::Peer { message, packed }, false);
            }
            Message::ForwardReply {
                tag,
                number,
                result,
                ..
            } => {
                let Some(expected) = self.core.forward_reply_length(tag, number) else {
                    if !self.core.serves() {
                        return Err(Lost::Unexpected(message));
                    }
                    // The owner before this node answered while giving the disk away. Requests without a waiter were
                    // given up here meanwhile.
                    if payload > 0 {
                        connection.parse = Parse::Discard { remaining: payload };
                    }
                    return Ok(());
                };
                if payload != if result.is_ok() { expected } else { 0 } {
                    return Err(Lost::Unexpected(message));
                }
                connection.bulk = payload > 0;
                // The slot must outlive the transfer even if the request is given up meanwhile.
                self.slots.hold(tag);
                if payload > 0 {
                    let packed = None;
                    let head = Head::Peer { message, packed };
                    connection.parse = Parse::Payload {
                        head,
                        tag,
                        length: payload,
                        received: 0,
                    };
                } else {
                    self.peer_payload(key, message, tag);
                }
            }
            Message::ForwardBegin { .. }
            | Message::ClientAttached
            | Message::FenceReached { .. } => {
                connection.bulk = false;
                if message == Message::ClientAttached {
                    self.look_for_hang_ups();
                }
                if let Some(forwarder) = self.forwarder(key) {
                    self.core
                        .handle_forwarder_message(self.now, forwarder, message);
                    self.drain();
                }
            }
            _ => {
                connection.bulk = false;
                if let Message::Fence { .. } | Message::Commit { .. } = message {
                    self.look_for_hang_ups();
                }
                self.core.handle_message(self.now, class, message, None);
                self.drain();
            }
        }
        Ok(())
    }

    /// Returns the needs of a peer's frame: class, owner, buffer length, and bytes to receive.
    pub(super) fn peer_needs(
        &self,
        connection: ConnectionKey,
        message: Message,
    ) -> (Class, Owner, u32, u32) {
        let sent = |extent: godwit_core::units::Extent, zeroes: bool| {
            if zeroes { 0 } else { extent.bytes() as u32 }
        };
        match message {
            Message::Copy { extent, zeroes, .. } => {
                let length = sent(extent, zeroes);
                (Class::Copy, Owner::Replica, length, length)
            }
            Message::Verify { extent, .. } => {
                (Class::Copy, Owner::Replica, extent.bytes() as u32, 0)
            }
            Message::VerifyHole { extent, .. } => {
                let piece = extent.sectors().min(HOLE_PIECE_SECTORS);
                (Class::Copy, Owner::Replica, piece * SECTOR_SIZE as u32, 0)
            }
            Message::Forward {
                tag,
                number,
                operation,
            } => {
                let owner = Owner::Forwarded {
                    connection,
                    tag,
                    number,
                    operation,
                };
                match operation {
                    Operation::Read(extent) => (Class::Sync, owner, extent.bytes() as u32, 0),
                    Operation::Write { extent, .. } => {
                        let length = extent.bytes() as u32;
                        (Class::Sync, owner, length, length)
                    }
                    Operation::WriteZeroes { .. } | Operation::Flush => (Class::Sync, owner, 0, 0),
                }
            }
            Message::DoubleWrite { extent, zeroes, .. }
            | Message::DelayedWrite { extent, zeroes, .. } => {
                let length = sent(extent, zeroes);
                (Class::Sync, Owner::Replica, length, length)
            }
            Message::Pulled { .. } => {
                let (header, _, _) = message.encode();
                let length = header.payload_length;
                (Class::Copy, Owner::Replica, length, length)
            }
            // No other frame takes a slot.
            _ => (Class::Sync, Owner::Replica, 0, 0),
        }
    }

    /// Handles a peer's frame that is complete, with its payload in the slot's buffer.
    pub(super) fn peer_payload(&mut self, key: ConnectionKey, message: Message, tag: RequestTag) {
        let party = self.connections.get_mut(key).map(|connection| {
            let served = connection.uses().served;
            if served && matches!(message, Message::Forward { .. }) {
                connection.unanswered += 1;
            }
            (connection.uses(), connection.life)
        });
        let Some((uses, Life::Open | Life::Leaving { .. })) = party else {
            return self.drop_frame(message, tag);
        };
        match message {
            Message::Forward { number, .. }
                if uses.served && self.is_void(key, number, message) =>
            {
                if let Some(connection) = self.connections.get_mut(key) {
                    connection.unanswered = connection.unanswered.saturating_sub(1);
                }
                self.drop_frame(message, tag);
            }
            Message::Forward { operation, .. } if uses.served => {
                self.stats.counters.forwarded += 1;
                self.slots.set_arrived(tag, self.now);
                let request = Request {
                    tag,
                    origin: Origin::Peer,
                    operation,
                };
                self.take_request(request);
            }
            Message::Pulled { .. } => return self.pulled(key, message, tag),
            Message::ForwardReply { tag, number, .. } => {
                // The request may have been given up while its data was on the way.
                if uses.forwarding && self.core.forward_reply_length(tag, number).is_some() {
                    self.core
                        .handle_message(self.now, TrafficClass::Sync, message, None);
                    self.drain();
                }
                self.slots.release(tag);
            }
            Message::Copy { .. } | Message::Verify { .. } | Message::VerifyHole { .. }
                if uses.migration =>
            {
                self.core
                    .handle_message(self.now, TrafficClass::Copy, message, Some(tag));
            }
            Message::DoubleWrite { .. } | Message::DelayedWrite { .. } if uses.migration => {
                self.core
                    .handle_message(self.now, TrafficClass::Sync, message, Some(tag));
            }
            _ => self.drop_frame(message, tag),
        }
        self.drain();
    }

    /// Returns true if a forwarded request must not be carried out: sent before a fence, or a breach of the protocol,
    /// which ends the connection.
    fn is_void(&mut self, key: ConnectionKey, number: u32, message: Message) -> bool {
        let admission = self
            .forwarder(key)
            .map(|forwarder| self.core.admit_forwarded(forwarder, number));
        match admission {
            Some(Admission::Take) => false,
            Some(Admission::Void) | None => true,
            Some(Admission::Broken) => {
                self.lost(key, &Lost::Unexpected(message));
                true
            }
        }
    }

    /// Gives up a frame that was received in part or in full.
    pub(super) fn drop_frame(&mut self, message: Message, tag: RequestTag) {
        if matches!(message, Message::ForwardReply { .. }) {
            self.slots.release(tag);
        } else {
            self.slots.finish(tag);
        }
    }

    /// Answers forwarded I/O on the connection that the request came by.
    pub(super) fn answer_peer(
        &mut self,
        tag: RequestTag,
        (key, peer_tag, number, operation): (ConnectionKey, RequestTag, u32, Operation),
        result: Result<(), RequestError>,
    ) {
        if let Some(connection) = self.connections.get_mut(key) {
            connection.unanswered = connection.unanswered.saturating_sub(1);
            if connection.life != Life::Closing {
                let length = match (operation, result) {
                    (Operation::Read(extent), Ok(())) => extent.bytes() as u32,
                    _ => 0,
                };
                let payload = if length > 0 {
                    self.slots.payload(tag, length as usize)
                } else {
                    None
                };
                let message = Message::ForwardReply {
                    number,
                    tag: peer_tag,
                    length,
                    result,
                };
                let (header, _, _) = message.encode();
                connection
                    .stream
                    .queue(Frame::new(&[&header.encode()], payload));
                self.connections.mark(key);
            }
        }
        self.stats.answered_peer(self.slots.arrived(tag), self.now);
        self.slots.finish(tag);
    }
}
