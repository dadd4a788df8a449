//! The end of connections.

use std::io::ErrorKind;
use std::time::Duration;

use godwit_core::units::Time;

use crate::engine::config::EngineEvent;
use crate::engine::connections::receive::Lost;
use crate::engine::connections::{
    Connection, ConnectionKey, Connections, Head, Life, Parse, Party, Uses,
};
use crate::engine::front_ends::nbd::parts::whole_of;
use crate::engine::run::Engine;
use crate::engine::slots::Slots;
use crate::engine::slots::memory::Memory;
use godwit_io::ring::{Ring, Token};
use godwit_io::stream::StreamError;

/// Longest time without movement for a half received request, or, while others wait for its memory, for a half sent
/// answer.
const STALL: Duration = Duration::from_secs(30);

/// The state of a connection that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slow {
    /// Something moves, or may.
    Working,
    /// A connection was to close by now.
    Overdue,
    /// Nothing has moved for too long.
    Stalled,
}

impl Connection {
    /// Returns the state of a connection that must be watched; `None` if nothing is under way.
    fn slow(&self, now: Time, slots: &Slots) -> Option<Slow> {
        let partial = matches!(
            self.parse,
            Parse::Payload { .. } | Parse::Packed { .. } | Parse::Discard { .. }
        );
        match self.life {
            Life::Closing => Some(Slow::Working),
            Life::Leaving { deadline, .. } if deadline <= now => Some(Slow::Overdue),
            Life::Leaving { .. } => Some(Slow::Working),
            Life::Open if partial || self.stream.is_sending() => {
                let late = self.moved.after(STALL) <= now;
                let crowded = || slots.is_short_for_others(self.asks_of(), self.key);
                let stalled = late && (partial || crowded());
                Some(if stalled {
                    Slow::Stalled
                } else {
                    Slow::Working
                })
            }
            Life::Open => None,
        }
    }
}

impl Connections {
    /// Lets a connection finish its work until the deadline, then closes the connection.
    pub(in crate::engine) fn leave(&mut self, key: ConnectionKey, deadline: Time) {
        let Some(connection) = self.get_mut(key) else {
            return;
        };
        if connection.life == Life::Open {
            connection.life = Life::Leaving {
                deadline,
                said_goodbye: false,
            };
            connection.stream.stop_packing();
            if let Some(uses) = connection.uses_mut() {
                *uses = Uses::default();
            }
            self.mark(key);
        }
    }

    /// Ends a leaving connection with nothing left to send. Returns true if the connection is a client's, and over.
    pub(super) fn say_goodbye(&mut self, key: ConnectionKey) -> bool {
        let Some(connection) = self.get_mut(key) else {
            return false;
        };
        let Life::Leaving {
            deadline,
            said_goodbye,
        } = connection.life
        else {
            return false;
        };
        let stream = &mut connection.stream;
        if connection.unanswered > 0 || stream.wants_send() || stream.is_sending() {
            return false;
        }
        if !said_goodbye {
            connection.life = Life::Leaving {
                deadline,
                said_goodbye: true,
            };
            stream.close_session();
            self.mark(key);
            return false;
        }
        stream.shut_down_sending();
        connection.is_client()
    }

    /// Closes a connection: nothing of it is handled from now on. Its memory is freed once the kernel has let go.
    fn close(&mut self, key: ConnectionKey, ring: &mut Ring, memory: &mut Memory) {
        let Some(connection) = self.get_mut(key) else {
            return;
        };
        if connection.life == Life::Closing {
            return;
        }
        connection.life = Life::Closing;
        let (receive, send) = (Token::Receive(key.index), Token::Send(key.index));
        connection.stream.abort(ring, receive, send);
        self.reap(key, memory);
    }

    /// Frees a closed connection once the kernel uses nothing of it.
    pub(super) fn reap(&mut self, key: ConnectionKey, memory: &mut Memory) {
        let Some(connection) = self.get_mut(key) else {
            return;
        };
        let stream = &mut connection.stream;
        stream.clear(&mut |payload| memory.release(payload));
        if !stream.is_idle() {
            return;
        }
        let (parse, account) = (connection.parse, connection.account);
        drop(self.remove(key));
        let (head, tag) = match parse {
            Parse::Payload { head, tag, .. } | Parse::Packed { head, tag, .. } => (head, Some(tag)),
            Parse::Waiting(head) | Parse::Alone(Some(head)) => (head, None),
            _ => return memory.slots.close_account(account),
        };
        if let Some(whole) = whole_of(&head) {
            self.wholes.cut_off(whole);
        }
        match (head, tag) {
            (Head::Peer { message, .. }, Some(tag)) => memory.drop_frame(&message, tag),
            (Head::Client { .. }, Some(tag)) => memory.slots.finish(tag),
            (_, None) => {}
        }
        memory.slots.close_account(account);
    }

    /// Stops the kernel's operations on all connections.
    pub(in crate::engine) fn abort(&self, ring: &mut Ring) {
        for connection in self.iter() {
            let index = connection.key.index;
            let (receive, send) = (Token::Receive(index), Token::Send(index));
            connection.stream.abort(ring, receive, send);
        }
    }
}

impl Engine {
    /// Closes a connection without informing its users.
    pub(in crate::engine) fn close(&mut self, key: ConnectionKey) {
        self.connections
            .close(key, &mut self.ring, &mut self.memory);
    }

    /// Closes a failed connection, and informs its users.
    pub(in crate::engine) fn lost(&mut self, key: ConnectionKey, why: &Lost) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        if connection.life == Life::Closing {
            return;
        }
        let disk = &self.cx.config.disk;
        match &connection.party {
            Party::Client { address, .. } => match why {
                Lost::Stream(StreamError::Closed) => {
                    tracing::info!(disk, client = address, "client left");
                }
                // The client has announced its departure, and need not wait for the last answers.
                Lost::Stream(_) if connection.life != Life::Open => {
                    tracing::info!(disk, client = address, "client left");
                }
                // An answer may meet the closed socket before the announcement of the departure is read. Answers that
                // the client leaves unread reset the connection.
                Lost::Stream(StreamError::Socket(error))
                    if matches!(
                        error.kind(),
                        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
                    ) =>
                {
                    tracing::info!(
                        disk,
                        client = address,
                        "client left before its last answers"
                    );
                }
                why => tracing::warn!(disk, client = address, "client disconnected: {why}"),
            },
            Party::Peer { class, .. } if connection.life == Life::Open => {
                tracing::info!(disk, ?class, "connection to the other node ended: {why}");
            }
            Party::Peer { .. } => {}
        }
        self.depart(key);
    }

    /// Closes a connection and informs its users.
    pub(super) fn depart(&mut self, key: ConnectionKey) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        let about = match connection.party {
            Party::Client { .. } => None,
            Party::Peer { class, uses } => Some((class, uses)),
        };
        self.close(key);
        match about {
            None => {
                self.nbd.attached -= 1;
                self.cx.tell(EngineEvent::Clients(self.clients()));
                self.client_left(key);
            }
            Some((class, uses)) => self.unlink(key, class, uses),
        }
    }

    /// Drops connections that take too long. Returns true while any must be watched.
    pub(in crate::engine) fn drop_stalled(&mut self) -> bool {
        let (now, slots) = (self.cx.now, &self.memory.slots);
        let mut watch = false;
        let mut late: Vec<(ConnectionKey, Slow)> = Vec::new();
        for connection in self.connections.iter() {
            let slow = connection.slow(now, slots);
            watch |= slow.is_some();
            late.extend(
                slow.filter(|it| *it != Slow::Working)
                    .map(|it| (connection.key, it)),
            );
        }
        for (key, slow) in late {
            match slow {
                Slow::Working => {}
                Slow::Overdue => self.depart(key),
                Slow::Stalled => self.lost(key, &Lost::Stalled),
            }
        }
        watch
    }
}
