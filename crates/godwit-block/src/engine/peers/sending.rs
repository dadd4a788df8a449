//! Frames to other nodes, and the connection for each frame.

use godwit_core::action::Forwarder;
use godwit_core::wire::{Message, PayloadBuffer, TrafficClass};
use godwit_io::stream::{Frame, What};
use godwit_io::zeroes::is_sparse;

use crate::engine::connections::ConnectionKey;
use crate::engine::run::Engine;
use crate::engine::slots::Owner;

impl Engine {
    /// Queues a message of the controller for a forwarding node.
    pub(in crate::engine) fn send_forwarder(&mut self, forwarder: Forwarder, message: Message) {
        let key = self.served.iter().find(|served| served.0 == forwarder);
        let Some(key) = key.map(|served| served.1) else {
            return;
        };
        if let Some(connection) = self.connections.get_mut(key) {
            let (header, _, _) = message.encode();
            connection
                .stream
                .queue(Frame::new(&[&header.encode()], None));
            self.connections.mark(key);
        }
    }

    /// Queues a frame of the controller. Without a connection the frame is dropped: the controller has been told, or
    /// will be, that the connection is lost.
    pub(in crate::engine) fn send(&mut self, class: TrafficClass, message: Message) {
        let Some(key) = self.route(class, &message) else {
            return;
        };
        if let Message::Forward { tag, .. } | Message::DoubleWrite { tag, .. } = message
            && let Owner::Ring { operation } = self.slots.owner(tag)
        {
            self.leave_guest_memory(tag, operation);
        }
        let (header, inline, length) = message.encode();
        let payload = match message.payload() {
            None => None,
            Some(PayloadBuffer::Request(tag)) => {
                self.slots.payload(tag, header.payload_length as usize)
            }
            Some(PayloadBuffer::Source(slot)) => self
                .source_buffers(slot)
                .payload(slot, header.payload_length as usize),
        };
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        let copies = matches!(message, Message::Copy { zeroes: false, .. });
        let sparse = || {
            let payload = payload.as_ref().filter(|_| copies);
            payload.is_some_and(|payload| is_sparse(payload.bytes()))
        };
        let packing = self.compression.as_mut().and_then(|compression| {
            if compression.wants(&message) {
                Some(What::Everything)
            } else {
                sparse().then_some(What::Zeroes)
            }
        });
        let mut frame = Frame::new(&[&header.encode(), &inline[..length]], payload);
        if let Some(what) = packing {
            frame = frame.packed_first(what);
        }
        connection.queue(&message, frame, self.now);
        self.connections.mark(key);
    }

    /// Returns the connection for a frame of the controller.
    fn route(&self, class: TrafficClass, message: &Message) -> Option<ConnectionKey> {
        let links = self.links.as_ref();
        match class {
            TrafficClass::Control => {
                let about = match *message {
                    Message::Prepare { migration, .. }
                    | Message::Prepared { migration }
                    | Message::Commit { migration, .. }
                    | Message::Committed { migration }
                    | Message::Abort { migration, .. }
                    | Message::Query { migration }
                    | Message::GuestArrived { migration } => Some(migration),
                    _ => None,
                };
                let current = links.filter(|links| about.is_none_or(|id| id == links.migration));
                current.and_then(|links| links.control).or_else(|| {
                    // The last word on a migration follows its decision.
                    let decided = self.decided.iter().map(|&(_, id, key)| (id, key));
                    let mut others = self.resolving.iter().copied().chain(decided);
                    others
                        .find(|(id, _)| about.is_none_or(|a| a == *id))
                        .map(|(_, key)| key)
                })
            }
            TrafficClass::Sync => match message {
                Message::Forward { .. }
                | Message::ForwardBegin { .. }
                | Message::ClientAttached
                | Message::FenceReached { .. } => self
                    .forwarding
                    .or_else(|| links.and_then(|links| links.sync)),
                _ => links.and_then(|links| links.sync),
            },
            TrafficClass::Pull => self.pulling,
            TrafficClass::Image => self.fetching,
            TrafficClass::Copy => links?.copies.iter().copied().min_by_key(|&key| {
                self.connections
                    .get(key)
                    .map_or(usize::MAX, |c| c.stream.outbox().bytes())
            }),
        }
    }
}
