//! The engine's connections, and what each is in the middle of receiving.

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

/// Names a connection for good: an index that is used again has another generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnectionKey {
    pub(super) index: u32,
    generation: u32,
}

/// What is being received.
#[derive(Clone, Copy, Debug)]
pub(super) enum Parse {
    /// A header.
    Header,
    /// What follows a peer's header and belongs to the frame itself.
    Body(Header),
    /// The header is here; a tag or memory for its request is not.
    Waiting(Head),
    /// What the connection asked for before has to be answered first; then this, if it is something.
    Alone(Option<Head>),
    /// Data for a slot's buffer.
    Payload {
        head: Head,
        tag: RequestTag,
        length: u32,
        received: u32,
    },
    /// The same, which travels compressed: `missing` bytes of that are still to come, and `done` of the
    /// data are in the buffer.
    Packed {
        head: Head,
        tag: RequestTag,
        length: u32,
        missing: u32,
        done: u32,
    },
    /// Data that nobody needs.
    Discard { remaining: u32 },
}

/// A decoded header whose request has not been handed to the controller.
#[derive(Clone, Copy, Debug)]
pub(super) enum Head {
    /// An NBD request, or a piece of one, and what it asks.
    Client {
        request: RequestHeader,
        operation: Operation,
        rest: Option<Rest>,
        part: Part,
    },
    /// A peer's frame, and the length of its data if that is compressed.
    Peer {
        message: Message,
        packed: Option<u32>,
    },
}

/// What a peer's connection may carry. One connection can do several of these.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Uses {
    /// Frames of the migration under way.
    pub(super) migration: bool,
    /// Requests of this node's clients go out, answers come in.
    pub(super) forwarding: bool,
    /// Requests of the peer's clients come in, answers go out.
    pub(super) served: bool,
}

/// Who is at the other end.
#[derive(Debug)]
pub(super) enum Party {
    /// An NBD client.
    Client {
        address: String,
        structured: bool,
        /// It may ask which ranges are allocated.
        allocation: bool,
        /// What its owner lent it until it is gone.
        _place: Option<Box<dyn Any + Send>>,
    },
    /// Another node.
    Peer { class: TrafficClass, uses: Uses },
}

impl Party {
    /// Who sends what is queued for it. While a guest works a worker of the kernel's sends what is
    /// copied, so that the thread is there for the guest; it costs both nodes some more processor time,
    /// which an idle guest need not.
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

/// How much of a connection's life is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// In use.
    Open,
    /// It closes when everything that came by it is answered and everything queued has left, or at
    /// this time. A client's is not read any more; what still comes on a peer's is dropped, until
    /// the peer closes it too, because closing it before could destroy what was sent last.
    Leaving { deadline: Time, said_goodbye: bool },
    /// It waits for the kernel to let go of its memory.
    Closing,
}

/// One connection.
pub(super) struct Connection {
    pub(super) key: ConnectionKey,
    pub(super) stream: Stream,
    pub(super) party: Party,
    /// Who is charged for what it asks for.
    pub(super) account: Account,
    pub(super) parse: Parse,
    pub(super) life: Life,
    /// Not read from for now: something older must finish first.
    pub(super) paused: bool,
    /// Not read from for now: too many answers wait to be sent.
    pub(super) throttled: bool,
    /// The last frame carried long data, so the next will too: read no further than its header.
    pub(super) bulk: bool,
    /// Requests that came by it and are not answered.
    pub(super) unanswered: u32,
    /// When bytes last moved while a request was half received or an answer half sent.
    pub(super) moved: Time,
    /// It is on the list of connections to look at before the next wait.
    pub(super) marked: bool,
    /// Decompresses what comes by it; made when the first does.
    pub(super) unpacker: Option<Box<Unpacker>>,
    /// What waits to be sent may gather until then; `None`: it is sent at once.
    pub(super) gathers_until: Option<Time>,
}

impl Connection {
    pub(super) const fn is_client(&self) -> bool {
        matches!(self.party, Party::Client { .. })
    }

    /// The class of what it asks for.
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

    /// The connection, unless it is gone.
    pub(super) fn get_mut(&mut self, key: ConnectionKey) -> Option<&mut Connection> {
        self.at(key.index)
            .filter(|connection| connection.key == key)
    }

    pub(super) fn get(&self, key: ConnectionKey) -> Option<&Connection> {
        let connection = self.entries.get(key.index as usize)?.as_deref()?;
        (connection.key == key).then_some(connection)
    }

    /// The connection that holds the index now.
    pub(super) fn at(&mut self, index: u32) -> Option<&mut Connection> {
        self.entries.get_mut(index as usize)?.as_deref_mut()
    }

    /// Takes a connection out. Its stream must be idle.
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

    /// Puts the connection on the list of those to look at before the next wait.
    pub(super) fn mark(&mut self, key: ConnectionKey) {
        if let Some(connection) = self.get_mut(key)
            && !std::mem::replace(&mut connection.marked, true)
        {
            self.marked.push(key);
        }
    }

    /// Takes one off that list.
    pub(super) fn next_marked(&mut self) -> Option<ConnectionKey> {
        let key = self.marked.pop()?;
        if let Some(connection) = self.get_mut(key) {
            connection.marked = false;
        }
        Some(key)
    }
}

/// A TCP socket as the owned descriptor that streams are made of.
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
