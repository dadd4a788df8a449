//! Disks with little in them: what is not there is not sent, and is not there at the destination either.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::random::Random;
use godwit_testkit::scenario::{Scenario, migrate};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 128 * MIB;
const DISK: &str = "thin";

#[test]
fn holes_smaller_than_a_copy_are_neither_sent_nor_stored() {
    let turn = Scenario::begin("thin_disks", "holes_smaller_than_a_copy");
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let path = cluster.dir().join("thin.raw");
    let image = File::create_new(&path).unwrap();
    image.set_len(SIZE).unwrap();
    let mut random = Random::new(turn.seed);
    let mut block = [0; 4096];
    for start in (0..SIZE).step_by(MIB as usize) {
        random.fill(&mut block);
        // At the start, at the end, and somewhere else.
        let within = [0, MIB - 4096, 4096 * random.below(256)][(start / MIB % 3) as usize];
        image.write_all_at(&block, start + within).unwrap();
    }
    let create = ["disk", "create", DISK, "--path", &path.to_string_lossy()];
    a.godwit(&create).json().unwrap();
    let moved = migrate(a, DISK, "b", &["--verify"]).unwrap();
    println!("{moved}");
    assert_eq!(
        (&moved["phase"], &moved["verified"]),
        (&"completed".into(), &true.into())
    );
    let written = SIZE / MIB * 4096;
    let sent = moved["progress"]["bytes_sent"].as_u64().unwrap();
    assert!(sent <= 2 * written, "{sent} bytes sent for {written}");
    let stored = b.disk(DISK).unwrap()["allocated_bytes"].as_u64().unwrap();
    assert!(stored <= 2 * written, "{stored} bytes stored for {written}");
}

#[test]
fn an_empty_disk_moves_and_is_compared_without_being_read() {
    const TIB: u64 = 1 << 40;
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    a.godwit(&["disk", "create", "empty", "--size", "1TiB"])
        .json()
        .unwrap();
    let begun = Instant::now();
    let moved = migrate(a, "empty", "b", &["--verify"]).unwrap();
    // To read it at one end, at 10 GB/s, takes longer.
    assert!(begun.elapsed() < Duration::from_secs(60), "{moved}");
    assert_eq!(
        (&moved["phase"], &moved["verified"]),
        (&"completed".into(), &true.into())
    );
    assert_eq!(moved["progress"]["bytes_sent"], 0);
    let disk = b.disk("empty").unwrap();
    assert_eq!(disk["size_bytes"], TIB, "{disk}");
    assert!(disk["allocated_bytes"].as_u64().unwrap() <= MIB, "{disk}");
}
