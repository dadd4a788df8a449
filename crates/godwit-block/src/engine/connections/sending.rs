//! The sending side of connections.

use godwit_core::units::Time;
use godwit_io::ring::{Ring, Token};
use godwit_io::stream::StreamError;

use crate::engine::connections::{ConnectionKey, Connections, Life};
use crate::engine::run::Engine;
use crate::engine::slots::memory::Memory;

impl Connections {
    /// Sends what is queued on a connection, unless more is to gather.
    fn flush(
        &mut self,
        key: ConnectionKey,
        now: Time,
        guest_is_idle: bool,
        ring: &mut Ring,
        memory: &mut Memory,
    ) -> Result<(), StreamError> {
        let Some(connection) = self.get_mut(key) else {
            return Ok(());
        };
        if connection.life == Life::Closing {
            return Ok(());
        }
        if connection.stream.outbox().overflows() {
            return Err(StreamError::Backlog);
        }
        let gathers = connection.gathers_until().is_some_and(|until| now < until);
        if connection.stream.wants_send() && !gathers {
            connection.moved = now;
            let token = Token::Send(key.index);
            let by = connection.party.sent_by(guest_is_idle);
            let release = &mut |payload| memory.release(payload);
            connection.stream.send(ring, token, by, release)?;
        }
        Ok(())
    }
}

impl Engine {
    /// Ends a send operation.
    pub(in crate::engine) fn sent(&mut self, index: u32, result: i32) {
        let now = self.cx.now;
        let Some(connection) = self.connections.at(index) else {
            return;
        };
        let key = connection.key;
        connection.moved = now;
        let memory = &mut self.memory;
        let outcome = connection
            .stream
            .sent(result, &mut |payload| memory.release(payload));
        let throttled = connection.throttled;
        if connection.life == Life::Closing {
            return self.connections.reap(key, memory);
        }
        match outcome {
            Ok(()) if throttled => self.advance(key),
            Ok(()) => self.connections.mark(key),
            Err(error) => self.lost(key, &error.into()),
        }
    }

    /// Sends the frames queued in this turn, and closes connections with nothing left to do.
    pub(in crate::engine) fn flush_marked(&mut self) {
        let guest_is_idle = self.cx.core.guest_is_idle();
        while let Some(key) = self.connections.next_marked() {
            let (ring, memory) = (&mut self.ring, &mut self.memory);
            let now = self.cx.now;
            match self
                .connections
                .flush(key, now, guest_is_idle, ring, memory)
            {
                Ok(()) if self.connections.say_goodbye(key) => self.depart(key),
                Ok(()) => {}
                Err(error) => self.lost(key, &error.into()),
            }
        }
    }
}
