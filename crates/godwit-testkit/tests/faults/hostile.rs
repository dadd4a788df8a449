//! Bytes that no honest client sends: the node answers with an error or hangs up, and goes on.

use std::io::{Read, Write};
use std::time::Duration;

use godwit_testkit::cluster::{ClusterOptions, godwit_binary};
use godwit_testkit::nbd::{Command, NbdStream, NbdTarget, Request};
use godwit_testkit::process::wait_for;
use godwit_testkit::random::Random;
use godwit_testkit::scenario::{PATIENCE, Scenario, finish, import_pattern, load, moves, verify};
use godwit_testkit::vhost_client::{Client, Options, Status};
use godwit_testkit::{Cluster, Model, Node};

const SIZE: u64 = 16 << 20;
const DISK: &str = "target";
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

fn still_serves(node: &Node, model: &mut Model) {
    assert_eq!(node.disk_state(DISK), "serving");
    verify(node, DISK, model).unwrap();
}

/// Sends one request; returns the error in the reply, or `None` if the server hangs up instead.
fn error_of(node: &Node, command: Command, offset: u64, length: u32, data: &[u8]) -> Option<u32> {
    let connection = node.connect(DISK);
    let (mut reader, mut writer) = connection.split();
    reader.set_timeout(Some(Duration::from_secs(10))).unwrap();
    let request = Request::new(command, 5, offset, length);
    // The server may hang up before the last byte.
    let _ = writer.send(&request, data);
    let reply = reader.reply().ok()?;
    assert_eq!(reply.cookie, 5);
    if reply.error != 0 {
        // The session lives on after an error.
        let next = Request::new(Command::Flush, 6, 0, 0);
        writer.send(&next, &[]).unwrap();
        let next = reader.reply().unwrap();
        assert_eq!((next.cookie, next.error), (6, 0));
    }
    Some(reply.error)
}

#[test]
fn requests_that_do_not_fit_the_disk() {
    let (turn, cluster) = Scenario::shared().start(&["a"]);
    let a = cluster.node("a");
    let mut model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    let block = [0xee; 4096];
    let refused = |command, offset, length, data: &[u8]| {
        let error = error_of(a, command, offset, length, data);
        println!("{command:?} of {length} at {offset}: {error:?}");
        error
    };
    let invalid = [Some(EINVAL), Some(ENOSPC)];
    for (offset, length) in [
        (SIZE, 512),
        (SIZE - 512, 1024),
        (u64::MAX - 511, 512),
        (1 << 62, 4096),
    ] {
        assert!(invalid.contains(&refused(Command::Read, offset, length, &[])));
        let data = &block[..length as usize];
        assert!(invalid.contains(&refused(Command::Write, offset, length, data)));
        assert!(invalid.contains(&refused(Command::Trim, offset, length, &[])));
        assert!(invalid.contains(&refused(Command::WriteZeroes, offset, length, &[])));
    }
    for (offset, length) in [(0, 0), (1, 512), (511, 512), (0, 100), (512, 513)] {
        assert_eq!(refused(Command::Read, offset, length, &[]), Some(EINVAL));
        let data = &block[..length as usize];
        assert_eq!(refused(Command::Write, offset, length, data), Some(EINVAL));
        assert_eq!(
            refused(Command::WriteZeroes, offset, length, &[]),
            Some(EINVAL)
        );
    }
    for length in [u32::MAX, u32::MAX - 511, 1 << 31, (32 << 20) + 512] {
        let answer = refused(Command::Read, 0, length, &[]);
        assert!(
            answer.is_none_or(|error| error != 0),
            "a read of {length} bytes: {answer:?}"
        );
        let answer = refused(Command::Write, 0, length, &block);
        assert!(
            answer.is_none_or(|error| error != 0),
            "a write of {length} bytes: {answer:?}"
        );
    }
    still_serves(a, &mut model);
}

/// Returns all sockets of a node.
fn every_port(node: &Node) -> [(&'static str, NbdTarget); 4] {
    let spec = node.spec();
    [
        ("peer port", NbdTarget::tcp(spec.listen, "")),
        ("NBD port", NbdTarget::tcp(spec.nbd_listen, "")),
        ("NBD socket", NbdTarget::unix(spec.dir.join("nbd.sock"), "")),
        (
            "API socket",
            NbdTarget::unix(spec.dir.join("godwit.sock"), ""),
        ),
    ]
}

fn open(port: &str, target: &NbdTarget) -> NbdStream {
    target
        .open()
        .unwrap_or_else(|error| panic!("{port}: {error}"))
}

fn random_bytes_everywhere(tls: bool) {
    let turn = Scenario::shared();
    let options = ClusterOptions {
        godwit: godwit_binary().unwrap(),
        tls,
    };
    let mut cluster = Cluster::start_with(&["a", "b"], options).unwrap();
    let a = cluster.node("a");
    let model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    let client = load(a, DISK, turn.seed, model).unwrap();
    let mut random = Random::new(turn.seed);
    let starts: [&[u8]; 6] = [
        b"",
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0\0\0\x03IHAVEOPT\0\0\0\x07\xff\xff\xff\xff",
        b"\0\0\0\x01IHAVEOPT\0\0\0\x07\0\0\0\x0a\0\0\0\x06target\0\0",
        b"GDWT",
    ];
    for (port, target) in every_port(a) {
        for round in 0..24 {
            let mut wire = open(port, &target);
            wire.set_read_timeout(Some(Duration::from_millis(100)))
                .unwrap();
            let mut bytes = starts[round % starts.len()].to_vec();
            let length = bytes.len() + random.below(4096) as usize;
            let from = bytes.len();
            bytes.resize(length, 0);
            random.fill(&mut bytes[from..]);
            // The node may hang up at any moment, as a form of refusal.
            let _ = wire.write_all(&bytes);
            let _ = wire.read(&mut [0; 512]);
        }
    }
    assert!(client.progress(100, PATIENCE), "{:?}", client.stats());
    moves(cluster.node("a"), DISK, "b", &["--verify"]);
    let mut model = finish(client).unwrap();
    still_serves(cluster.node("b"), &mut model);
    for name in ["a", "b"] {
        assert!(cluster.node_mut(name).alive());
        let log = cluster.node(name).log();
        assert!(!log.contains("panicked"), "a panic at {name}:\n{log}");
    }
}

#[test]
fn random_bytes_on_every_plain_port() {
    random_bytes_everywhere(false);
}

#[test]
fn random_bytes_on_every_port_with_tls() {
    random_bytes_everywhere(true);
}

#[test]
fn a_front_end_whose_memory_shrinks_ends_alone() {
    let (_turn, cluster) = Scenario::shared().start(&["a"]);
    let a = cluster.node("a");
    let [shrinking, mut beside] =
        [("shrinking", true), ("beside", false)].map(|(disk, shrinks)| {
            a.create_disk(disk, "16MiB");
            let options = Options {
                shrinks,
                ..Options::default()
            };
            let mut client = Client::connect(&a.vhost_socket(disk), options).unwrap();
            client.start().unwrap();
            assert_eq!(client.write(0, 0, &[7; 512]), Status::OK);
            client
        });
    shrinking.memory.file().set_len(0).unwrap();
    shrinking.queues[0].kick.write(1).unwrap();
    let is_told = || {
        let shown = a.disk("shrinking").ok()?;
        let problem = shown["problem"].as_str()?;
        problem.contains("made shorter").then_some(())
    };
    wait_for(PATIENCE, is_told).expect("the disk tells why");
    assert_eq!(beside.write(0, 0, &[9; 512]), Status::OK);
}

#[test]
fn handshakes_that_never_end() {
    let (_turn, cluster, mut model) = Scenario::shared().with_disk(DISK, SIZE);
    let a = cluster.node("a");
    let mut held = Vec::new();
    for (port, target) in every_port(a) {
        for half in [
            &b""[..],
            b"\0\0\0\x03",
            b"\0\0\0\x03IHAVEOPT\0\0\0",
            b"GET /",
            b"\x16\x03\x01",
        ] {
            for _ in 0..6 {
                let mut wire = open(port, &target);
                wire.write_all(half).unwrap();
                held.push(wire);
            }
        }
    }
    // With all these connections open, honest clients are served and the disk can move.
    still_serves(a, &mut model);
    moves(a, DISK, "b", &["--verify"]);
    still_serves(cluster.node("b"), &mut model);
    drop(held);
}
