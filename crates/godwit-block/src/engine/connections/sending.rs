//! The sending side of connections.

use godwit_core::action::SourceSlot;
use godwit_core::wire::TrafficClass;
use godwit_io::ring::Token;
use godwit_io::stream::{Keep, Payload, StreamError};

use crate::engine::connections::Life;
use crate::engine::run::Engine;
use crate::engine::slots::Slots;
use crate::engine::slots::chunks::Chunks;

/// Returns a function that ends the use of a sent payload.
pub(in crate::engine) fn release<'a>(
    slots: &'a mut Slots,
    chunks: &'a mut Chunks,
    owed: &'a mut Chunks,
) -> impl FnMut(Payload) + 'a {
    |payload| match payload.keep {
        Keep::Slot(tag) => slots.release(tag),
        Keep::Chunk { slot, memory } => match slot {
            SourceSlot::Pull(_) => owed.release(slot, &memory),
            SourceSlot::Chunk(_) | SourceSlot::Delayed(_) => chunks.release(slot, &memory),
        },
        // The outbox keeps the buffer.
        Keep::Packed(_) => {}
    }
}

impl Engine {
    /// Ends a send operation.
    pub(in crate::engine) fn sent(&mut self, index: u32, result: i32) {
        let now = self.now;
        let Some(connection) = self.connections.at(index) else {
            return;
        };
        let key = connection.key;
        connection.moved = now;
        let outcome = connection.stream.sent(
            result,
            &mut release(&mut self.slots, &mut self.chunks, &mut self.owed),
        );
        let throttled = connection.throttled;
        if connection.life == Life::Closing {
            return self.reap(key);
        }
        match outcome {
            Ok(()) if throttled => self.advance(key),
            Ok(()) => self.connections.mark(key),
            Err(error) => self.lost(key, &error.into()),
        }
    }

    /// Drops the frames of the migration under way that wait on this class's connections and of which no byte has left.
    pub(in crate::engine) fn discard_unsent(&mut self, class: TrafficClass) {
        let Some(links) = self.links.as_ref().filter(|links| links.active) else {
            return;
        };
        let keys = match class {
            TrafficClass::Control | TrafficClass::Pull | TrafficClass::Image => &[],
            TrafficClass::Sync => links.sync.as_slice(),
            TrafficClass::Copy => &links.copies[..],
        };
        for &key in keys {
            let Some(connection) = self.connections.get_mut(key) else {
                continue;
            };
            // Answers to forwarded requests and requests of this node's clients do not belong to the migration.
            let uses = connection.uses();
            if uses.migration && !uses.forwarding && !uses.served {
                connection.stream.discard_unsent(&mut release(
                    &mut self.slots,
                    &mut self.chunks,
                    &mut self.owed,
                ));
            }
        }
    }

    /// Sends the frames queued in this turn, and closes connections with nothing left to do.
    pub(in crate::engine) fn flush_marked(&mut self) {
        let guest_is_idle = self.core.guest_is_idle();
        while let Some(key) = self.connections.next_marked() {
            let now = self.now;
            let Some(connection) = self.connections.get_mut(key) else {
                continue;
            };
            if connection.life == Life::Closing {
                continue;
            }
            if connection.stream.outbox().overflows() {
                self.lost(key, &StreamError::Backlog.into());
                continue;
            }
            let gathers = connection.gathers_until().is_some_and(|until| now < until);
            if connection.stream.wants_send() && !gathers {
                connection.moved = now;
                let token = Token::Send(key.index);
                let stream = &mut connection.stream;
                let by = connection.party.sent_by(guest_is_idle);
                let sent = stream.send(
                    &mut self.ring,
                    token,
                    by,
                    &mut release(&mut self.slots, &mut self.chunks, &mut self.owed),
                );
                if let Err(error) = sent {
                    self.lost(key, &error.into());
                    continue;
                }
            }
            self.say_goodbye(key);
        }
    }
}
