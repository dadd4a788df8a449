//! Offers whose source goes away.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use godwit_core::OlderCopy;
use godwit_core::units::{Epoch, MigrationId, Sectors};
use godwit_core::wire::{
    Features, Greeting, HEADER_SIZE, Header, Hello, Offer, PROTOCOL_VERSION, Purpose, Reply,
    TrafficClass, TransferPolicy,
};
use godwit_node::certificates::{self, Validity};
use godwit_node::{IncomingLimits, Role};
use rustls::{ClientConnection, StreamOwned};
use support::{RunningNode, issue, peer, plain, secure, shows};

trait Stream: Read + Write {}

impl<S: Read + Write> Stream for S {}

fn send(stream: &mut dyn Stream, greeting: &Greeting) {
    stream.write_all(&greeting.encode()).expect("it is there");
    stream.flush().expect("it is there");
}

fn receive(stream: &mut dyn Stream) -> Greeting {
    let mut header = [0; HEADER_SIZE];
    stream.read_exact(&mut header).expect("an answer");
    let header = Header::decode(&header).expect("a frame");
    let mut body = vec![0; header.payload_length as usize];
    stream.read_exact(&mut body).expect("all of the answer");
    Greeting::decode(&header, &body).expect("a greeting")
}

/// Offers disk `d` as node `a`, waits for the acceptance, and goes away.
fn offer_and_leave(stream: &mut dyn Stream) {
    assert_eq!(offer(stream, "d", 7), Reply::Accepted(OlderCopy::None));
}

/// Offers a disk of 1 MiB as node `a`.
fn offer(stream: &mut dyn Stream, disk: &str, migration: u8) -> Reply {
    let hello = Hello {
        min_version: PROTOCOL_VERSION,
        max_version: PROTOCOL_VERSION,
        features: Features::default(),
        class: TrafficClass::Control,
        purpose: Purpose::Migrate,
        migration: MigrationId([migration; 16]),
        node: String::from("a"),
        disk: disk.to_owned(),
    };
    send(stream, &Greeting::Hello(hello));
    let welcome = receive(stream);
    assert!(
        matches!(welcome, Greeting::Reply(Reply::Welcome { .. })),
        "{welcome:?}"
    );
    let offer = Offer {
        epoch: Epoch(2),
        capacity: Sectors(2048),
        allocated: 1 << 20,
        chunk_sectors: 256,
        window_chunks: 8,
        copy_connections: 2,
        place: None,
        policy: TransferPolicy::default(),
        image: None,
        id: None,
    };
    send(stream, &Greeting::Offer(offer));
    match receive(stream) {
        Greeting::Reply(reply) => reply,
        other => panic!("{other:?} is no reply"),
    }
}

/// Checks that nothing of the offer is left, long before the node would stop waiting for the connections.
async fn nothing_is_left(node: &RunningNode) {
    for _ in 0..100 {
        if node.get("/v1/disks").await.json() == serde_json::json!([]) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{}", node.get("/v1/disks").await.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_offer_ends_with_the_connection_that_made_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut config = plain("b", dir.path());
    config.peers = vec![peer("a", support::free_address())];
    let node = RunningNode::start(config).await;
    let address = node.config.listen;
    let offered = tokio::task::spawn_blocking(move || {
        offer_and_leave(&mut TcpStream::connect(address).expect("it listens"));
    });
    offered.await.expect("the offer is accepted");
    nothing_is_left(&node).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_offer_ends_with_the_encrypted_connection_that_made_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let authority = dir.path().join("authority");
    certificates::init(&authority, false).expect("makes an authority");
    for name in ["a", "b"] {
        issue(&authority, name, Role::Node, Validity::Days(1));
    }
    let mut config = secure("b", dir.path(), &authority, "b");
    config.peers = vec![peer("a", support::free_address())];
    let node = RunningNode::start(config).await;
    let address = node.config.listen;
    let offered = tokio::task::spawn_blocking(move || {
        let socket = TcpStream::connect(address).expect("it listens");
        let name = "b".try_into().expect("a name");
        let session = ClientConnection::new(shows(&authority, "a"), name).expect("a session");
        offer_and_leave(&mut StreamOwned::new(session, socket));
    });
    offered.await.expect("the offer is accepted");
    nothing_is_left(&node).await;
    node.stop().await;
}

/// Returns the refusal of a peer's second offer while the first is there, or nothing if accepted.
async fn second_of_two(limits: IncomingLimits) -> Option<String> {
    let dir = tempfile::tempdir().expect("a folder");
    let mut config = plain("b", dir.path());
    config.peers = vec![peer("a", support::free_address())];
    config.incoming = limits;
    let node = RunningNode::start(config).await;
    let address = node.config.listen;
    let connect = move || TcpStream::connect(address).expect("it listens");
    let second = tokio::task::spawn_blocking(move || {
        let mut first = connect();
        assert_eq!(offer(&mut first, "d", 7), Reply::Accepted(OlderCopy::None));
        let refused = match offer(&mut connect(), "e", 8) {
            Reply::Accepted(_) => None,
            Reply::Refused(refusal) => Some(refusal.text),
            other => panic!("{other:?}"),
        };
        drop(first);
        refused
    });
    let second = second.await.expect("both offers are answered");
    nothing_is_left(&node).await;
    // The end of the first offer makes room again.
    let third = tokio::task::spawn_blocking(move || offer(&mut connect(), "e", 9));
    assert_eq!(
        third.await.expect("an answer"),
        Reply::Accepted(OlderCopy::None)
    );
    node.stop().await;
    second
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_brings_more_than_it_may_is_refused_until_there_is_room() {
    let limits = |count, bytes| IncomingLimits { count, bytes };
    for (limits, names) in [
        (limits(1, None), "--max-incoming allows"),
        (limits(2, Some(3 << 19)), "--max-incoming-size"),
    ] {
        let refused = second_of_two(limits).await.expect("a refusal");
        assert!(refused.contains(names), "{refused}");
    }
    assert_eq!(second_of_two(limits(2, Some(2 << 20))).await, None);
}
