//! Thin disks: holes are not sent, and are holes at the destination, too.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::random::Random;
use godwit_testkit::scenario::{Scenario, becomes_whole, migrate, moves};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 128 * MIB;
const DISK: &str = "thin";

#[test]
fn holes_smaller_than_a_copy_are_neither_sent_nor_stored() {
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
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
    a.json(&create);
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
fn a_large_disk_with_little_in_it_is_as_thin_where_it_goes() {
    const LARGE: u64 = 100 << 30;
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let path = cluster.dir().join("large.raw");
    let image = File::create_new(&path).unwrap();
    image.set_len(LARGE).unwrap();
    let mut random = Random::new(turn.seed);
    let places = [0, LARGE / 3 / MIB * MIB, LARGE / 2, LARGE - MIB];
    let pieces = places.map(|place| {
        let mut piece = vec![0; MIB as usize];
        random.fill(&mut piece);
        image.write_all_at(&piece, place).unwrap();
        piece
    });
    image.sync_all().unwrap();
    let create = ["disk", "create", DISK, "--path", &path.to_string_lossy()];
    cluster.node("a").json(&create);
    let written = places.len() as u64 * MIB;
    let policies = ["double-write", "mirror", "pre-copy", "push-pull"];
    let ways = [("a", "b"), ("b", "a")].into_iter().cycle();
    for (policy, (from, to)) in policies.into_iter().zip(ways) {
        let (from, to) = (cluster.node(from), cluster.node(to));
        let options = ["--no-delta", "--policy", policy];
        let moved = moves(from, DISK, to.name(), &options);
        becomes_whole(to, from, DISK);
        let sent = moved["progress"]["bytes_sent"].as_u64().unwrap();
        assert!(sent <= written, "{policy}: {sent} bytes sent for {written}");
        let stored = to.disk(DISK).unwrap()["allocated_bytes"].as_u64().unwrap();
        assert!(
            stored <= written + written / 64,
            "{policy}: {stored} bytes stored for {written}"
        );
        let image = File::open(to.image(DISK).unwrap()).unwrap();
        let mut there = vec![0; MIB as usize];
        for (place, piece) in places.iter().zip(&pieces) {
            image.read_exact_at(&mut there, *place).unwrap();
            assert!(there == *piece, "{policy}: the piece at byte {place}");
        }
    }
}

#[test]
fn an_empty_disk_moves_and_is_compared_without_being_read() {
    const TIB: u64 = 1 << 40;
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    a.create_disk("empty", "1TiB");
    let begun = Instant::now();
    let moved = migrate(a, "empty", "b", &["--verify"]).unwrap();
    // A read at one end alone, at 10 GB/s, takes longer.
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
