//! A peer that a test plays by hand.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use godwit_block::engine::{InterfaceCounter, PeerStreams};
use godwit_core::MigrationOptions;
use godwit_core::units::MigrationId;
use godwit_core::wire::{HEADER_SIZE, Header, Message, Taken};

use crate::pair::start_source;
use crate::support::*;

pub(crate) const ID: MigrationId = MigrationId([1; 16]);

/// Returns the bytes of a frame, without any data from a buffer.
pub(crate) fn frame(message: Message) -> Vec<u8> {
    let (header, inline, length) = message.encode();
    [&header.encode(), &inline[..length]].concat()
}

/// Receives a frame and its data.
pub(crate) fn receive(socket: &mut TcpStream) -> (Message, Vec<u8>) {
    let mut header = [0; HEADER_SIZE];
    socket.read_exact(&mut header).expect("a header");
    let header = Header::decode(&header).expect("a frame");
    let mut data = vec![0; header.payload_length as usize];
    socket.read_exact(&mut data).expect("what follows it");
    let inline = if header.payload_in_buffer() {
        &[]
    } else {
        &data[..]
    };
    (Message::decode(&header, inline).expect("a message"), data)
}

/// Begins to forward to an owner on a new connection. Returns the owner's progress in the session.
pub(crate) fn begin_forwarding(socket: &mut TcpStream, session: u64) -> Taken {
    let begin = Message::ForwardBegin { session };
    socket.write_all(&frame(begin)).expect("sent");
    pass_fence(socket)
}

/// Waits for a fence and passes it. Returns the owner's progress in the session.
pub(crate) fn pass_fence(socket: &mut TcpStream) -> Taken {
    let (Message::Fence { number, taken, .. }, _) = receive(socket) else {
        panic!("no fence");
    };
    let reached = Message::FenceReached { number };
    socket.write_all(&frame(reached)).expect("sent");
    taken
}

/// Returns the next frame other than the attachment of a client.
pub(crate) fn heard(socket: &mut TcpStream) -> Message {
    loop {
        match receive(socket).0 {
            Message::ClientAttached => {}
            other => return other,
        }
    }
}

/// Lets a node that has just connected begin to forward.
pub(crate) fn open_forwarding(socket: &mut TcpStream) {
    assert!(matches!(heard(socket), Message::ForwardBegin { .. }));
    let fence = Message::Fence {
        number: 1,
        taken: Taken::Unknown,
        shared: false,
        failed: false,
    };
    socket.write_all(&frame(fence)).expect("sent");
    assert_eq!(heard(socket), Message::FenceReached { number: 1 });
}

/// The three sockets of a peer that the test plays.
pub(crate) struct Puppet {
    pub(crate) control: TcpStream,
    pub(crate) sync: TcpStream,
    pub(crate) copy: TcpStream,
}

impl Puppet {
    pub(crate) fn new() -> (Self, PeerStreams) {
        let (control, control_b) = tcp_pair();
        let (sync, sync_b) = tcp_pair();
        let (copy, copy_b) = tcp_pair();
        for socket in [&control, &sync, &copy] {
            socket
                .set_read_timeout(Some(Duration::from_secs(10)))
                .expect("a timeout");
        }
        let streams = PeerStreams {
            peer: "puppet".to_owned(),
            control: plain(control_b),
            sync: plain(sync_b),
            copies: vec![plain(copy_b)],
            compression: false,
        };
        (
            Self {
                control,
                sync,
                copy,
            },
            streams,
        )
    }

    /// Plays the source of a migration to `engine`.
    pub(crate) fn source_of(engine: &TestEngine) -> Self {
        let (puppet, streams) = Self::new();
        let patience = Duration::from_secs(5);
        let handle = &engine.handle;
        let started = ask(|reply| handle.start_destination(ID, patience, streams, reply));
        assert_eq!(started, Ok(()));
        puppet
    }

    /// Plays the destination of a migration from `engine`.
    pub(crate) fn destination_of(
        engine: &TestEngine,
        options: MigrationOptions,
        interface: InterfaceCounter,
    ) -> Self {
        let (puppet, streams) = Self::new();
        let started = start_source(engine, options, streams, Some(interface));
        assert_eq!(started, Ok(()));
        puppet
    }

    /// Acknowledges the first copies of a disk, and waits until `engine` knows.
    pub(crate) fn take_copies(&mut self, engine: &TestEngine, count: u32) {
        let mut bytes = 0;
        for _ in 0..count {
            let (message, _) = receive(&mut self.copy);
            let Message::Copy {
                slot,
                generation,
                extent,
                ..
            } = message
            else {
                panic!("{message:?} on a copy connection");
            };
            bytes += extent.bytes();
            let ack = Message::Ack {
                tag: u32::from(slot.0),
                generation,
                result: Ok(()),
            };
            self.copy.write_all(&frame(ack)).expect("sent");
        }
        engine.wait_until(|snapshot| {
            snapshot
                .progress
                .is_some_and(|progress| progress.bytes_done == bytes)
        });
    }
}
