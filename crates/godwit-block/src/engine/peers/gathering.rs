//! Double writes gather for a moment before they are sent.
//!
//! Nobody waits for one that the guest was answered without. One send operation, one record and one
//! wake-up of the other node then serve several, and so does what comes back.

use std::time::Duration;

use godwit_core::units::Time;
use godwit_core::wire::Message;

use crate::engine::connections::{Connection, ConnectionKey, Life};
use crate::engine::run::Engine;
use godwit_io::stream::Frame;

/// How long the first waits for others: far less than what a migration's end may take, and time for
/// five writes of a guest that makes 10,000 a second.
const MOMENT: Duration = Duration::from_micros(500);

/// Bytes that are sent at once.
const ENOUGH: usize = 64 << 10;

impl Connection {
    /// Queues the frame of a message, which a double write's may gather with others like it.
    pub(in crate::engine) fn queue(&mut self, message: &Message, frame: Frame, now: Time) {
        if !matches!(message, Message::DoubleWrite { .. }) {
            self.gathers_until = None;
        } else if self.stream.outbox().is_empty() {
            self.gathers_until = Some(now.after(MOMENT));
        }
        self.stream.queue(frame);
    }

    /// Until when nothing need be sent.
    pub(in crate::engine) fn gathers_until(&self) -> Option<Time> {
        let outbox = self.stream.outbox();
        let gathers = self.life == Life::Open && !outbox.is_empty() && outbox.bytes() < ENOUGH;
        self.gathers_until.filter(|_| gathers)
    }
}

impl Engine {
    /// The connection on which double writes gather, and until when.
    pub(in crate::engine) fn gathering(&self) -> Option<(ConnectionKey, Time)> {
        let sync = self.links.as_ref()?.sync?;
        let connection = self.connections.get(sync)?;
        let waits = !connection.stream.is_sending();
        let until = connection.gathers_until().filter(|_| waits)?;
        Some((sync, until))
    }

    /// Sends what has gathered, once it is time.
    pub(in crate::engine) fn send_gathered(&mut self) {
        if let Some((key, until)) = self.gathering()
            && until <= self.now
        {
            self.connections.mark(key);
        }
    }
}
