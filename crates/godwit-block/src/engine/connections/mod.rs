//! The engine's connections, and the state of reception on each.

pub(super) mod closing;
pub(super) mod lanes;
pub(super) mod receive;
pub(super) mod sending;
pub(super) mod shares;
pub(super) mod streams;

use std::any::Any;

use godwit_core::request::{Operation, RequestTag};
use godwit_core::units::Time;
use godwit_core::wire::{Header, Message, TrafficClass};

use crate::engine::connections::shares::Account;
use crate::engine::connections::streams::PeerStream;
use crate::engine::context::Context;
use crate::engine::front_ends::nbd::parts::{Part, Wholes};
use crate::engine::peers;
use crate::engine::slots::{Class, Owner, Rest, Slots};
use crate::nbd::RequestHeader;
use godwit_io::stream::{SentBy, Stream, Unpacker};

/// Bytes that the kernel takes from a migration's connection ahead of transmission: a millisecond's worth at 1 Gbit/s,
/// so that the link stays full and a double write waits for little.
const MOST_UNSENT: u32 = 128 << 10;

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

/// The slot that a request needs.
pub(super) struct Needs {
    pub(super) class: Class,
    pub(super) owner: Owner,
    /// Length of the buffer.
    pub(super) buffer: u32,
    /// Bytes of the buffer to receive.
    pub(super) length: u32,
}

impl Needs {
    /// Returns the needs of a client's operation.
    pub(super) const fn of(operation: &Operation, class: Class, owner: Owner) -> Self {
        let (buffer, length) = match operation {
            Operation::Read(extent) => (extent.bytes() as u32, 0),
            Operation::Write { extent, .. } => (extent.bytes() as u32, extent.bytes() as u32),
            Operation::WriteZeroes { .. } | Operation::Flush => (0, 0),
        };
        Self {
            class,
            owner,
            buffer,
            length,
        }
    }
}

impl Head {
    fn needs(self, connection: ConnectionKey) -> Needs {
        match self {
            Self::Client {
                request,
                operation,
                rest,
                part,
            } => {
                let owner = Owner::Client {
                    connection,
                    request,
                    operation,
                    rest,
                    part,
                };
                Needs::of(&operation, Class::Client, owner)
            }
            Self::Peer { message, .. } => peers::needs(connection, message),
        }
    }
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

    /// Returns true if bytes that arrive are handled now.
    fn is_read(&self) -> bool {
        let leaves = self.life != Life::Open && self.is_client();
        !self.paused && !leaves && self.life != Life::Closing
    }

    /// Drops the next bytes that arrive.
    pub(super) const fn discard(&mut self, remaining: u32) {
        if remaining > 0 {
            self.parse = Parse::Discard { remaining };
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
    /// Clients' requests that are carried out in pieces.
    pub(super) wholes: Wholes,
}

impl Connections {
    /// Takes over a peer's connection; `None` if its socket is unusable.
    pub(super) fn adopt(
        &mut self,
        stream: PeerStream,
        class: TrafficClass,
        uses: Uses,
        cx: &Context,
        slots: &mut Slots,
    ) -> Option<ConnectionKey> {
        let PeerStream { socket, tls } = stream;
        match Stream::new(socket.into(), tls, &[]) {
            Ok(stream) => {
                if uses.migration {
                    stream.limit_unsent(MOST_UNSENT);
                }
                let party = Party::Peer { class, uses };
                Some(self.insert(stream, party, slots.open_account(), cx.now))
            }
            Err(error) => {
                let disk = &cx.config.disk;
                tracing::warn!(
                    disk,
                    ?class,
                    "cannot use a connection to another node: {error}"
                );
                None
            }
        }
    }

    pub(super) fn insert(
        &mut self,
        stream: Stream,
        party: Party,
        account: Account,
        now: Time,
    ) -> ConnectionKey {
        let index = empty_place(&mut self.entries);
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

    /// Returns the roles of a peer's connection.
    pub(super) fn uses_mut(&mut self, key: ConnectionKey) -> Option<&mut Uses> {
        self.get_mut(key)?.uses_mut()
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

/// Returns the index of an empty place in a table. The table grows if all places are taken.
pub(super) fn empty_place<T>(table: &mut Vec<Option<T>>) -> usize {
    let empty = table.iter().position(Option::is_none);
    empty.unwrap_or_else(|| {
        table.push(None);
        table.len() - 1
    })
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
