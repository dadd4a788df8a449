//! The same moves over TLS.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use godwit_block::engine::{ClientStream, PeerStream, PeerStreams};
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::{AbortReason, Event};
use godwit_io::tls::{Handshake, Session};
use godwit_testkit::tls::{TlsSettings, node_name};
use rustls::{ClientConnection, ServerConnection};

use crate::moving::migrate::load_and_move;
use crate::moving::pause::pause_and_move;
use crate::pair::start;
use crate::support::*;

const MIB: u64 = 1 << 20;

/// Performs a handshake between nodes.
fn shake_hands(mut socket: TcpStream, mut handshake: Handshake) -> PeerStream {
    loop {
        let complete = handshake.advance().expect("a handshake");
        socket.write_all(handshake.to_send()).expect("sent");
        handshake.sent(handshake.to_send().len());
        if complete {
            let (session, _) = handshake.finish().expect("a session");
            let tls = Some(session);
            return PeerStream { socket, tls };
        }
        let count = socket.read(handshake.room_mut()).expect("an answer");
        handshake.received(count);
    }
}

/// Returns a connection between nodes.
fn peer_pair() -> (PeerStream, PeerStream) {
    let (ours, theirs) = tcp_pair();
    let client = Handshake::client(Arc::clone(&TlsSettings::shared().client), node_name())
        .expect("a client");
    let server = Handshake::server(Arc::clone(&TlsSettings::shared().server)).expect("a server");
    let accepting = std::thread::spawn(move || shake_hands(theirs, server));
    let ours = shake_hands(ours, client);
    (ours, accepting.join().expect("the server"))
}

pub(crate) fn tls_links(copies: usize) -> (PeerStreams, PeerStreams) {
    let ((control, control_b), (sync, sync_b)) = (peer_pair(), peer_pair());
    let (copies, copies_b) = (0..copies).map(|_| peer_pair()).unzip();
    (
        PeerStreams {
            peer: "b".to_owned(),
            control,
            sync,
            copies,
            compression: false,
        },
        PeerStreams {
            peer: "a".to_owned(),
            control: control_b,
            sync: sync_b,
            copies: copies_b,
            compression: false,
        },
    )
}

/// Attaches a client of the disk, with rustls' TLS at both ends.
fn attach(engine: &TestEngine) -> (Client, TcpStream) {
    let (mut ours, mut theirs) = tcp_pair();
    let mut client = ClientConnection::new(Arc::clone(&TlsSettings::shared().client), node_name())
        .expect("a client");
    let mut server =
        ServerConnection::new(Arc::clone(&TlsSettings::shared().server)).expect("a server");
    let accepting = std::thread::spawn(move || {
        while server.is_handshaking() || server.wants_write() {
            server
                .complete_io(&mut theirs)
                .expect("the server's handshake");
        }
        (theirs, server)
    });
    while client.is_handshaking() || client.wants_write() {
        client
            .complete_io(&mut ours)
            .expect("the client's handshake");
    }
    let (theirs, server) = accepting.join().expect("the server");
    let raw = ours.try_clone().expect("a clone");
    engine.handle.attach(ClientStream {
        socket: OwnedFd::from(theirs),
        tls: Some(Session::library(server.into()).expect("a session")),
        received: Vec::new(),
        structured_replies: true,
        base_allocation: false,
        address: "tls".to_owned(),
        place: None,
    });
    (
        Client::new(Box::new(rustls::StreamOwned::new(client, ours)), true),
        raw,
    )
}

#[test]
fn clients_of_all_sizes_are_served() {
    let engine = TestEngine::new("tls", 64 * MIB, AuthorityRecord::created());
    let (mut client, _) = attach(&engine);
    let mut random = Random(1);
    for length in [512, 4096, 16_384, 65_536 + 512, 1 << 20, 32 << 20] {
        let data = random.bytes(length);
        client.write(512, &data);
        assert!(client.read(512, length) == data, "{length} bytes");
    }
    for index in 0..64 {
        client.send(WRITE, 0, index * 4096, 4096, &[index as u8; 4096]);
    }
    for _ in 0..64 {
        assert_eq!(client.receive(|_| 0).error, 0);
    }
    client.send(DISCONNECT, 0, 0, 0, &[]);
    assert!(client.is_closed());
    engine.wait_until(|snapshot| snapshot.clients == 0);
}

#[test]
fn a_record_that_was_tampered_with_ends_the_connection() {
    let engine = TestEngine::new("tls", MIB, AuthorityRecord::created());
    let (mut client, mut raw) = attach(&engine);
    client.write(0, &[1; 512]);
    raw.write_all(&[0x17, 3, 3, 0, 32]).expect("sent");
    raw.write_all(&[9; 32]).expect("sent");
    let mut rest = Vec::new();
    let _ = raw.read_to_end(&mut rest);
    engine.wait_until(|snapshot| snapshot.clients == 0);
}

#[test]
fn a_disk_moves_under_load() {
    load_and_move(tls_links);
}

#[test]
fn a_disk_moves_however_often_its_migration_pauses() {
    pause_and_move(tls_links);
}

#[test]
fn an_abort_is_heard_before_the_end() {
    let a = TestEngine::new("a", 64 * MIB, AuthorityRecord::created());
    let b = TestEngine::new("b", 64 * MIB, AuthorityRecord::vacant());
    let mut options = options(1);
    options.max_bandwidth = Some(1 << 20);
    let mut client = a.attach(true);
    client.write(0, &Random(2).bytes(8 << 20));
    start(&a, &b, options, tls_links(2));
    a.handle.cancel(
        AbortReason::Cancelled,
        Box::new(|cancelled| assert!(cancelled)),
    );
    let event = b.wait_for_core(|event| matches!(event, Event::ReceiveAborted { .. }));
    let migration = options.migration;
    assert_eq!(
        event,
        Event::ReceiveAborted {
            migration,
            reason: AbortReason::Cancelled
        }
    );
}
