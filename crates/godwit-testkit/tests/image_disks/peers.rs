//! Parts of an image from other nodes that have it, whatever those are like.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use godwit_core::wire::{
    Features, Greeting, HEADER_SIZE, Header, PROTOCOL_VERSION, Purpose, Reply,
};
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, verify};

use crate::fixture::{DISK, Fixture, MIB, SIZE};

/// Where the other node has the image.
const OTHER: &str = "other";

#[test]
fn what_another_node_has_comes_from_there_and_the_repository_may_be_away() {
    let turn = Scenario::begin("image_disks", "what_another_node_has_comes_from_there");
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create_at("b", OTHER, &[]);
    fixture.becomes_whole_at("b", OTHER);
    // What the guest there has changed is not given.
    let other = fixture.cluster.node("b").nbd(OTHER);
    let mut guest = NbdConnection::connect(&other).unwrap();
    guest.write_at(40 * MIB + 5 * 512, &[0xAB; 512]).unwrap();
    guest.flush().unwrap();
    fixture.create(&["--prefetch", "off"]);

    // Not even what the image consists of is known here any more.
    fixture.is_there(false);
    let kept = fixture.a().spec().dir.join("images/manifests");
    let a = fixture.cluster.node_mut("a");
    a.terminate(PATIENCE).unwrap();
    fs::remove_dir_all(kept).unwrap();
    a.start(&[]).unwrap();
    let mut client = fixture.connect();
    for at in (0..40 * MIB).step_by(4 << 20) {
        client.read_at(at, &mut vec![0; 4 << 20]).unwrap();
    }
    assert_eq!(fixture.fetched(), (40 * MIB, 0));
    assert!(fixture.disk()["image"]["trouble"].is_null());

    let reader = std::thread::spawn({
        let mut client = fixture.connect();
        move || client.read_at(40 * MIB, &mut [0; 512]).unwrap()
    });
    let told = wait_for(PATIENCE, || {
        let disk = fixture.disk();
        disk["image"]["trouble"].as_str().map(str::to_owned)
    });
    let told = told.unwrap();
    let repository = fixture.repository.display().to_string();
    assert!(told.contains(&repository), "{told}");
    assert!(!reader.is_finished());
    fixture.is_there(true);
    reader.join().unwrap();
    verify(fixture.a(), DISK, &mut model).unwrap();
    // The rest came from wherever it came sooner.
    let (from_peers, from_repository) = fixture.fetched();
    assert_eq!(from_peers + from_repository, SIZE);
    assert!(from_peers >= 40 * MIB && from_repository >= 256 * 1024);
}

/// How a node behaves that is not what it should be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Odd {
    /// It gives other bytes than it was asked for.
    Lies,
    /// It takes questions and does not answer.
    IsSilent,
    /// It knows nothing of all this.
    IsOlder,
}

/// A node that is not one, and what connections were opened to it for.
struct OddNode {
    address: SocketAddr,
    purposes: Arc<Mutex<Vec<Purpose>>>,
}

impl OddNode {
    fn start(odd: Odd) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let purposes = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&purposes);
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let seen = Arc::clone(&seen);
                std::thread::spawn(move || {
                    // The node hangs up when it has had enough.
                    let _ = answer(connection.unwrap(), odd, &seen);
                });
            }
        });
        Self { address, purposes }
    }

    fn was_asked(&self) -> bool {
        let purposes = self.purposes.lock().unwrap();
        assert!(!purposes.is_empty(), "nobody connected");
        purposes.contains(&Purpose::Image)
    }
}

fn answer(mut connection: TcpStream, odd: Odd, seen: &Mutex<Vec<Purpose>>) -> std::io::Result<()> {
    let mut header = [0; HEADER_SIZE];
    connection.read_exact(&mut header)?;
    let header = Header::decode(&header).unwrap();
    let mut body = vec![0; header.payload_length as usize];
    connection.read_exact(&mut body)?;
    let Greeting::Hello(hello) = Greeting::decode(&header, &body).unwrap() else {
        panic!("no hello");
    };
    seen.lock().unwrap().push(hello.purpose);
    let features = match odd {
        Odd::IsOlder => Features::default(),
        Odd::Lies | Odd::IsSilent => Features::IMAGE_CHUNKS,
    };
    let welcome = Greeting::Reply(Reply::Welcome {
        version: PROTOCOL_VERSION,
        features,
        node: String::from("odd"),
    });
    connection.write_all(&welcome.encode())?;
    loop {
        connection.read_exact(&mut [0; 41])?;
        if odd == Odd::Lies {
            let length = 256 * 1024_u32;
            connection.write_all(&[&[1], &length.to_le_bytes()[..]].concat())?;
            connection.write_all(&vec![0xAB; length as usize])?;
        }
    }
}

/// Reads all of a disk of which a part might come from such a node, and that from the repository. How long the first
/// read took.
fn reads_all_in_spite_of(name: &str, odd: Odd) -> (OddNode, Duration) {
    let turn = Scenario::begin("image_disks", name);
    let plain = ClusterOptions {
        tls: false,
        ..ClusterOptions::secure().unwrap()
    };
    let mut fixture = Fixture::prepare(&["a"], &[], plain);
    let node = OddNode::start(odd);
    let peers = &mut fixture.cluster.node_mut("a").spec_mut().peers;
    peers.push((String::from("odd"), node.address));
    fixture.cluster.start_all().unwrap();
    let mut model = fixture.push_pattern(turn.seed);
    fixture.create(&["--prefetch", "off"]);
    let mut client = fixture.connect();
    let begun = Instant::now();
    client.read_at(0, &mut [0; 512]).unwrap();
    let took = begun.elapsed();
    verify(fixture.a(), DISK, &mut model).unwrap();
    assert_eq!(fixture.fetched(), (0, SIZE));
    (node, took)
}

#[test]
fn wrong_bytes_of_another_node_are_never_shown() {
    let (node, _) = reads_all_in_spite_of("wrong_bytes_of_another_node", Odd::Lies);
    assert!(node.was_asked());
}

#[test]
fn a_node_that_does_not_answer_holds_a_read_for_a_moment_once() {
    let (node, took) = reads_all_in_spite_of("a_node_that_does_not_answer", Odd::IsSilent);
    assert!(node.was_asked());
    assert!(took >= Duration::from_millis(200), "{took:?}");
    // 256 chunks that each waited would take a minute.
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn an_older_node_is_not_asked() {
    let (node, _) = reads_all_in_spite_of("an_older_node_is_not_asked", Odd::IsOlder);
    assert!(!node.was_asked());
}
