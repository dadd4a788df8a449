//! Disks that leave without a read before, since their difference from the image is known.

use godwit_testkit::Node;
use godwit_testkit::client::{Initial, Model};
use godwit_testkit::scenario::{migrate, policies, verify};

use crate::fixture::{Fixture, MIB, SIZE, write};

/// Returns the bytes read by a node's process, from files and otherwise.
fn bytes_read(node: &Node) -> u64 {
    let pid = node.pid().expect("the node runs");
    let counts = std::fs::read_to_string(format!("/proc/{pid}/io")).expect("its counts");
    let count = counts.lines().find_map(|line| line.strip_prefix("rchar: "));
    count.expect("a count").parse().expect("a number")
}

/// Creates a disk on the image, fetches the whole image and writes a little.
fn own_disk(fixture: &Fixture, disk: &str, model: &mut Model) {
    fixture.create_at("a", disk, &["--prefetch", "off"]);
    let mut client = fixture.a().connect(disk);
    let mut data = vec![0; 4 * MIB as usize];
    for start in (0..SIZE).step_by(data.len()) {
        client.read_at(start, &mut data).unwrap();
    }
    fixture.becomes_whole_at("a", disk);
    for start in [2048 + 3, 50 * 2048] {
        write(&mut client, model, start, 8);
    }
    client.flush().unwrap();
}

#[test]
fn a_disk_on_an_image_is_not_read_before_it_leaves_whatever_its_policy() {
    let mut fixture = Fixture::start(&["a", "b"], &[]);
    fixture.push_pattern();
    let disks: Vec<_> = policies().chain(["killed"]).collect();
    let model = |_| Model::new(fixture.turn.seed, SIZE, Initial::Pattern);
    let mut models: Vec<_> = disks.iter().map(model).collect();
    for (disk, model) in disks.iter().zip(&mut models) {
        own_disk(&fixture, disk, model);
    }
    for round in [0, 1] {
        for disk in disks
            .iter()
            .skip(round)
            .step_by(2)
            .filter(|disk| **disk != "killed")
        {
            let before = bytes_read(fixture.a());
            let moved = migrate(fixture.a(), disk, "b", &["--policy", disk]).unwrap();
            let read = bytes_read(fixture.a()) - before;
            println!(
                "{disk}: {read} bytes were read, and {} s",
                moved["lm_seconds"]
            );
            assert_eq!(moved["phase"], "completed", "{moved}");
            assert!(read < SIZE / 4, "{read} bytes were read: {moved}");
            let here = fixture.b().disk(disk).unwrap();
            let missing = here["missing_bytes"].as_u64().unwrap();
            assert!(missing > SIZE - MIB, "all of it was sent: {here}");
        }
        // The other disks, after an orderly end and a start.
        fixture.cluster.restart("a", &[]);
    }
    // Nothing is known after a crash.
    fixture.a_dies();
    let before = bytes_read(fixture.a());
    migrate(fixture.a(), "killed", "b", &[]).unwrap();
    let read = bytes_read(fixture.a()) - before;
    assert!(read > SIZE / 2, "only {read} bytes were read");
    for (disk, model) in disks.iter().zip(&mut models) {
        verify(fixture.b(), disk, model).unwrap();
    }
}
