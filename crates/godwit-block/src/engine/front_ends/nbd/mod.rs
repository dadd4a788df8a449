//! NBD clients: their requests and the answers.

pub(in crate::engine) mod allocation;
pub(in crate::engine) mod parts;

use godwit_core::authority::Ownership;
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::Time;

use crate::engine::config::EngineEvent;
use crate::engine::connections::receive::Lost;
use crate::engine::connections::streams::ClientStream;
use crate::engine::connections::{ConnectionKey, Head, Life, Party};
use crate::engine::front_ends::nbd::parts::Part;
use crate::engine::run::Engine;
use crate::engine::slots::{Owner, Rest};
use crate::nbd::Errno;
use crate::nbd::{Command, REQUEST_HEADER_SIZE, ReplyHeader, RequestHeader};
use godwit_io::stream::{Frame, Stream};

/// Time limit for a leaving client to read its last answers.
const FAREWELL: std::time::Duration = std::time::Duration::from_secs(30);

/// The NBD clients of the disk.
#[derive(Default)]
pub(in crate::engine) struct Nbd {
    /// Clients attached now.
    pub(in crate::engine) attached: u32,
    /// Clients that came while the disk's owner could not be reached.
    pub(in crate::engine) waiting: Vec<ClientStream>,
}

impl Engine {
    /// Returns the number of attached clients, the virtual machine included.
    pub(in crate::engine) fn clients(&self) -> u32 {
        self.nbd.attached + u32::from(self.vhost.front_end.is_some())
    }

    /// Attaches a client. A client of a disk that has moved away waits until the owner can be reached.
    pub(in crate::engine) fn attach_or_wait(&mut self, client: ClientStream) {
        let departed = matches!(self.cx.core.record().ownership, Ownership::Departed { .. });
        if !departed || self.forwarding.connection().is_some() {
            self.attach(client);
        } else if self.nbd.waiting.len() < self.cx.config.max_clients as usize {
            self.nbd.waiting.push(client);
            self.ask_forward();
        }
    }

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
        let disk = &self.cx.config.disk;
        if self.cx.is_ending() || self.clients() >= self.cx.config.max_clients {
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
        let account = self.memory.slots.open_account();
        let now = self.cx.now;
        let key = self.connections.insert(stream, party, account, now);
        self.nbd.attached += 1;
        self.cx.tell(EngineEvent::Clients(self.clients()));
        self.cx.core.handle_client_attached(self.cx.now);
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
        let command = request.command(self.disk.capacity(), structured);
        match command {
            Ok(Command::BlockStatus { .. }) if !allocation => {
                self.refuse(key, &request, structured, Errno::Invalid);
            }
            Ok(Command::WriteZeroes { fast: true, .. }) if !self.zeroes_fast() => {
                self.refuse(key, &request, structured, Errno::NotSupported);
            }
            Ok(Command::Operation(operation)) => {
                self.begin_parts(key, request, operation, structured);
            }
            Ok(Command::WriteZeroes {
                extents,
                fua,
                unmap,
                ..
            }) => {
                let all = Rest {
                    extents,
                    fua,
                    unmap,
                };
                if let Some((operation, rest)) = all.next() {
                    let part = Part::All;
                    let head = Head::Client {
                        request,
                        operation,
                        rest,
                        part,
                    };
                    self.admit(key, head, false);
                }
            }
            Ok(Command::BlockStatus {
                offset,
                length,
                one,
            }) => self.tell_allocation(key, &request, (offset, length), one),
            Ok(Command::Disconnect) => {
                let deadline = self.cx.now.after(FAREWELL);
                self.connections.leave(key, deadline);
            }
            Err(errno) => self.refuse(key, &request, structured, errno),
        }
        Ok(())
    }

    /// Refuses a client's request, and drops its data.
    fn refuse(
        &mut self,
        key: ConnectionKey,
        request: &RequestHeader,
        structured: bool,
        errno: Errno,
    ) {
        self.cx.stats.counters.errors += 1;
        if let Some(connection) = self.connections.get_mut(key) {
            connection.discard(request.payload_length());
            let reply = ReplyHeader::new(request, structured, Err(errno));
            let frame = Frame::new(&[reply.as_bytes()], None);
            connection.stream.queue(frame);
            self.connections.mark(key);
        }
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
        self.memory.slots.set_arrived(tag, self.cx.now);
        let request = Request {
            tag,
            origin: Origin::Client,
            operation,
        };
        self.cx.take_request(request);
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
        let connection = self.connections.get(key);
        let reachable = connection.is_some_and(|c| c.life != Life::Closing);
        if let (Ok(()), Some(rest), true) = (result, rest, reachable)
            && let Some((next, rest)) = rest.next()
        {
            let owner = Owner::Client {
                connection: key,
                request,
                operation,
                rest,
                part,
            };
            self.memory.slots.set_owner(tag, owner);
            let request = Request {
                tag,
                origin: Origin::Client,
                operation: next,
            };
            return self.cx.take_request(request);
        }
        let arrived: Time = self.memory.slots.arrived(tag);
        self.cx
            .stats
            .answered(&operation, result.is_ok(), arrived, self.cx.now);
        if let Some(connection) = self.connections.get_mut(key)
            && let Party::Client { structured, .. } = connection.party
        {
            connection.unanswered -= 1;
            if connection.life != Life::Closing && part == Part::All {
                let payload = match (operation, result) {
                    (Operation::Read(extent), Ok(())) => {
                        self.memory.slots.payload(tag, extent.bytes() as usize)
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
            self.answer_part(tag, (key, request, operation, part), result);
        }
        self.memory.slots.finish(tag);
        self.go_on_alone(key);
    }
}
