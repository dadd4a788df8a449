//! The engine's connections, and the state of reception on each.

pub(super) mod closing;
pub(super) mod lanes;
pub(super) mod receive;
pub(super) mod sending;
pub(super) mod shares;
pub(super) mod streams;

use std::any::Any;
use std::net::TcpStream;

use godwit_core::request::{Operation, RequestTag};
use godwit_core::units::Time;
use godwit_core::wire::{Header, Message, TrafficClass};

use crate::engine::connections::shares::Account;
use crate::engine::front_ends::nbd::parts::Part;
use crate::engine::slots::{Class, Rest};
use crate::nbd::RequestHeader;
use godwit_io::stream::{SentBy, Stream, Unpacker};

/// The permanent identity of a connection: a reused index has another generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionKey {
    pub(super) index: u32,
    generation: u32,
}

/// The state of reception.
#[derive(Clone, Copy, Debug)]
pub(super) enum Parse {
    /// A header.
    Header,
    /// The bytes after a peer's header that belong to the frame itself.
    Body(Header),
    /// The header is here; a tag or memory for its request is not.
    Waiting(Head),
    /// Earlier requests of the connection must be answered first; then the head, if any, is next.
    Alone(Option<Head>),
    /// Data for a slot's buffer.
    Payload {
        head: Head,
        tag: RequestTag,
        length: u32,
        received: u32,
    },
    /// Compressed data for a slot's buffer: `missing` compressed bytes are still to come, and `done` bytes of data are
    /// in the buffer.
    Packed {
        head: Head,
        tag: RequestTag,
        length: u32,
        missing: u32,
        done: u32,
    },
    /// Data to drop.
    Discard { remaining: u32 },
}

/// A decoded header whose request has not been handed to the controller.
#[derive(Clone, Copy, Debug)]
pub(super) enum Head {
    /// An NBD request, or a piece of one, and its operation.
    Client {
        request: RequestHeader,
        operation: Operation,
        rest: Option<Rest>,
        part: Part,
    },
    /// A peer's frame, and the length of its data if compressed.
    Peer {
        message: Message,
        packed: Option<u32>,
    },
}

/// The roles of a peer's connection. A connection can have several.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Uses {
    /// Frames of the migration under way.
    pub(super) migration: bool,
    /// Requests of this node's clients go out, answers come in.
    pub(super) forwarding: bool,
    /// Requests of the peer's clients come in, answers go out.
    pub(super) served: bool,
}

/// The party at the other end.
#[derive(Debug)]
pub(super) enum Party {
    /// An NBD client.
    Client {
        address: String,
        structured: bool,
        /// True if the client may ask for allocated ranges.
        allocation: bool,
        /// Client place, held until the client is gone.
        _place: Option<Box<dyn Any + Send>>,
    },
    /// Another node.
    Peer { class: TrafficClass, uses: Uses },
}

impl Party {
    /// Returns the sender of the connection's queue. While a guest works, a kernel worker sends copies, so that the
    /// thread is free for the guest. A worker costs both nodes some more processor time, which an idle guest does not
    /// justify.
    pub(super) fn sent_by(&self, guest_is_idle: bool) -> SentBy {
        match self {
            Self::Peer {
                class: TrafficClass::Copy,
                ..
            } if !guest_is_idle => SentBy::Worker,
            _ => SentBy::Caller,
        }
    }
}

/// The phase of a connection's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// In use.
    Open,
    /// Closes once all requests are answered and everything queued has left, or at the deadline. A client's connection
    /// is not read any more. Frames of a peer are dropped until the peer closes, too: an earlier close could destroy
    /// the last data sent.
    Leaving { deadline: Time, said_goodbye: bool },
    /// Waits for the kernel to let go of the connection's memory.
    Closing,
}

pub(super) struct Connection {
    pub(super) key: ConnectionKey,
    pub(super) stream: Stream,
    pub(super) party: Party,
    /// Account charged for the connection's requests.
    pub(super) account: Account,
    pub(super) parse: Parse,
    pub(super) life: Life,
    /// True while older work must finish before the next read.
    pub(super) paused: bool,
    /// True while too many answers wait to be sent for another read.
    pub(super) throttled: bool,
    /// True if the last frame carried long data, so the next probably will, too: read no further than its header.
    pub(super) bulk: bool,
    /// Requests of the connection without an answer.
    pub(super) unanswered: u32,
    /// Time of the last movement of bytes, for a half received request or a half sent answer.
    pub(super) moved: Time,
    /// True if the connection is on the list for the end of the turn.
    pub(super) marked: bool,
    /// Decompressor of received frames; created for the first compressed frame.
    pub(super) unpacker: Option<Box<Unpacker>>,
    /// Time until which queued frames may gather; `None` to send at once.
    pub(super) gathers_until: Option<Time>,
}

impl Connection {
    pub(super) const fn is_client(&self) -> bool {
        matches!(self.party, Party::Client { .. })
    }

    /// Returns the class of the connection's requests.
    pub(super) const fn asks_of(&self) -> Class {
        match self.party {
            Party::Client { .. } => Class::Client,
            Party::Peer {
                class: TrafficClass::Copy | TrafficClass::Pull | TrafficClass::Image,
                ..
            } => Class::Copy,
            Party::Peer { .. } => Class::Sync,
        }
    }

    pub(super) fn uses(&self) -> Uses {
        match self.party {
            Party::Client { .. } => Uses::default(),
            Party::Peer { uses, .. } => uses,
        }
    }

    pub(super) fn uses_mut(&mut self) -> Option<&mut Uses> {
        match &mut self.party {
            Party::Client { .. } => None,
            Party::Peer { uses, .. } => Some(uses),
        }
    }
}

/// All connections, by index.
#[derive(Default)]
pub(super) struct Connections {
    entries: Vec<Option<Box<Connection>>>,
    generation: u32,
    /// Connections with work for the end of the turn.
    marked: Vec<ConnectionKey>,
}

impl Connections {
    pub(super) fn insert(
        &mut self,
        stream: Stream,
        party: Party,
        account: Account,
        now: Time,
    ) -> ConnectionKey {
        let index = match self.entries.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.entries.push(None);
                self.entries.len() - 1
            }
        };
        self.generation = self.generation.wrapping_add(1);
        let key = ConnectionKey {
            index: index as u32,
            generation: self.generation,
        };
        self.entries[index] = Some(Box::new(Connection {
            key,
            stream,
            party,
            account,
            parse: Parse::Header,
            life: Life::Open,
            paused: false,
            throttled: false,
            bulk: false,
            unanswered: 0,
            moved: now,
            marked: false,
            unpacker: None,
            gathers_until: None,
        }));
        key
    }

    /// Returns the connection, unless gone.
    pub(super) fn get_mut(&mut self, key: ConnectionKey) -> Option<&mut Connection> {
        self.at(key.index)
            .filter(|connection| connection.key == key)
    }

    pub(super) fn get(&self, key: ConnectionKey) -> Option<&Connection> {
        let connection = self.entries.get(key.index as usize)?.as_deref()?;
        (connection.key == key).then_some(connection)
    }

    /// Returns the connection that holds the index now.
    pub(super) fn at(&mut self, index: u32) -> Option<&mut Connection> {
        self.entries.get_mut(index as usize)?.as_deref_mut()
    }

    /// Removes a connection. Its stream must be idle.
    pub(super) fn remove(&mut self, key: ConnectionKey) -> Option<Box<Connection>> {
        let entry = self.entries.get_mut(key.index as usize)?;
        entry.take_if(|connection| connection.key == key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Connection> {
        self.entries
            .iter()
            .flatten()
            .map(|connection| &**connection)
    }

    /// Puts the connection on the list for the end of the turn.
    pub(super) fn mark(&mut self, key: ConnectionKey) {
        if let Some(connection) = self.get_mut(key)
            && !std::mem::replace(&mut connection.marked, true)
        {
            self.marked.push(key);
        }
    }

    /// Takes a connection off the list for the end of the turn.
    pub(super) fn next_marked(&mut self) -> Option<ConnectionKey> {
        let key = self.marked.pop()?;
        if let Some(connection) = self.get_mut(key) {
            connection.marked = false;
        }
        Some(key)
    }
}

/// Converts a TCP socket to an owned descriptor.
pub(super) fn descriptor(socket: TcpStream) -> std::os::fd::OwnedFd {
    socket.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_sends_copies_while_a_guest_works() {
        let uses = Uses::default();
        let peer = |class| Party::Peer { class, uses };
        let client = Party::Client {
            address: String::new(),
            structured: false,
            allocation: false,
            _place: None,
        };
        let copies = peer(TrafficClass::Copy);
        assert_eq!(copies.sent_by(false), SentBy::Worker);
        assert_eq!(copies.sent_by(true), SentBy::Caller);
        for other in [
            peer(TrafficClass::Sync),
            peer(TrafficClass::Control),
            client,
        ] {
            assert_eq!(other.sent_by(false), SentBy::Caller);
        }
    }
}
