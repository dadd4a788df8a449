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
        let Some(key) = self.served.connection(forwarder) else {
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
            && let Owner::Ring { operation } = self.memory.slots.owner(tag)
        {
            let slots = &mut self.memory.slots;
            self.vhost.leave_guest_memory(tag, operation, slots);
        }
        let (header, inline, length) = message.encode();
        let payload = match message.payload() {
            None => None,
            Some(PayloadBuffer::Request(tag)) => self
                .memory
                .slots
                .payload(tag, header.payload_length as usize),
            Some(PayloadBuffer::Source(slot)) => {
                let buffers = self.memory.source(slot);
                buffers.payload(slot, header.payload_length as usize)
            }
        };
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        let copies = matches!(message, Message::Copy { zeroes: false, .. });
        let sparse = || {
            let payload = payload.as_ref().filter(|_| copies);
            payload.is_some_and(|payload| is_sparse(payload.bytes()))
        };
        let packing = self.moves.compression().and_then(|compression| {
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
        let awaited = self.cx.core.awaits_follower();
        connection.queue(&message, frame, self.cx.now, awaited);
        self.connections.mark(key);
    }

    /// Returns the connection for a frame of the controller.
    fn route(&self, class: TrafficClass, message: &Message) -> Option<ConnectionKey> {
        match class {
            TrafficClass::Control => self.moves.control_for(message),
            TrafficClass::Sync => match message {
                Message::Forward { .. }
                | Message::ForwardBegin { .. }
                | Message::ClientAttached
                | Message::FenceReached { .. } => {
                    self.forwarding.connection().or_else(|| self.moves.sync())
                }
                _ => self.moves.sync(),
            },
            TrafficClass::Pull | TrafficClass::Image => self.pulls.connection(class),
            TrafficClass::Copy => self.moves.copy_for(&self.connections),
        }
    }
}
