//! The end of connections.

use std::io::ErrorKind;
use std::time::Duration;

use godwit_core::units::Time;

use crate::engine::config::EngineEvent;
use crate::engine::connections::receive::Lost;
use crate::engine::connections::sending::release;
use crate::engine::connections::{ConnectionKey, Head, Life, Parse, Party};
use crate::engine::run::Engine;
use godwit_io::ring::Token;
use godwit_io::stream::StreamError;

/// Longest time without movement for a half received request, or, while others wait for its memory, for a half sent
/// answer.
const STALL: Duration = Duration::from_secs(30);

impl Engine {
    /// Ends a leaving connection with nothing left to send.
    pub(super) fn say_goodbye(&mut self, key: ConnectionKey) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        let Life::Leaving {
            deadline,
            said_goodbye,
        } = connection.life
        else {
            return;
        };
        let stream = &mut connection.stream;
        if connection.unanswered > 0 || stream.wants_send() || stream.is_sending() {
            return;
        }
        if !said_goodbye {
            connection.life = Life::Leaving {
                deadline,
                said_goodbye: true,
            };
            stream.close_session();
            return self.connections.mark(key);
        }
        stream.shut_down_sending();
        if connection.is_client() {
            self.depart(key);
        }
    }

    /// Lets a connection finish its work, then closes the connection.
    pub(in crate::engine) fn leave(&mut self, key: ConnectionKey, within: Duration) {
        let deadline = self.now.after(within);
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        if connection.life == Life::Open {
            connection.life = Life::Leaving {
                deadline,
                said_goodbye: false,
            };
            connection.stream.stop_packing();
            if let Some(uses) = connection.uses_mut() {
                *uses = crate::engine::connections::Uses::default();
            }
            self.connections.mark(key);
        }
    }

    /// Closes a failed connection, and informs its users.
    pub(in crate::engine) fn lost(&mut self, key: ConnectionKey, why: &Lost) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        if connection.life == Life::Closing {
            return;
        }
        let disk = &self.config.disk;
        match &connection.party {
            Party::Client { address, .. } => match why {
                Lost::Stream(StreamError::Closed) => {
                    tracing::info!(disk, client = address, "client left");
                }
                // The client has announced its departure, and need not wait for the last answers.
                Lost::Stream(_) if connection.life != Life::Open => {
                    tracing::info!(disk, client = address, "client left");
                }
                // An answer may meet the closed socket before the announcement of the departure is read.
                Lost::Stream(StreamError::Socket(error))
                    if error.kind() == ErrorKind::BrokenPipe =>
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
    fn depart(&mut self, key: ConnectionKey) {
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
                self.clients -= 1;
                self.tell(EngineEvent::Clients(self.clients));
                self.client_left(key);
            }
            Some((class, uses)) => self.unlink(key, class, uses),
        }
    }

    /// Closes a connection: nothing of it is handled from now on. Its memory is freed once the kernel has let go.
    pub(in crate::engine) fn close(&mut self, key: ConnectionKey) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        if connection.life == Life::Closing {
            return;
        }
        connection.life = Life::Closing;
        let index = key.index;
        connection
            .stream
            .abort(&mut self.ring, Token::Receive(index), Token::Send(index));
        self.reap(key);
    }

    /// Frees a closed connection once the kernel uses nothing of it.
    pub(in crate::engine) fn reap(&mut self, key: ConnectionKey) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        connection.stream.clear(&mut release(
            &mut self.slots,
            &mut self.chunks,
            &mut self.owed,
        ));
        if !connection.stream.is_idle() {
            return;
        }
        let (parse, account) = (connection.parse, connection.account);
        drop(self.connections.remove(key));
        match parse {
            Parse::Payload { head, tag, .. } | Parse::Packed { head, tag, .. } => match head {
                Head::Client { .. } => {
                    self.cut_off(head);
                    self.slots.finish(tag);
                }
                Head::Peer { message, .. } => self.drop_frame(message, tag),
            },
            Parse::Waiting(head) | Parse::Alone(Some(head)) => self.cut_off(head),
            _ => {}
        }
        self.slots.close_account(account);
    }

    /// Drops connections that take too long. Returns true while any must be watched.
    pub(in crate::engine) fn drop_stalled(&mut self) -> bool {
        let now = self.now;
        let mut watch = false;
        let mut stalled: Vec<(ConnectionKey, bool)> = Vec::new();
        for connection in self.connections.iter() {
            let partial = matches!(
                connection.parse,
                Parse::Payload { .. } | Parse::Packed { .. } | Parse::Discard { .. }
            );
            let stuck = connection.stream.is_sending();
            match connection.life {
                Life::Closing => watch = true,
                Life::Leaving { deadline, .. } => {
                    watch = true;
                    if deadline <= now {
                        stalled.push((connection.key, true));
                    }
                }
                Life::Open if partial || stuck => {
                    watch = true;
                    let late = Time(connection.moved.0).after(STALL) <= now;
                    let crowded = || {
                        let class = connection.asks_of();
                        self.slots.is_short_for_others(class, connection.key)
                    };
                    if late && (partial || crowded()) {
                        stalled.push((connection.key, false));
                    }
                }
                Life::Open => {}
            }
        }
        for (key, leaving) in stalled {
            if leaving {
                self.depart(key)
            } else {
                self.lost(key, &Lost::Stalled)
            }
        }
        watch
    }
}
