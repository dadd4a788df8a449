//! Turns the bytes that arrive on a connection into requests and frames.

use godwit_core::request::RequestTag;
use godwit_core::units::Bytes;
use godwit_core::wire::{DecodeError, HEADER_SIZE, Header, Message};

use crate::engine::connections::{Connection, ConnectionKey, Connections, Head, Life, Parse};
use crate::engine::run::Engine;
use crate::engine::slots::{Class, Owner, Slots, Waiter};
use crate::nbd::{InvalidRequest, REQUEST_HEADER_SIZE};
use godwit_io::ring::{Ring, Token};
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

/// The next thing that has arrived on a connection.
enum Arrived {
    /// Less than the connection waits for.
    Nothing,
    /// A part of something, and there may be more.
    Part,
    /// The header of a client's request.
    Request([u8; REQUEST_HEADER_SIZE]),
    /// A peer's frame, up to its data for a buffer.
    Frame {
        message: Message,
        payload: u32,
        compressed: bool,
    },
    /// The last of a request's data.
    Payload { head: Head, tag: RequestTag },
}

impl Arrived {
    const fn complete(complete: bool) -> Self {
        if complete { Self::Part } else { Self::Nothing }
    }
}

/// The outcome for a request that needs a slot.
enum Admitted {
    /// The connection waits for a slot.
    Waits,
    /// The connection receives the request's data, or is gone.
    Receives,
    /// The request has a slot, and is complete.
    Complete(RequestTag),
}

impl Connection {
    /// Takes the next thing that has arrived.
    fn next(&mut self, slots: &mut Slots) -> Result<Arrived, Lost> {
        match self.parse {
            Parse::Header if self.is_client() => self.request_header(),
            Parse::Header => self.frame_header(),
            Parse::Body(header) => {
                let mut body = [0; HEADER_SIZE];
                let body = &mut body[..header.payload_length as usize];
                if !self.stream.take_exactly(body)? {
                    return Ok(Arrived::Nothing);
                }
                self.parse = Parse::Header;
                Ok(Arrived::Frame {
                    message: Message::decode(&header, body)?,
                    payload: 0,
                    compressed: false,
                })
            }
            Parse::Payload {
                head,
                tag,
                length,
                ref mut received,
            } => {
                let range = *received as usize..length as usize;
                *received += self.stream.take_payload(slots.bytes_mut(tag, range))? as u32;
                if *received < length {
                    return Ok(Arrived::Nothing);
                }
                self.parse = Parse::Header;
                Ok(Arrived::Payload { head, tag })
            }
            Parse::Packed { .. } => self.packed(slots),
            Parse::Discard { ref mut remaining } => {
                *remaining -= self.stream.discard(*remaining as usize)? as u32;
                let complete = *remaining == 0;
                if complete {
                    self.parse = Parse::Header;
                }
                Ok(Arrived::complete(complete))
            }
            Parse::Waiting(_) | Parse::Alone(_) => Ok(Arrived::Nothing),
        }
    }

    fn request_header(&mut self) -> Result<Arrived, Lost> {
        let mut bytes = [0; REQUEST_HEADER_SIZE];
        self.throttled = self.stream.outbox().frames() > MOST_ANSWERS;
        let complete = !self.throttled && self.stream.take_exactly(&mut bytes)?;
        Ok(if complete {
            Arrived::Request(bytes)
        } else {
            Arrived::Nothing
        })
    }

    fn frame_header(&mut self) -> Result<Arrived, Lost> {
        let mut bytes = [0; HEADER_SIZE];
        if !self.stream.take_exactly(&mut bytes)? {
            return Ok(Arrived::Nothing);
        }
        let header = Header::decode(&bytes)?;
        if header.payload_in_buffer() || header.payload_length == 0 {
            return Ok(Arrived::Frame {
                message: Message::decode(&header, &[])?,
                payload: header.payload_length,
                compressed: header.is_compressed(),
            });
        }
        if header.payload_length as usize > HEADER_SIZE {
            return Err(DecodeError::PayloadLength(header.payload_length).into());
        }
        self.parse = Parse::Body(header);
        Ok(Arrived::Part)
    }

    /// Takes compressed data that has arrived.
    fn packed(&mut self, slots: &mut Slots) -> Result<Arrived, Lost> {
        let Parse::Packed {
            head,
            tag,
            length,
            ref mut missing,
            ref mut done,
        } = self.parse
        else {
            return Ok(Arrived::Nothing);
        };
        let unpacker = match &mut self.unpacker {
            Some(unpacker) => unpacker,
            none => none.insert(Box::new(Unpacker::new().map_err(StreamError::Socket)?)),
        };
        let taken = self.stream.take_payload(unpacker.room(*missing)?)?;
        *missing -= taken as u32;
        if unpacker.received(taken)? {
            let place = Unpacker::place(*done, length);
            *done = place.end as u32;
            unpacker.unpack(slots.bytes_mut(tag, place))?;
        }
        if *done < length {
            return Ok(Arrived::complete(taken > 0));
        }
        if *missing > 0 {
            return Err(DecodeError::Body.into());
        }
        self.parse = Parse::Header;
        Ok(Arrived::Payload { head, tag })
    }

    /// Starts the next receive operation, unless reading is suspended.
    fn ask_for_more(&mut self, ring: &mut Ring, slots: &Slots) {
        if !self.is_read() || self.throttled || self.stream.is_receiving() {
            return;
        }
        let header = if self.is_client() {
            REQUEST_HEADER_SIZE
        } else {
            HEADER_SIZE
        };
        let (payload, ahead) = match self.parse {
            Parse::Waiting(_) | Parse::Alone(_) => return,
            Parse::Payload {
                tag,
                length,
                received,
                ..
            } => {
                let rest = (length - received) as usize;
                let place = slots.address(tag, received as usize);
                let place = place.map(|(pointer, room)| (pointer, rest.min(room)));
                let ahead = if length <= COPIED { usize::MAX } else { header };
                (place, ahead)
            }
            Parse::Header if self.bulk => (None, header.saturating_sub(self.stream.staged())),
            _ => (None, usize::MAX),
        };
        let token = Token::Receive(self.key.index);
        // SAFETY: the slot's buffer stays in place while the connection receives into it: a new request's slot is busy
        // and an answered one's is held, both until the payload is complete or `reap` finds the stream idle. Nothing
        // else uses the buffer meanwhile.
        unsafe { self.stream.receive(ring, token, payload, ahead) };
    }

    /// Receives the data of a request into its slot. Returns false for a request without data.
    const fn receive_into(&mut self, tag: RequestTag, head: Head, length: u32) -> bool {
        let packed = match head {
            Head::Peer { packed, .. } => packed,
            Head::Client { .. } => None,
        };
        self.bulk = length > COPIED && packed.is_none();
        self.parse = match packed {
            Some(missing) => Parse::Packed {
                head,
                tag,
                length,
                missing,
                done: 0,
            },
            None if length > 0 => Parse::Payload {
                head,
                tag,
                length,
                received: 0,
            },
            None => Parse::Header,
        };
        !matches!(self.parse, Parse::Header)
    }
}

impl Connections {
    /// Gives a request its slot, or lets the connection wait.
    fn admit(
        &mut self,
        slots: &mut Slots,
        key: ConnectionKey,
        head: Head,
        waited: bool,
    ) -> Admitted {
        let needs = head.needs(key);
        // A migration's frames come by one connection, beside which nothing else needs the class.
        let account = match needs.owner {
            Owner::Replica => None,
            _ => self.get(key).map(|c| c.account),
        };
        let tag = slots.take(needs.class, needs.buffer, needs.owner, account, waited);
        match (self.get_mut(key), tag) {
            (Some(connection), Some(tag)) => {
                if connection.receive_into(tag, head, needs.length) {
                    Admitted::Receives
                } else {
                    Admitted::Complete(tag)
                }
            }
            (Some(connection), None) => {
                connection.parse = Parse::Waiting(head);
                if !waited {
                    slots.wait(needs.class, Waiter::Connection(key));
                }
                Admitted::Waits
            }
            (None, tag) => {
                if let Some(tag) = tag {
                    slots.finish(tag);
                }
                Admitted::Receives
            }
        }
    }
}

impl Engine {
    /// Ends a receive operation.
    pub(in crate::engine) fn received(&mut self, index: u32, result: i32) {
        let now = self.cx.now;
        let Some(connection) = self.connections.at(index) else {
            return;
        };
        let key = connection.key;
        connection.moved = now;
        let outcome = connection.stream.received(result);
        if connection.life == Life::Closing {
            return self.connections.reap(key, &mut self.memory);
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
            Ok(()) => {
                if let Some(connection) = self.connections.get_mut(key) {
                    connection.ask_for_more(&mut self.ring, &self.memory.slots);
                }
            }
            Err(error) => self.lost(key, &error),
        }
        self.connections.mark(key);
    }

    fn parse(&mut self, key: ConnectionKey) -> Result<(), Lost> {
        while let Some(connection) = self.connections.get_mut(key)
            && connection.is_read()
        {
            match connection.next(&mut self.memory.slots)? {
                Arrived::Nothing => break,
                Arrived::Part => {}
                Arrived::Request(header) => self.client_header(key, &header)?,
                Arrived::Frame {
                    message,
                    payload,
                    compressed,
                } => self.peer_frame(key, message, payload, compressed)?,
                Arrived::Payload { head, tag } => self.payload_complete(key, head, tag),
            }
        }
        Ok(())
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
            for _ in 0..self.memory.slots.waiting(class) {
                let Some(waiter) = self.memory.slots.next_waiting(class) else {
                    break;
                };
                let admitted = match waiter {
                    Waiter::Connection(key) => self.admit_waiting_connection(key),
                    Waiter::Ring(ring) => self.admit_waiting_ring(ring),
                };
                if !admitted {
                    self.memory.slots.wait(class, waiter);
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

    /// Gives a request its slot and receives its data. Returns false if the connection has to wait for a slot.
    pub(in crate::engine) fn admit(
        &mut self,
        key: ConnectionKey,
        head: Head,
        waited: bool,
    ) -> bool {
        let slots = &mut self.memory.slots;
        match self.connections.admit(slots, key, head, waited) {
            Admitted::Waits => return false,
            Admitted::Receives => {}
            Admitted::Complete(tag) => self.payload_complete(key, head, tag),
        }
        true
    }
}
