//! Parts of an image from other nodes, good or bad.

use std::fs;
use std::time::{Duration, Instant};

use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::scenario::{PATIENCE, says, until, verify};

use crate::fixture::{DISK, Fixture, MIB, SIZE};
use crate::repository::odd_node::{Odd, OddNode};

/// The disk with the image at the other node.
const OTHER: &str = "other";

#[test]
fn what_another_node_has_comes_from_there_and_the_repository_may_be_away() {
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern();
    fixture.create_at("b", OTHER, &[]);
    fixture.becomes_whole_at("b", OTHER);
    // The guest's changes there are not handed out.
    let other = fixture.b().nbd(OTHER);
    let mut guest = NbdConnection::connect(&other).unwrap();
    guest.write_at(40 * MIB + 5 * 512, &[0xAB; 512]).unwrap();
    guest.flush().unwrap();
    fixture.create(&["--prefetch", "off"]);

    // This node no longer knows even the image's manifest.
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
    let told = fixture.trouble();
    let repository = fixture.repository.display().to_string();
    says(&told, &[&repository]);
    assert!(!reader.is_finished());
    fixture.is_there(true);
    reader.join().unwrap();
    verify(fixture.a(), DISK, &mut model).unwrap();
    // The rest came from the faster source.
    let (from_peers, from_repository) = fixture.fetched();
    assert_eq!(from_peers + from_repository, SIZE);
    assert!(from_peers >= 40 * MIB && from_repository >= 256 * 1024);
}

/// Returns the number of this host's connections to a port closed by the other side and not by this one.
fn half_closed(port: u16) -> usize {
    let peer = format!(":{port:04X}");
    let sockets = fs::read_to_string("/proc/net/tcp").unwrap();
    let is_one = |line: &&str| {
        let mut words = line.split_whitespace().skip(2);
        words.next().is_some_and(|to| to.ends_with(&peer)) && words.next() == Some("08")
    };
    sockets.lines().filter(is_one).count()
}

#[test]
#[ignore = "half a minute: make test-slow ONLY='--test image_disks'"]
fn connections_to_a_node_that_is_asked_no_more_are_closed() {
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    let mut model = fixture.push_pattern();
    fixture.create_at("b", OTHER, &[]);
    fixture.becomes_whole_at("b", OTHER);
    fixture.create(&[]);
    verify(fixture.a(), DISK, &mut model).unwrap();
    fixture.becomes_whole();
    let port = fixture.b().spec().listen.port();
    fixture.cluster.node_mut("b").terminate(PATIENCE).unwrap();
    let left = half_closed(port);
    println!("{left} connections are half closed");
    assert!(left > 0, "nothing was kept");
    until("they stay", || half_closed(port) == 0);
}

/// Reads all of a disk beside an odd node, with all data from the repository. Returns the duration of the first read.
fn reads_all_in_spite_of(odd: Odd) -> (OddNode, Duration) {
    let node = OddNode::start(odd);
    let fixture = node.beside(&["a"]);
    let mut model = fixture.push_pattern();
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
    let (node, _) = reads_all_in_spite_of(Odd::Lies);
    assert!(node.was_asked());
}

#[test]
fn a_node_that_does_not_answer_holds_a_read_for_a_moment_once() {
    let (node, took) = reads_all_in_spite_of(Odd::IsSilent);
    assert!(node.was_asked());
    assert!(took >= Duration::from_millis(200), "{took:?}");
    // 256 chunks that each waited would take a minute.
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn an_older_node_is_not_asked() {
    let (node, _) = reads_all_in_spite_of(Odd::IsOlder);
    assert!(!node.was_asked());
}
