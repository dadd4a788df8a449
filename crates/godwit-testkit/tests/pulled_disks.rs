//! A disk changes hands before all of it has moved, and its new owner pulls the rest: under load, and whichever node
//! dies meanwhile.

use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::cluster::ClusterOptions;
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{
    PATIENCE, Scenario, becomes_whole, finish, import_pattern, load, migrate, verify,
};
use godwit_testkit::vm::{GuestLoad, NodeGuest};

const DISK: &str = "pulled";
const SIZE: u64 = 96 << 20;
/// Holds the connection on which the rest is pulled.
const HELD: (&str, &str) = ("pull::connect", "sleep(3600000)");

/// Two nodes of which `a` has the disk and does not connect to let it be pulled.
fn held() -> Cluster {
    let mut cluster = Cluster::start(&["a", "b"]).unwrap();
    let a = cluster.node_mut("a");
    a.terminate(PATIENCE).unwrap();
    a.start(&[HELD]).unwrap();
    cluster
}

#[test]
fn a_disk_changes_hands_before_all_of_it_has_moved() {
    let turn = Scenario::begin(
        "pulled_disks",
        "a_disk_changes_hands_before_all_of_it_has_moved",
    );
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let model = import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    let client = load(cluster.node("a"), DISK, turn.seed, model).unwrap();
    assert!(client.progress(300, PATIENCE));
    let ways = [("a", "b"), ("b", "a")].into_iter().cycle();
    let options: [&[&str]; 4] = [
        &["--policy", "post-copy"],
        &["--policy", "push-pull"],
        &["--policy", "push-pull", "--push-threshold", "1"],
        &["--policy", "push-pull", "--push-for", "0"],
    ];
    for (words, (from, to)) in options.into_iter().zip(ways) {
        let started = Instant::now();
        let moved = migrate(cluster.node(from), DISK, to, words).unwrap();
        let handed_over = started.elapsed();
        assert_eq!(moved["phase"], "completed", "{moved}");
        assert_eq!(moved["options"]["policy"], words[1], "{moved}");
        let pushed = moved["progress"]["bytes_copied"].as_u64().unwrap();
        if words[1] == "post-copy" {
            assert_eq!(pushed, 0, "{moved}");
        }
        assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
        becomes_whole(cluster.node(to), cluster.node(from), DISK);
        println!(
            "{words:?}: pushed {pushed} bytes, handed over after {handed_over:?}, whole after {:?}",
            started.elapsed()
        );
    }
    let mut model = finish(client).unwrap();
    verify(cluster.node("a"), DISK, &mut model).unwrap();
    // It is a disk like any other.
    let moved = migrate(cluster.node("a"), DISK, "b", &["--verify"]).unwrap();
    assert_eq!(moved["verified"], true, "{moved}");
    verify(cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn what_a_node_owes_is_kept_until_it_has_been_pulled_whoever_dies() {
    let turn = Scenario::begin(
        "pulled_disks",
        "what_a_node_owes_is_kept_until_it_has_been_pulled_whoever_dies",
    );
    let mut cluster = held();
    let mut model = import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    let moved = migrate(cluster.node("a"), DISK, "b", &["--policy", "post-copy"]).unwrap();
    assert_eq!(moved["phase"], "completed", "{moved}");
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let shown = b.disk(DISK).unwrap();
    assert_eq!(shown["missing_bytes"], SIZE, "{shown}");
    assert_eq!(shown["serves"], true, "{shown}");
    let status = shown["status"].as_str().unwrap().to_owned();
    assert!(
        status.contains("96 MiB of it still at node 'a'"),
        "{status}"
    );
    let shown = a.disk(DISK).unwrap();
    assert_eq!(shown["owes"], true, "{shown}");
    let status = shown["status"].as_str().unwrap().to_owned();
    assert!(status.contains("still needs a part"), "{status}");

    let id = moved["id"].as_str().unwrap();
    let shown = godwit_testkit::scenario::migration(b, id);
    assert_eq!(shown["missing_bytes"], SIZE, "{shown}");
    let shown = a.godwit(&["migration", "show", id]).text().unwrap();
    assert!(
        shown.contains("node 'a': a part of the disk is there only"),
        "{shown}"
    );

    let text = a.refusal(&["disk", "rm", DISK]);
    assert!(
        text.contains("node 'b' serves it and still lacks a part"),
        "{text}"
    );
    let text = b.refusal(&["migrate", DISK, "--to", "a"]);
    assert!(text.contains("cannot be moved yet"), "{text}");
    let copy = cluster.dir().join("copy.raw");
    let text = b.refusal(&["disk", "export", DISK, copy.to_str().unwrap()]);
    assert!(text.contains("cannot be exported yet"), "{text}");

    // Both die, in either order, and the owner is back first.
    cluster.node_mut("b").kill();
    cluster.node_mut("a").kill();
    cluster.node_mut("b").start(&[]).unwrap();
    let shown = cluster.node("b").disk(DISK).unwrap();
    assert_eq!(shown["missing_bytes"], SIZE, "{shown}");
    cluster.node_mut("a").start(&[]).unwrap();
    becomes_whole(cluster.node("b"), cluster.node("a"), DISK);
    verify(cluster.node("b"), DISK, &mut model).unwrap();
    cluster
        .node("a")
        .godwit(&["disk", "rm", DISK])
        .text()
        .unwrap();
}

#[test]
fn a_read_of_what_is_missing_fails_when_the_source_is_away_for_too_long_and_all_else_goes_on() {
    let turn = Scenario::begin(
        "pulled_disks",
        "a_read_of_what_is_missing_fails_when_the_source_is_away_for_too_long",
    );
    let wait = Duration::from_secs(3);
    let mut cluster = Cluster::prepare(&["a", "b"], ClusterOptions::secure().unwrap()).unwrap();
    let words = ["--read-wait", "3s"].map(str::to_owned);
    cluster.node_mut("b").spec_mut().options.extend(words);
    cluster.start_all().unwrap();
    let a = cluster.node_mut("a");
    a.terminate(PATIENCE).unwrap();
    a.start(&[HELD]).unwrap();
    let mut model = import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    let other = import_pattern(cluster.node("b"), "other", SIZE, turn.seed).unwrap();
    let other = load(cluster.node("b"), "other", turn.seed, other).unwrap();
    let moved = migrate(cluster.node("a"), DISK, "b", &["--policy", "post-copy"]).unwrap();
    assert_eq!(moved["phase"], "completed", "{moved}");
    cluster.node_mut("a").kill();
    let b = cluster.node("b");
    let status = b.disk(DISK).unwrap()["status"].as_str().unwrap().to_owned();
    assert!(status.contains("needed and not connected"), "{status}");
    let shown = b.godwit(&["migration", "show", moved["id"].as_str().unwrap()]);
    let shown = shown.text().unwrap();
    assert!(shown.contains("node 'a': 96.0 MiB of the disk"), "{shown}");

    let mut reader = NbdConnection::connect(&b.nbd(DISK)).unwrap();
    let reading = std::thread::spawn(move || {
        let begun = Instant::now();
        (reader.read_at(50 << 20, &mut [0; 4096]), begun.elapsed())
    });
    // Meanwhile whole blocks can be written, and what is here can be read.
    let mut client = NbdConnection::connect(&b.nbd(DISK)).unwrap();
    let begun = Instant::now();
    let mut rounds = 0;
    while !reading.is_finished() {
        let ticket = model.begin_write(32 * 2048..33 * 2048, true);
        client.write_at(32 << 20, &vec![0; 1 << 20]).unwrap();
        client.flush().unwrap();
        model.end_write(&ticket);
        let mut data = vec![1; 1 << 20];
        client.read_at(32 << 20, &mut data).unwrap();
        assert!(data.iter().all(|byte| *byte == 0));
        rounds += 1;
    }
    let (failed, waited) = reading.join().unwrap();
    println!(
        "{rounds} rounds in {:?}; the read waited {waited:?}: {failed:?}",
        begun.elapsed()
    );
    assert!(
        failed.is_err() && rounds > 10,
        "{failed:?}, {rounds} rounds"
    );
    assert!(waited >= wait && waited < wait + PATIENCE / 4, "{waited:?}");
    assert!(other.progress(100, PATIENCE), "{:?}", other.stats());

    cluster.node_mut("a").start(&[]).unwrap();
    becomes_whole(cluster.node("b"), cluster.node("a"), DISK);
    verify(cluster.node("b"), DISK, &mut model).unwrap();
    finish(other).unwrap();
}

#[test]
fn a_guest_works_on_what_is_there_while_its_owner_dies_and_comes_back() {
    let turn = Scenario::begin(
        "pulled_disks",
        "a_guest_works_on_what_is_there_while_its_owner_dies_and_comes_back",
    );
    let mut cluster = Cluster::start(&["a", "b"]).unwrap();
    let model = import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    let client = load(cluster.node("a"), DISK, turn.seed, model).unwrap();
    assert!(client.progress(500, PATIENCE));
    for round in 0..3 {
        let (from, to) = if round % 2 == 0 {
            ("a", "b")
        } else {
            ("b", "a")
        };
        let moved = migrate(cluster.node(from), DISK, to, &["--policy", "post-copy"]).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        // While it pulls, as a rule; the client's own node lives.
        if to == "b" {
            std::thread::sleep(Duration::from_millis(20 * (round + 1)));
            let left = cluster.node("b").disk(DISK).unwrap()["missing_bytes"].clone();
            cluster.node_mut("b").kill();
            println!("killed with {left} bytes left");
            cluster.node_mut("b").start(&[]).unwrap();
        }
        assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
        becomes_whole(cluster.node(to), cluster.node(from), DISK);
    }
    let mut model = finish(client).unwrap();
    verify(cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn a_machine_runs_on_while_its_disks_are_pulled() {
    let turn = Scenario::begin(
        "pulled_disks",
        "a_machine_runs_on_while_its_disks_are_pulled",
    );
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let load = GuestLoad {
        seed: turn.seed,
        ..GuestLoad::default()
    };
    let guest = NodeGuest::start(&cluster, "a", 2, 96, &load).unwrap();
    let ways = [("a", "b"), ("b", "a")];
    for ((from, to), policy) in ways.into_iter().zip(["push-pull", "post-copy"]) {
        let options = ["--policy", policy];
        let (moved, gaps) = guest.migrate(cluster.node(from), to, &options).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        println!("{policy}: {gaps:?}");
        let whole = || {
            let disks = cluster.node(to).godwit(&["disk", "list"]).json().ok()?;
            let disks = disks.as_array()?.clone();
            let rests = |disk: &serde_json::Value| disk["missing_bytes"].is_null();
            disks.iter().all(rests).then_some(disks.len())
        };
        assert_eq!(wait_for(PATIENCE, whole), Some(2));
    }
    println!("{:?}", guest.finish(cluster.node("a")).unwrap());
}

#[test]
fn what_is_asked_of_pushing_must_go_with_the_policy() {
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let a = cluster.node("a");
    a.godwit(&["disk", "create", "d", "--size", "8MiB"])
        .json()
        .unwrap();
    let refused = |options: &[&str]| a.refusal(&[&["migrate", "d", "--to", "b"], options].concat());
    let text = refused(&["--policy", "mirror", "--push-for", "3"]);
    assert!(text.contains("mirror pushes nothing"), "{text}");
    let text = refused(&["--policy", "push-pull", "--verify"]);
    assert!(text.contains("cannot be compared"), "{text}");
    let text = refused(&["--policy", "post-copy", "--push-threshold", "2"]);
    assert!(text.contains("post-copy pushes nothing"), "{text}");
}
