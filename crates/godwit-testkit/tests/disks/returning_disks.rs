//! Disks that come back to a node with their former image: only the difference is sent, and every doubtful part counts
//! as different.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use godwit_testkit::process::wait_for;
use godwit_testkit::random::Random;
use godwit_testkit::scenario::{
    PATIENCE, Scenario, becomes_whole, finish, import_pattern, load, migrate, policies, says,
    verify,
};
use godwit_testkit::{Model, Node};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const BLOCK: u64 = 4096;
const DISK: &str = "d";

/// Writes `blocks` random blocks of 4 KiB, each once.
fn write_blocks(node: &Node, model: &mut Model, random: &mut Random, blocks: usize) {
    let mut connection = node.connect(DISK);
    let mut written = std::collections::HashSet::new();
    while written.len() < blocks {
        let block = random.below(SIZE / BLOCK);
        if !written.insert(block) {
            continue;
        }
        let sectors = block * BLOCK / 512..(block + 1) * BLOCK / 512;
        let ticket = model.begin_write(sectors.clone(), false);
        let data = model.data(&ticket, sectors);
        connection.write_at(block * BLOCK, &data).unwrap();
        model.end_write(&ticket);
    }
    connection.flush().unwrap();
}

/// Moves the disk and compares both images. Returns the bytes sent, and the way in which the difference was found.
fn moved(from: &Node, to: &Node, more: &[&str]) -> (u64, Value) {
    let mut args = vec!["--verify"];
    args.extend(more);
    let moved = migrate(from, DISK, to.name(), &args).unwrap();
    println!("{moved}");
    assert_eq!(moved["phase"], "completed", "{moved}");
    assert_eq!(moved["verified"], true, "{moved}");
    (sent(&moved), moved["progress"]["delta"]["by"].clone())
}

fn sent(moved: &Value) -> u64 {
    let progress = &moved["progress"];
    let of = |name: &str| progress[name].as_u64().unwrap();
    of("bytes_sent")
        + of("double_write_bytes")
        + moved["promise"]["delayed_bytes_sent"].as_u64().unwrap_or(0)
}

/// Waits until the node has recorded the kept image as the disk's former content.
fn keeps_its_image(node: &Node) {
    let kept = || (node.disk(DISK).ok()?["kept"] == true).then_some(());
    assert!(wait_for(PATIENCE, kept).is_some(), "{:?}", node.disk(DISK));
}

#[test]
fn the_node_s_choice_reckons_what_is_sent_of_a_disk_that_moves_back() {
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let mut random = Random::new(turn.seed);
    let mut model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    let reason = |moved: &Value| {
        let reason = moved["options"]["policy_reason"].as_str();
        reason.unwrap_or_else(|| panic!("{moved}")).to_owned()
    };
    let there = reason(&migrate(a, DISK, "b", &[]).unwrap());
    says(&there, &["its 64 MiB go in one pass"]);
    keeps_its_image(a);
    write_blocks(b, &mut model, &mut random, 256);
    let back = reason(&migrate(b, DISK, "a", &[]).unwrap());
    says(&back, &["only the 1 MiB in which"]);
    verify(a, DISK, &mut model).unwrap();
}

#[test]
fn a_disk_that_moves_back_is_sent_without_what_its_old_image_holds() {
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let mut random = Random::new(turn.seed);
    let mut model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    assert_eq!(moved(a, b, &[]), (SIZE, Value::Null), "it was never there");
    keeps_its_image(a);
    // A change of one percent.
    let blocks = (SIZE / BLOCK / 100) as usize;
    write_blocks(b, &mut model, &mut random, blocks);
    let written = blocks as u64 * BLOCK;
    let (sent, by) = moved(b, a, &[]);
    assert_eq!(by, "written");
    assert!(
        sent >= written && sent * 1000 <= written * 1001,
        "{sent} bytes for {written}"
    );
    assert!(sent * 1000 <= SIZE * 12, "{sent} bytes, more than 1.2%");
    verify(a, DISK, &mut model).unwrap();
    // Straight back, and there again.
    keeps_its_image(b);
    assert_eq!(moved(a, b, &[]), (0, "written".into()));
    keeps_its_image(a);
    assert_eq!(moved(b, a, &["--policy", "mirror"]), (0, "written".into()));
    keeps_its_image(b);
    assert_eq!(moved(a, b, &["--no-delta"]), (SIZE, Value::Null));
    verify(b, DISK, &mut model).unwrap();
}

#[test]
fn what_is_not_certain_is_compared() {
    let (turn, mut cluster) = Scenario::shared().start(&["a", "b"]);
    let mut random = Random::new(turn.seed);
    let mut model = import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    moved(cluster.node("a"), cluster.node("b"), &[]);
    keeps_its_image(cluster.node("a"));
    // After an orderly end of the owner, the next process knows the writes.
    write_blocks(cluster.node("b"), &mut model, &mut random, 20);
    for name in ["b", "a"] {
        cluster
            .node_mut(name)
            .terminate(Duration::from_secs(20))
            .unwrap();
        cluster.node_mut(name).start(&[]).unwrap();
    }
    write_blocks(cluster.node("b"), &mut model, &mut random, 20);
    let (sent, by) = moved(cluster.node("b"), cluster.node("a"), &[]);
    assert_eq!(by, "written");
    assert!(sent <= 40 * BLOCK, "{sent}");
    keeps_its_image(cluster.node("b"));
    // After a kill, the next process does not.
    write_blocks(cluster.node("a"), &mut model, &mut random, 20);
    cluster.die_and_start("a");
    write_blocks(cluster.node("a"), &mut model, &mut random, 20);
    let (sent, by) = moved(cluster.node("a"), cluster.node("b"), &[]);
    assert_eq!(by, "compared");
    assert!(sent <= 40 * (64 << 10), "{sent}");
    verify(cluster.node("b"), DISK, &mut model).unwrap();
    keeps_its_image(cluster.node("a"));
    // A foreign write to the departed image.
    let old = cluster.node("a").image(DISK).unwrap();
    let old = OpenOptions::new().write(true).open(old).unwrap();
    old.write_all_at(&[0xEE; 4096], 3 * MIB).unwrap();
    let (sent, by) = moved(cluster.node("b"), cluster.node("a"), &[]);
    assert_eq!(by, "compared");
    assert_eq!(sent, 64 << 10, "the chunk that was changed");
    verify(cluster.node("a"), DISK, &mut model).unwrap();
}

#[test]
fn a_busy_disk_moves_to_and_fro_by_every_policy() {
    let (turn, cluster, mut model) = Scenario::shared().with_disk(DISK, SIZE);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    moved(a, b, &[]);
    let mut places = [b, a];
    for policy in policies() {
        let [from, to] = places;
        keeps_its_image(to);
        let client = load(from, DISK, turn.seed, model).unwrap();
        let moved = migrate(from, DISK, to.name(), &["--policy", policy]).unwrap();
        println!("{policy}: {moved}");
        assert_eq!(moved["progress"]["delta"]["by"], "written", "{moved}");
        let skipped = moved["progress"]["delta"]["bytes_skipped"]
            .as_u64()
            .unwrap();
        assert!(skipped > SIZE / 2, "{moved}");
        becomes_whole(to, from, DISK);
        model = finish(client).unwrap();
        verify(to, DISK, &mut model).unwrap();
        places = [to, from];
    }
}
