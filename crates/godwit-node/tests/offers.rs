//! Offers whose source goes away.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use godwit_core::DOUBLE_WRITE;
use godwit_core::OlderCopy;
use godwit_core::units::{Epoch, Sectors};
use godwit_core::wire::{Greeting, Offer, Purpose, Reply};
use godwit_node::{IncomingLimits, Role};
use rustls::{ClientConnection, StreamOwned};
use serde_json::json;
use support::{RunningNode, authority, hello, peer, plain, receive, secure, send, shows, until};

trait Stream: Read + Write {}

impl<S: Read + Write> Stream for S {}

/// Offers disk `d` as node `a`, waits for the acceptance, and goes away.
fn offer_and_leave(stream: &mut dyn Stream) {
    assert_eq!(offer(stream, "d", 7), Reply::Accepted(OlderCopy::None));
}

/// Offers a disk of 1 MiB as node `a`.
fn offer(stream: &mut dyn Stream, disk: &str, migration: u8) -> Reply {
    send(stream, &hello(Purpose::Migrate, "a", migration, disk));
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
        policy: DOUBLE_WRITE,
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
    let none = async || (node.get("/v1/disks").await.json() == json!([])).then_some(());
    let begun = Instant::now();
    until("nothing of the offer is left", none).await;
    assert!(
        begun.elapsed() < Duration::from_secs(4),
        "{:?}",
        begun.elapsed()
    );
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
    let authority = authority(dir.path(), &[("a", Role::Node), ("b", Role::Node)]);
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
