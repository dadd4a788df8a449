//! A third node as witness: its grants over real connections, after a restart, and at a version without witnesses.

mod support;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;

use godwit_context::Context;
use godwit_context::store::Store;
use godwit_core::units::ProtectionId;
use godwit_core::wire::{Features, Greeting, Purpose};
use godwit_machines::protect::witness::{
    Change, Protection, Swap, Witness, WitnessError, answer, connect,
};
use godwit_peers::dial::Dialer;
use godwit_protect::{Ask, Grant, Term};
use support::{RunningNode, free_address, hello, peer, plain, receive, send, welcome};

/// Returns the witness `c` as node `name` asks it.
fn witness(name: &str, address: SocketAddr, folder: &Path) -> Arc<dyn Witness> {
    let mut config = plain(name, folder);
    config.peers = vec![peer("c", address)];
    let store = Store::open(&folder.join(name)).expect("opens");
    let dialer = Dialer {
        tls: None,
        features: Features::WITNESS,
    };
    let context = Arc::new(Context::new(config, store, dialer));
    let unknown = connect(&"node:d".parse().expect("a witness"), &context);
    assert!(
        unknown
            .expect_err("no peer")
            .message
            .contains("knows no peer named \"d\"")
    );
    connect(&"node:c".parse().expect("a witness"), &context).expect("a peer")
}

fn protection(nodes: [&str; 2]) -> Protection {
    Protection {
        id: ProtectionId([5; 16]),
        nodes: nodes.map(str::to_owned),
    }
}

#[track_caller]
fn unusable<T: std::fmt::Debug>(asked: Result<T, WitnessError>, words: &str) {
    assert!(
        matches!(&asked, Err(WitnessError::Unusable(why)) if why.contains(words)),
        "{asked:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_third_node_keeps_a_grant_for_its_peers() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut config = plain("c", folder.path());
    config.peers = ["a", "b"].map(|name| peer(name, free_address())).into();
    let node = RunningNode::start(config.clone()).await;
    let of = protection(["a", "b"]);
    let [a, b, d] = ["a", "b", "d"].map(|name| witness(name, config.listen, folder.path()));
    assert_eq!(a.grant(&of).await, Ok(None));
    let paired = Grant {
        term: Term(2),
        paired: true,
        ..Grant::FIRST
    };
    let ask = Ask {
        expected: Grant::FIRST,
        wanted: paired,
    };
    unusable(answer(&*a, &of, &ask).await, "has no grant");
    assert_eq!(a.swap(&of, Change::BEGIN).await, Ok(Swap::Done));
    assert_eq!(answer(&*a, &of, &ask).await, Ok(paired));
    let stale = Change {
        expected: Some(Grant::FIRST),
        wanted: Some(Grant {
            paired: false,
            ..paired
        }),
    };
    assert_eq!(b.swap(&of, stale).await, Ok(Swap::Stands(Some(paired))));
    unusable(d.grant(&of).await, "takes connections of its peers only");
    unusable(
        a.grant(&protection(["a", "c"])).await,
        "a witness is a third node",
    );
    unusable(
        b.grant(&protection(["a", "d"])).await,
        "'b' asks about the grant",
    );
    node.stop().await;
    let away = a.swap(&of, Change::end(paired)).await;
    unusable(away, "cannot become None");
    let away = a.swap(&of, stale).await;
    assert!(
        matches!(away, Err(WitnessError::Unreachable(_))),
        "{away:?}"
    );
    let node = RunningNode::start(config).await;
    let look = Ask {
        expected: Grant::FIRST,
        wanted: Grant::FIRST,
    };
    assert_eq!(answer(&*b, &of, &look).await, Ok(paired));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_is_too_long_or_cut_is_refused() {
    use std::io::{Read, Write};
    let folder = tempfile::tempdir().expect("a folder");
    let mut config = plain("c", folder.path());
    config.peers = vec![peer("a", free_address())];
    let node = RunningNode::start(config.clone()).await;
    let ask = |bytes: Vec<u8>| {
        let mut stream = std::net::TcpStream::connect(config.listen).expect("it listens");
        send(&mut stream, &hello(Purpose::Witness, "a", 5, ""));
        receive(&mut stream);
        // The node may have answered before all bytes have come.
        let _ = stream.write_all(&bytes);
        let mut length = [0; 4];
        stream.read_exact(&mut length).expect("an answer");
        let mut answer = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut answer).expect("all of it");
        String::from_utf8(answer).expect("text")
    };
    let with_length = |length: u32, body: &[u8]| [&length.to_le_bytes(), body].concat();
    for (bytes, words) in [
        (with_length(4097, b""), "4097 bytes is too long"),
        (with_length(u32::MAX, b"{}"), "is too long"),
        (with_length(2, b"{}"), "cannot be read"),
        (with_length(2, b"\xff\xff"), "cannot be read"),
    ] {
        let answer = tokio::task::block_in_place(|| ask(bytes));
        assert!(
            answer.contains("refused") && answer.contains(words),
            "{answer}"
        );
    }
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_without_witnesses_and_a_silent_node_are_told_apart() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("an address");
    let address = listener.local_addr().expect("it listens");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let Greeting::Hello(hello) = receive(&mut stream) else {
                panic!("no hello");
            };
            if hello.purpose == Purpose::Witness && hello.migration.0 == [5; 16] {
                // An older node does not know the purpose.
                continue;
            }
            send(&mut stream, &welcome("c"));
        }
    });
    let folder = tempfile::tempdir().expect("a folder");
    let witness = witness("a", address, folder.path());
    let of = protection(["a", "b"]);
    unusable(
        witness.grant(&of).await,
        "node 'c' cannot be a witness: it runs a version without witnesses",
    );
    // The second node welcomes, and then hangs up: the question may have arrived.
    let other = Protection {
        id: ProtectionId([6; 16]),
        ..of
    };
    let asked = witness.swap(&other, Change::BEGIN).await;
    assert!(matches!(asked, Err(WitnessError::Unknown(_))), "{asked:?}");
    let asked = witness.grant(&other).await;
    assert!(
        matches!(asked, Err(WitnessError::Unreachable(_))),
        "{asked:?}"
    );
}
