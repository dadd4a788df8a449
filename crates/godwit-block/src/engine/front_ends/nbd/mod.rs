//! NBD clients: their requests and the answers.

pub(in crate::engine) mod allocation;
pub(in crate::engine) mod parts;

use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::Time;

use crate::engine::config::EngineEvent;
use crate::engine::connections::receive::Lost;
use crate::engine::connections::streams::ClientStream;
use crate::engine::connections::{ConnectionKey, Head, Life, Parse, Party};
use crate::engine::front_ends::nbd::parts::Part;
use crate::engine::run::Engine;
use crate::engine::slots::{Class, Owner, Rest};
use crate::nbd::Errno;
use crate::nbd::{Command, REQUEST_HEADER_SIZE, ReplyHeader, RequestHeader};
use godwit_io::stream::{Frame, Stream};

/// Time limit for a leaving client to read its last answers.
const FAREWELL: std::time::Duration = std::time::Duration::from_secs(30);

impl Engine {
    /// Serves a client, or disconnects the client if there are too many.
    pub(in crate::engine) fn attach(&mut self, client: ClientStream) {
        let ClientStream {
            socket,
            tls,
            received,
            structured_replies,
            base_allocation,
            address,
            place,
        } = client;
        // The place of a client that is gone is free.
        self.look_for_hang_ups();
        let disk = &self.config.disk;
        if self.shutdown.is_some() || self.clients >= self.config.max_clients {
            tracing::warn!(
                disk,
                client = address,
                "too many clients are attached; refused one"
            );
            return;
        }
        let stream = match Stream::new(socket, tls, &received) {
            Ok(stream) => stream,
            Err(error) => {
                tracing::warn!(
                    disk,
                    client = address,
                    "cannot use the client's socket: {error}"
                );
                return;
            }
        };
        tracing::info!(disk, client = address, "client attached");
        let party = Party::Client {
            address,
            structured: structured_replies,
            allocation: base_allocation,
            _place: place,
        };
        let account = self.slots.open_account();
        let now = self.now;
        let key = self.connections.insert(stream, party, account, now);
        self.clients += 1;
        self.tell(EngineEvent::Clients(self.clients));
        self.core.handle_client_attached(self.now);
        self.drain();
        self.advance(key);
    }

    /// Handles the start of a client's request.
    pub(in crate::engine) fn client_header(
        &mut self,
        key: ConnectionKey,
        bytes: &[u8; REQUEST_HEADER_SIZE],
    ) -> Result<(), Lost> {
        let request = RequestHeader::decode(bytes)?;
        if request.payload_is_absurd() {
            return Err(Lost::TooLong(request.payload_length()));
        }
        let capacity = self.disk.capacity();
        let Some(connection) = self.connections.get_mut(key) else {
            return Ok(());
        };
        let Party::Client {
            structured,
            allocation,
            ..
        } = connection.party
        else {
            return Ok(());
        };
        let mut command = request.command(capacity, structured);
        match command {
            Ok(Command::BlockStatus { .. }) if !allocation => command = Err(Errno::Invalid),
            Ok(Command::WriteZeroes { fast: true, .. }) if !self.zeroes_fast() => {
                command = Err(Errno::NotSupported);
            }
            _ => {}
        }
        let Some(connection) = self.connections.get_mut(key) else {
            return Ok(());
        };
        let (operation, rest) = match command {
            Ok(Command::Operation(operation)) => {
                self.begin_parts(key, request, operation, structured);
                return Ok(());
            }
            Ok(Command::WriteZeroes {
                mut extents,
                fua,
                unmap,
                ..
            }) => {
                let Some(extent) = extents.next() else {
                    return Ok(());
                };
                let rest = (extents.len() > 0).then_some(Rest {
                    extents,
                    fua,
                    unmap,
                });
                (Operation::WriteZeroes { extent, fua, unmap }, rest)
            }
            Ok(Command::BlockStatus {
                offset,
                length,
                one,
            }) => {
                self.tell_allocation(key, &request, (offset, length), one);
                return Ok(());
            }
            Ok(Command::Disconnect) => {
                self.leave(key, FAREWELL);
                return Ok(());
            }
            Err(errno) => {
                if request.payload_length() > 0 {
                    connection.parse = Parse::Discard {
                        remaining: request.payload_length(),
                    };
                }
                let reply = ReplyHeader::new(&request, structured, Err(errno));
                connection
                    .stream
                    .queue(Frame::new(&[reply.as_bytes()], None));
                self.stats.counters.errors += 1;
                self.connections.mark(key);
                return Ok(());
            }
        };
        self.admit(
            key,
            Head::Client {
                request,
                operation,
                rest,
                part: Part::All,
            },
            false,
        );
        Ok(())
    }

    /// Returns the needs of a client's request: class, owner, buffer length, and bytes to receive.
    pub(in crate::engine) fn client_needs(
        &self,
        connection: ConnectionKey,
        request: RequestHeader,
        operation: Operation,
        rest: Option<Rest>,
        part: Part,
    ) -> (Class, Owner, u32, u32) {
        let (buffer, length) = match operation {
            Operation::Read(extent) => (extent.bytes() as u32, 0),
            Operation::Write { extent, .. } => (extent.bytes() as u32, extent.bytes() as u32),
            Operation::WriteZeroes { .. } | Operation::Flush => (0, 0),
        };
        (
            Class::Client,
            Owner::Client {
                connection,
                request,
                operation,
                rest,
                part,
            },
            buffer,
            length,
        )
    }

    /// Handles a client's request that is complete, with its data.
    pub(in crate::engine) fn client_request(
        &mut self,
        key: ConnectionKey,
        tag: RequestTag,
        operation: Operation,
    ) {
        if let Some(connection) = self.connections.get_mut(key) {
            connection.unanswered += 1;
        }
        self.slots.set_arrived(tag, self.now);
        let request = Request {
            tag,
            origin: Origin::Client,
            operation,
        };
        self.take_request(request);
        self.drain();
    }

    /// Passes the controller's answer to the client.
    pub(in crate::engine) fn answer_client(
        &mut self,
        tag: RequestTag,
        owner: (ConnectionKey, RequestHeader, Operation, Option<Rest>, Part),
        result: Result<(), RequestError>,
    ) {
        let (key, request, operation, rest, part) = owner;
        let reachable = self
            .connections
            .get(key)
            .is_some_and(|c| c.life != Life::Closing);
        if let (Ok(()), Some(mut rest), true) = (result, rest, reachable)
            && let Some(extent) = rest.extents.next()
        {
            let Rest { fua, unmap, .. } = rest;
            let rest = (rest.extents.len() > 0).then_some(rest);
            let next = Operation::WriteZeroes { extent, fua, unmap };
            let owner = Owner::Client {
                connection: key,
                request,
                operation,
                rest,
                part,
            };
            self.slots.set_owner(tag, owner);
            let request = Request {
                tag,
                origin: Origin::Client,
                operation: next,
            };
            return self.take_request(request);
        }
        let arrived: Time = self.slots.arrived(tag);
        self.stats
            .answered(&operation, result.is_ok(), arrived, self.now);
        if let Some(connection) = self.connections.get_mut(key)
            && let Party::Client { structured, .. } = connection.party
        {
            connection.unanswered -= 1;
            if connection.life != Life::Closing && part == Part::All {
                let payload = match (operation, result) {
                    (Operation::Read(extent), Ok(())) => {
                        self.slots.payload(tag, extent.bytes() as usize)
                    }
                    _ => None,
                };
                let errno: Result<(), Errno> = result.map_err(|error| request.errno(error));
                let reply = ReplyHeader::new(&request, structured, errno);
                connection
                    .stream
                    .queue(Frame::new(&[reply.as_bytes()], payload));
                self.connections.mark(key);
            }
        }
        if part != Part::All {
            self.answer_part(tag, self.slots.owner(tag), result);
        }
        self.slots.finish(tag);
        self.go_on_alone(key);
    }
}
