//! Frames that arrive from other nodes.

pub(super) mod compression;
pub(super) mod forwarding;
pub(super) mod gathering;
pub(super) mod link_signal;
pub(super) mod links;
pub(super) mod pulling;
pub(super) mod sending;

use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::{Extent, SECTOR_SIZE};
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{Admission, HOLE_PIECE_SECTORS};

use crate::engine::connections::receive::Lost;
use crate::engine::connections::streams::PeerStream;
use crate::engine::connections::{ConnectionKey, Head, Life, Needs, Parse, Party, Uses};
use crate::engine::run::Engine;
use crate::engine::slots::{Class, Owner};
use godwit_io::stream::Frame;

/// The part of forwarding that a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forwarding {
    /// A request, on its way to the disk's owner.
    Request,
    /// An answer, on its way back.
    Answer,
}

impl Forwarding {
    const fn of(message: &Message) -> Option<Self> {
        match message {
            Message::Forward { .. }
            | Message::ForwardBegin { .. }
            | Message::ClientAttached
            | Message::FenceReached { .. } => Some(Self::Request),
            Message::ForwardReply { .. } | Message::Fence { .. } => Some(Self::Answer),
            _ => None,
        }
    }
}

/// Returns the needs of a peer's frame.
pub(super) fn needs(connection: ConnectionKey, message: Message) -> Needs {
    let (class, owner) = (Class::Sync, Owner::Replica);
    let needs = |class, owner, buffer, length| Needs {
        class,
        owner,
        buffer,
        length,
    };
    let sent = |extent: Extent, zeroes: bool| if zeroes { 0 } else { extent.bytes() as u32 };
    match message {
        Message::Copy { extent, zeroes, .. } => {
            let length = sent(extent, zeroes);
            needs(Class::Copy, owner, length, length)
        }
        Message::Verify { extent, .. } => needs(Class::Copy, owner, extent.bytes() as u32, 0),
        Message::VerifyHole { extent, .. } => {
            let piece = extent.sectors().min(HOLE_PIECE_SECTORS);
            needs(Class::Copy, owner, piece * SECTOR_SIZE as u32, 0)
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
            Needs::of(&operation, class, owner)
        }
        Message::DoubleWrite { extent, zeroes, .. }
        | Message::DelayedWrite { extent, zeroes, .. } => {
            let length = sent(extent, zeroes);
            needs(class, owner, length, length)
        }
        Message::Pulled { .. } => {
            let (header, _, _) = message.encode();
            let length = header.payload_length;
            needs(Class::Copy, owner, length, length)
        }
        // No other frame takes a slot.
        _ => needs(class, owner, 0, 0),
    }
}

impl Engine {
    /// Takes over a peer's connection; `None` if its socket is unusable.
    fn adopt(
        &mut self,
        stream: PeerStream,
        class: TrafficClass,
        uses: Uses,
    ) -> Option<ConnectionKey> {
        let slots = &mut self.memory.slots;
        self.connections.adopt(stream, class, uses, &self.cx, slots)
    }

    /// Handles the start of a peer's frame; `payload` bytes for a buffer follow, uncompressed or compressed.
    pub(super) fn peer_frame(
        &mut self,
        key: ConnectionKey,
        message: Message,
        payload: u32,
        compressed: bool,
    ) -> Result<(), Lost> {
        let Some(connection) = self.connections.get_mut(key) else {
            return Ok(());
        };
        let Party::Peer { class, uses } = connection.party else {
            return Ok(());
        };
        if !message.belongs_on(class) {
            return Err(Lost::Unexpected(message));
        }
        let forwarding = Forwarding::of(&message);
        let wanted = match forwarding {
            _ if matches!(class, TrafficClass::Pull | TrafficClass::Image) => {
                self.pulls.connection(class) == Some(key)
            }
            Some(Forwarding::Request) => uses.served,
            Some(Forwarding::Answer) => uses.forwarding,
            None => uses.migration,
        };
        if !wanted {
            if forwarding.is_some() && connection.life == Life::Open {
                return Err(Lost::Unexpected(message));
            }
            // The migration has ended; frames still under way are dropped.
            connection.discard(payload);
            return Ok(());
        }
        match message {
            Message::Pulled { slot, extent, .. }
                if !self.cx.core.expects_pulled(class, slot, extent) =>
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
            } => return self.forward_reply(key, message, (tag, number, result.is_ok()), payload),
            _ => {
                connection.bulk = false;
                self.peer_message(key, class, message);
            }
        }
        Ok(())
    }

    /// Handles the start of the owner's answer to a request of this node's client.
    fn forward_reply(
        &mut self,
        key: ConnectionKey,
        message: Message,
        (tag, number, ok): (RequestTag, u32, bool),
        payload: u32,
    ) -> Result<(), Lost> {
        let Some(connection) = self.connections.get_mut(key) else {
            return Ok(());
        };
        let Some(expected) = self.cx.core.forward_reply_length(tag, number) else {
            if !self.cx.core.serves() {
                return Err(Lost::Unexpected(message));
            }
            // The owner before this node answered while giving the disk away. Requests without a waiter were given up
            // here meanwhile.
            connection.discard(payload);
            return Ok(());
        };
        if payload != if ok { expected } else { 0 } {
            return Err(Lost::Unexpected(message));
        }
        connection.bulk = payload > 0;
        // The slot must outlive the transfer even if the request is given up meanwhile.
        self.memory.slots.hold(tag);
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
        Ok(())
    }

    /// Handles a peer's frame without data for a slot.
    fn peer_message(&mut self, key: ConnectionKey, class: TrafficClass, message: Message) {
        if let Message::ClientAttached | Message::Fence { .. } | Message::Commit { .. } = message {
            self.look_for_hang_ups();
        }
        let now = self.cx.now;
        if Forwarding::of(&message) != Some(Forwarding::Request) {
            self.cx.core.handle_message(now, class, message, None);
        } else if let Some(forwarder) = self.served.forwarder(key) {
            let core = &mut self.cx.core;
            core.handle_forwarder_message(now, forwarder, message);
        } else {
            return;
        }
        self.drain();
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
            return self.memory.drop_frame(&message, tag);
        };
        match message {
            Message::Forward { number, .. }
                if uses.served && self.is_void(key, number, message) =>
            {
                if let Some(connection) = self.connections.get_mut(key) {
                    connection.unanswered = connection.unanswered.saturating_sub(1);
                }
                self.memory.drop_frame(&message, tag);
            }
            Message::Forward { operation, .. } if uses.served => {
                self.cx.stats.counters.forwarded += 1;
                self.memory.slots.set_arrived(tag, self.cx.now);
                let request = Request {
                    tag,
                    origin: Origin::Peer,
                    operation,
                };
                self.cx.take_request(request);
            }
            Message::Pulled { .. } => return self.pulled(key, message, tag),
            Message::ForwardReply { tag, number, .. } => {
                // The request may have been given up while its data was on the way.
                if uses.forwarding && self.cx.core.forward_reply_length(tag, number).is_some() {
                    self.cx
                        .core
                        .handle_message(self.cx.now, TrafficClass::Sync, message, None);
                    self.drain();
                }
                self.memory.slots.release(tag);
            }
            Message::Copy { .. } | Message::Verify { .. } | Message::VerifyHole { .. }
                if uses.migration =>
            {
                self.cx
                    .core
                    .handle_message(self.cx.now, TrafficClass::Copy, message, Some(tag));
            }
            Message::DoubleWrite { .. } | Message::DelayedWrite { .. } if uses.migration => {
                self.cx
                    .core
                    .handle_message(self.cx.now, TrafficClass::Sync, message, Some(tag));
            }
            _ => self.memory.drop_frame(&message, tag),
        }
        self.drain();
    }

    /// Returns true if a forwarded request must not be carried out: sent before a fence, or a breach of the protocol,
    /// which ends the connection.
    fn is_void(&mut self, key: ConnectionKey, number: u32, message: Message) -> bool {
        let forwarder = self.served.forwarder(key);
        let admission = forwarder.map(|it| self.cx.core.admit_forwarded(it, number));
        match admission {
            Some(Admission::Take) => false,
            Some(Admission::Void) | None => true,
            Some(Admission::Broken) => {
                self.lost(key, &Lost::Unexpected(message));
                true
            }
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
                    self.memory.slots.payload(tag, length as usize)
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
        self.cx
            .stats
            .answered_peer(self.memory.slots.arrived(tag), self.cx.now);
        self.memory.slots.finish(tag);
    }
}
