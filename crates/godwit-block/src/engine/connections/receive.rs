//! Turns the bytes that arrive on a connection into requests and frames.

use godwit_core::request::RequestTag;
use godwit_core::units::Bytes;
use godwit_core::wire::{DecodeError, HEADER_SIZE, Header, Message};

use crate::engine::connections::{ConnectionKey, Head, Life, Parse};
use crate::engine::run::Engine;
use crate::engine::slots::{Class, Owner, Waiter};
use crate::nbd::{InvalidRequest, REQUEST_HEADER_SIZE};
use godwit_io::ring::Token;
use godwit_io::stream::{StreamError, Unpacker};

/// Longest data that is read together with the requests around it and then copied into place: faster than a receive
/// operation for each.
const COPIED: u32 = 16 << 10;

/// Most unsent answers of a client before reading stops.
const MOST_ANSWERS: usize = 256;

/// The reason for the end of a connection.
#[derive(Debug, thiserror::Error)]
pub(in crate::engine) enum Lost {
    /// The connection ended, or the other side reads nothing.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The client does not speak NBD.
    #[error(transparent)]
    Request(#[from] InvalidRequest),
    /// A write is longer than any server need take.
    #[error("the client sent a write of {}, and 32 MiB is the most there may be", Bytes(u64::from(*.0)))]
    TooLong(u32),
    /// The peer's bytes are not frames.
    #[error(transparent)]
    Frame(#[from] DecodeError),
    /// The frame does not belong on this connection or at this time.
    #[error("the other node sent a frame that does not belong here: {0:?}")]
    Unexpected(Message),
    /// The rest of a promised answer cannot be read.
    #[error("the disk failed in the middle of a long answer")]
    Unreadable,
    /// Nothing moved for too long.
    #[error("the other side stopped in the middle of a transfer")]
    Stalled,
}

impl Engine {
    /// Ends a receive operation.
    pub(in crate::engine) fn received(&mut self, index: u32, result: i32) {
        let now = self.now;
        let Some(connection) = self.connections.at(index) else {
            return;
        };
        let key = connection.key;
        connection.moved = now;
        let outcome = connection.stream.received(result);
        if connection.life == Life::Closing {
            return self.reap(key);
        }
        match outcome {
            Ok(count) => {
                if let Parse::Payload { received, .. } = &mut connection.parse {
                    *received += count as u32;
                }
                self.advance(key);
            }
            Err(error) => self.lost(key, &error.into()),
        }
    }

    /// Handles everything that has arrived on the connection, then asks for more.
    pub(in crate::engine) fn advance(&mut self, key: ConnectionKey) {
        match self.parse(key) {
            Ok(()) => self.ask_for_more(key),
            Err(error) => self.lost(key, &error),
        }
        self.connections.mark(key);
    }

    fn parse(&mut self, key: ConnectionKey) -> Result<(), Lost> {
        loop {
            let Some(connection) = self.connections.get_mut(key) else {
                return Ok(());
            };
            let leaves = connection.life != Life::Open && connection.is_client();
            if connection.paused || leaves || connection.life == Life::Closing {
                return Ok(());
            }
            let progress = match connection.parse {
                Parse::Header if connection.is_client() => {
                    let mut bytes = [0; REQUEST_HEADER_SIZE];
                    connection.throttled = connection.stream.outbox().frames() > MOST_ANSWERS;
                    let complete =
                        !connection.throttled && connection.stream.take_exactly(&mut bytes)?;
                    if complete {
                        self.client_header(key, &bytes)?;
                    }
                    complete
                }
                Parse::Header => {
                    let mut bytes = [0; HEADER_SIZE];
                    let complete = connection.stream.take_exactly(&mut bytes)?;
                    if complete {
                        let header = Header::decode(&bytes)?;
                        if header.payload_in_buffer() || header.payload_length == 0 {
                            let message = Message::decode(&header, &[])?;
                            let compressed = header.is_compressed();
                            self.peer_frame(key, message, header.payload_length, compressed)?;
                        } else if header.payload_length as usize <= HEADER_SIZE {
                            connection.parse = Parse::Body(header);
                        } else {
                            return Err(DecodeError::PayloadLength(header.payload_length).into());
                        }
                    }
                    complete
                }
                Parse::Body(header) => {
                    let mut body = [0; HEADER_SIZE];
                    let body = &mut body[..header.payload_length as usize];
                    let complete = connection.stream.take_exactly(body)?;
                    if complete {
                        connection.parse = Parse::Header;
                        let message = Message::decode(&header, body)?;
                        self.peer_frame(key, message, 0, false)?;
                    }
                    complete
                }
                Parse::Payload {
                    head,
                    tag,
                    length,
                    ref mut received,
                } => {
                    let range = *received as usize..length as usize;
                    let room = self.slots.bytes_mut(tag, range);
                    *received += connection.stream.take_payload(room)? as u32;
                    let complete = *received == length;
                    if complete {
                        connection.parse = Parse::Header;
                        self.payload_complete(key, head, tag);
                    }
                    complete
                }
                Parse::Packed {
                    head,
                    tag,
                    length,
                    ref mut missing,
                    ref mut done,
                } => {
                    let unpacker = match &mut connection.unpacker {
                        Some(unpacker) => unpacker,
                        none => {
                            none.insert(Box::new(Unpacker::new().map_err(StreamError::Socket)?))
                        }
                    };
                    let taken = connection.stream.take_payload(unpacker.room(*missing)?)?;
                    *missing -= taken as u32;
                    if unpacker.received(taken)? {
                        let place = Unpacker::place(*done, length);
                        *done = place.end as u32;
                        unpacker.unpack(self.slots.bytes_mut(tag, place))?;
                    }
                    if *done == length {
                        if *missing > 0 {
                            return Err(DecodeError::Body.into());
                        }
                        connection.parse = Parse::Header;
                        self.payload_complete(key, head, tag);
                    }
                    taken > 0
                }
                Parse::Discard { ref mut remaining } => {
                    *remaining -= connection.stream.discard(*remaining as usize)? as u32;
                    let complete = *remaining == 0;
                    if complete {
                        connection.parse = Parse::Header;
                    }
                    complete
                }
                Parse::Waiting(_) | Parse::Alone(_) => false,
            };
            if !progress {
                return Ok(());
            }
        }
    }

    /// Starts the connection's next receive operation, unless reading is suspended.
    fn ask_for_more(&mut self, key: ConnectionKey) {
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        let leaves = connection.life != Life::Open && connection.is_client();
        if connection.paused
            || connection.throttled
            || leaves
            || connection.life == Life::Closing
            || connection.stream.is_receiving()
        {
            return;
        }
        let header = if connection.is_client() {
            REQUEST_HEADER_SIZE
        } else {
            HEADER_SIZE
        };
        let (payload, ahead) = match connection.parse {
            Parse::Waiting(_) | Parse::Alone(_) => return,
            Parse::Payload {
                tag,
                length,
                received,
                ..
            } => {
                let rest = (length - received) as usize;
                let place = self.slots.address(tag, received as usize);
                let ahead = if length <= COPIED { usize::MAX } else { header };
                (
                    place.map(|(pointer, room)| (pointer, rest.min(room))),
                    ahead,
                )
            }
            Parse::Header if connection.bulk => {
                (None, header.saturating_sub(connection.stream.staged()))
            }
            _ => (None, usize::MAX),
        };
        // SAFETY: the slot's buffer stays in place while the connection receives into it: a new request's slot is busy
        // and an answered one's is held, both until the payload is complete or `reap` finds the stream idle. Nothing
        // else uses the buffer meanwhile.
        unsafe {
            connection
                .stream
                .receive(&mut self.ring, Token::Receive(key.index), payload, ahead)
        };
    }

    /// Handles a request that has been received in full.
    fn payload_complete(&mut self, key: ConnectionKey, head: Head, tag: RequestTag) {
        match head {
            Head::Client { .. } => self.part_received(key, head, tag),
            Head::Peer { message, .. } => self.peer_payload(key, message, tag),
        }
    }

    /// Retries the waiters for a tag or memory, in order.
    pub(in crate::engine) fn retry_waiting(&mut self) {
        for class in [Class::Sync, Class::Client, Class::Copy] {
            for _ in 0..self.slots.waiting(class) {
                let Some(waiter) = self.slots.next_waiting(class) else {
                    break;
                };
                let admitted = match waiter {
                    Waiter::Connection(key) => self.admit_waiting_connection(key),
                    Waiter::Ring(ring) => self.admit_waiting_ring(ring),
                };
                if !admitted {
                    self.slots.wait(class, waiter);
                }
            }
        }
    }

    /// Resumes a connection that waited. Returns false if there is still no slot for its request.
    fn admit_waiting_connection(&mut self, key: ConnectionKey) -> bool {
        let Some(connection) = self.connections.get_mut(key) else {
            return true;
        };
        let head = match connection.parse {
            _ if connection.life == Life::Closing => return true,
            Parse::Waiting(head) | Parse::Alone(Some(head)) => head,
            Parse::Alone(None) => {
                connection.parse = Parse::Header;
                self.advance(key);
                return true;
            }
            _ => return true,
        };
        let admitted = self.admit(key, head, true);
        if admitted {
            self.advance(key);
        }
        admitted
    }

    /// Gives a request its slot and receives its data, or lets the connection wait.
    pub(in crate::engine) fn admit(
        &mut self,
        key: ConnectionKey,
        head: Head,
        waited: bool,
    ) -> bool {
        let (class, owner, buffer, length) = match head {
            Head::Client {
                request,
                operation,
                rest,
                part,
            } => self.client_needs(key, request, operation, rest, part),
            Head::Peer { message, .. } => self.peer_needs(key, message),
        };
        // A migration's frames come by one connection, beside which nothing else needs the class.
        let account = match owner {
            Owner::Replica => None,
            _ => self.connections.get(key).map(|c| c.account),
        };
        let tag = self.slots.take(class, buffer, owner, account, waited);
        let Some(connection) = self.connections.get_mut(key) else {
            if let Some(tag) = tag {
                self.slots.finish(tag);
            }
            return true;
        };
        let Some(tag) = tag else {
            connection.parse = Parse::Waiting(head);
            if !waited {
                self.slots.wait(class, Waiter::Connection(key));
            }
            return false;
        };
        let packed = match head {
            Head::Peer { packed, .. } => packed,
            Head::Client { .. } => None,
        };
        connection.bulk = length > COPIED && packed.is_none();
        if let Some(missing) = packed {
            connection.parse = Parse::Packed {
                head,
                tag,
                length,
                missing,
                done: 0,
            };
        } else if length > 0 {
            connection.parse = Parse::Payload {
                head,
                tag,
                length,
                received: 0,
            };
        } else {
            connection.parse = Parse::Header;
            self.payload_complete(key, head, tag);
        }
        true
    }
}
