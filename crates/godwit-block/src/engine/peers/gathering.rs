//! Double writes gather for a moment before they are sent.
//!
//! No guest waits for a double write that was answered early. One send operation, one record and one wake-up of the
//! other node then serve several double writes, and so do the replies.

use std::time::Duration;

use godwit_core::units::Time;
use godwit_core::wire::Message;

use crate::engine::connections::{Connection, ConnectionKey, Life};
use crate::engine::run::Engine;
use godwit_io::stream::Frame;

/// Wait of the first double write for others: far less than a migration's end may take, and time for five writes of a
/// guest that makes 10,000 a second.
const MOMENT: Duration = Duration::from_micros(500);

/// Bytes that are sent at once.
const ENOUGH: usize = 64 << 10;

impl Connection {
    /// Queues the frame of a message. Frames of double writes may gather, unless a guest waits for each of them.
    pub(in crate::engine) fn queue(
        &mut self,
        message: &Message,
        frame: Frame,
        now: Time,
        awaited: bool,
    ) {
        if awaited || !matches!(message, Message::DoubleWrite { .. }) {
            self.gathers_until = None;
        } else if self.stream.outbox().is_empty() {
            self.gathers_until = Some(now.after(MOMENT));
        }
        self.stream.queue(frame);
    }

    /// Returns the time until which nothing needs to be sent.
    pub(in crate::engine) fn gathers_until(&self) -> Option<Time> {
        let outbox = self.stream.outbox();
        let gathers = self.life == Life::Open && !outbox.is_empty() && outbox.bytes() < ENOUGH;
        self.gathers_until.filter(|_| gathers)
    }
}

impl Engine {
    /// Returns the connection on which double writes gather, and the end of the wait.
    pub(in crate::engine) fn gathering(&self) -> Option<(ConnectionKey, Time)> {
        let sync = self.moves.sync()?;
        let connection = self.connections.get(sync)?;
        let waits = !connection.stream.is_sending();
        let until = connection.gathers_until().filter(|_| waits)?;
        Some((sync, until))
    }

    /// Sends the gathered frames once the wait is over.
    pub(in crate::engine) fn send_gathered(&mut self) {
        if let Some((key, until)) = self.gathering()
            && until <= self.cx.now
        {
            self.connections.mark(key);
        }
    }
}
