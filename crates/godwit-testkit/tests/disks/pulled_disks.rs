//! A disk changes hands before all data has moved, and the new owner pulls the rest: under load, and whichever node
//! dies meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::cluster::StandsStill;
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{
    PATIENCE, Scenario, becomes_whole, ends_well, finish, import_pattern, load, migrate, moves,
    policies, says, until, verify,
};
use godwit_testkit::small_fs::SmallFileSystem;
use godwit_testkit::vm::{GuestLoad, NodeGuest};

const DISK: &str = "pulled";
const SIZE: u64 = 96 << 20;
/// Holds the connection on which the rest is pulled.
const HELD: (&str, &str) = ("pull::connect", "sleep(3600000)");

/// Starts two nodes. `a` does not make the connection over which a disk is pulled.
fn held() -> Cluster {
    let mut cluster = Cluster::start(&["a", "b"]).unwrap();
    cluster.restart("a", &[HELD]);
    cluster
}

#[test]
fn a_disk_changes_hands_before_all_of_it_has_moved() {
    let (_turn, cluster, client) = Scenario::shared().under_load(DISK, SIZE);
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
    // The disk is like any other.
    let moved = migrate(cluster.node("a"), DISK, "b", &["--verify"]).unwrap();
    assert_eq!(moved["verified"], true, "{moved}");
    verify(cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn what_a_node_owes_is_kept_until_it_has_been_pulled_whoever_dies() {
    let turn = Scenario::shared();
    let mut cluster = held();
    let mut model = import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    let moved = moves(cluster.node("a"), DISK, "b", &["--policy", "post-copy"]);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let shown = b.disk(DISK).unwrap();
    assert_eq!(shown["missing_bytes"], SIZE, "{shown}");
    assert_eq!(shown["serves"], true, "{shown}");
    let status = shown["status"].as_str().unwrap().to_owned();
    says(&status, &["96 MiB of it still at node 'a'"]);
    let shown = a.disk(DISK).unwrap();
    assert_eq!(shown["owes"], true, "{shown}");
    let status = shown["status"].as_str().unwrap().to_owned();
    says(&status, &["still needs a part"]);

    let id = moved["id"].as_str().unwrap();
    let shown = godwit_testkit::scenario::migration(b, id);
    assert_eq!(shown["missing_bytes"], SIZE, "{shown}");
    let shown = a.text(&["migration", "show", id]);
    says(&shown, &["node 'a': a part of the disk is there only"]);

    a.refuses(
        &["disk", "rm", DISK],
        &["node 'b' serves it and still lacks a part"],
    );
    b.refuses(&["migrate", DISK, "--to", "a"], &["cannot be moved yet"]);
    let copy = cluster.dir().join("copy.raw");
    let text = b.refusal(&["disk", "export", DISK, copy.to_str().unwrap()]);
    says(&text, &["cannot be exported yet"]);

    // Both die, in either order, and the owner is back first.
    cluster.node_mut("b").kill();
    cluster.node_mut("a").kill();
    cluster.node_mut("b").start(&[]).unwrap();
    let shown = cluster.node("b").disk(DISK).unwrap();
    assert_eq!(shown["missing_bytes"], SIZE, "{shown}");
    cluster.node_mut("a").start(&[]).unwrap();
    becomes_whole(cluster.node("b"), cluster.node("a"), DISK);
    verify(cluster.node("b"), DISK, &mut model).unwrap();
    cluster.node("a").text(&["disk", "rm", DISK]);
}

#[test]
fn a_read_of_what_is_missing_fails_when_the_source_is_away_for_too_long_and_all_else_goes_on() {
    let turn = Scenario::shared();
    let wait = Duration::from_secs(3);
    let mut cluster = Cluster::secure(&["a", "b"]);
    let words = ["--read-wait", "3s"].map(str::to_owned);
    cluster.node_mut("b").spec_mut().options.extend(words);
    cluster.start_all().unwrap();
    cluster.restart("a", &[HELD]);
    let mut model = import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    let other = import_pattern(cluster.node("b"), "other", SIZE, turn.seed).unwrap();
    let other = load(cluster.node("b"), "other", turn.seed, other).unwrap();
    let moved = moves(cluster.node("a"), DISK, "b", &["--policy", "post-copy"]);
    cluster.node_mut("a").kill();
    let b = cluster.node("b");
    let status = b.disk(DISK).unwrap()["status"].as_str().unwrap().to_owned();
    says(&status, &["needed and not connected"]);
    let shown = b.godwit(&["migration", "show", moved["id"].as_str().unwrap()]);
    let shown = shown.text().unwrap();
    says(&shown, &["node 'a': 96.0 MiB of the disk"]);

    let mut reader = b.connect(DISK);
    let reading = std::thread::spawn(move || {
        let begun = Instant::now();
        (reader.read_at(50 << 20, &mut [0; 4096]), begun.elapsed())
    });
    // Meanwhile whole blocks can be written, and present parts can be read.
    let mut client = b.connect(DISK);
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
    let (_turn, mut cluster, client) = Scenario::shared().under_load(DISK, SIZE);
    assert!(client.progress(500, PATIENCE));
    for round in 0..3 {
        let (from, to) = if round % 2 == 0 {
            ("a", "b")
        } else {
            ("b", "a")
        };
        moves(cluster.node(from), DISK, to, &["--policy", "post-copy"]);
        // As a rule the kill comes during the pull; the client's own node lives.
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
    ends_well(client, cluster.node("b"), DISK);
}

#[test]
fn a_machine_runs_on_while_its_disks_are_pulled() {
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let guest = NodeGuest::start(&cluster, "a", 2, 96, &GuestLoad::seeded(turn.seed)).unwrap();
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
fn what_is_owed_is_told_by_command_lists_and_log() {
    let turn = Scenario::shared();
    let mut cluster = held();
    let mut model = import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let moving = ["migrate", DISK, "--to", "b", "--policy", "post-copy"];
    let told = a.text(&moving);
    says(&told, &["still needed: 96.0 MiB"]);
    let list = a.text(&["disk", "list"]);
    says(&list, &["a part to b"]);
    let list = b.text(&["disk", "list"]);
    says(&list, &["96.0 MiB at a"]);
    // The fail point on the connection keeps the process from ending.
    let _ = cluster.node_mut("a").terminate(Duration::from_secs(2));
    let log = cluster.node("a").log_tail(200);
    says(&log, &["still needs a part of it"]);
    cluster.die_and_start("a");
    becomes_whole(cluster.node("b"), cluster.node("a"), DISK);
    // A waiting command returns when the disk is whole.
    let moving = ["--policy", "post-copy", "--wait"];
    migrate(cluster.node("b"), DISK, "a", &moving).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    assert!(a.disk(DISK).unwrap()["missing_bytes"].is_null());
    assert_eq!(b.disk(DISK).unwrap()["owes"], false);
    verify(cluster.node("a"), DISK, &mut model).unwrap();
}

#[test]
fn a_disk_goes_on_without_what_is_lost_for_good() {
    let turn = Scenario::shared();
    let mut cluster = held();
    import_pattern(cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    migrate(cluster.node("a"), DISK, "b", &["--policy", "post-copy"]).unwrap();
    cluster.node_mut("a").kill();
    let b = cluster.node("b");
    let text = b.refusal(&["disk", "abandon", DISK]);
    says(&text, &["96 MiB", "--lost"]);
    let mut waits = b.connect(DISK);
    let waiting = std::thread::spawn(move || waits.read_at(8 << 20, &mut [0; 4096]));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!waiting.is_finished());
    b.text(&["disk", "abandon", DISK, "--lost"]);
    assert!(waiting.join().unwrap().is_err(), "nobody waits any more");
    let warnings = b.disk(DISK).unwrap()["warnings"].to_string();
    says(&warnings, &["given up as lost"]);
    // Written data is there, and a restart changes nothing.
    cluster.die_and_start("b");
    let mut client = cluster.node("b").connect(DISK);
    client.write_at(1 << 20, &[5; 4096]).unwrap();
    let mut read = [0; 4096];
    client.read_at(1 << 20, &mut read).unwrap();
    assert_eq!(read, [5; 4096]);
    assert!(client.read_at(8 << 20, &mut read).is_err());
    // The missing data was not lost after all.
    cluster.node_mut("a").start(&[]).unwrap();
    becomes_whole(cluster.node("b"), cluster.node("a"), DISK);
}

/// Expects a disk that is pulled slowly to tell at node `tells` within seconds that the node `still` stands still.
/// The disk's status has the first words while the nodes are connected, and the second ones while they are not.
fn standstill_is_noticed(still: &str, tells: &str, [connected, gone]: [&str; 2]) {
    let (_turn, cluster, _) = Scenario::shared().with_disk(DISK, SIZE);
    let options = ["--policy", "post-copy", "--max-bandwidth", "1MiB"];
    migrate(cluster.node("a"), DISK, "b", &options).unwrap();
    let comes_to = |words: &str| {
        until("the status says so", || {
            let shown = cluster.node(tells).disk(DISK).unwrap_or_default();
            let status = shown["status"].as_str().unwrap_or_default();
            status.contains(words) && status.contains("not connected") != (words == connected)
        });
    };
    comes_to(connected);
    let stopped = StandsStill::new(cluster.node(still));
    let begun = Instant::now();
    comes_to(gone);
    let took = begun.elapsed();
    drop(stopped);
    assert!(took < Duration::from_secs(8), "{took:?}");
    comes_to(connected);
}

#[test]
fn a_source_that_stands_still_is_noticed_within_seconds() {
    let words = [
        "which is needed until it has come",
        "needed and not connected",
    ];
    standstill_is_noticed("a", "b", words);
}

#[test]
fn an_owner_that_stands_still_is_noticed_within_seconds() {
    let lacks = "needs a part of it from here";
    let gone = "needs a part of it from here and is not connected";
    standstill_is_noticed("b", "a", [lacks, gone]);
}

#[test]
fn a_destination_that_runs_full_while_it_pulls_says_so_and_goes_on_when_there_is_room() {
    const PARTS: u64 = 3;
    let _turn = Scenario::shared();
    let mut cluster = Cluster::secure(&["a", "b"]);
    let small = SmallFileSystem::new(2 * SIZE).unwrap();
    let records = small.path().join("b");
    std::fs::create_dir(&records).unwrap();
    cluster.node_mut("b").spec_mut().dir = records;
    cluster.start_all().unwrap();
    // A disk without holes has its storage before the pull.
    let a = cluster.node("a");
    let size = SIZE.to_string();
    a.create_disk(DISK, &size);
    let mut client = a.connect(DISK);
    let data = vec![7; 16 << 20];
    let places = (0..PARTS).map(|part| part << 24);
    for place in places.clone() {
        client.write_at(place, &data).unwrap();
    }
    drop(client);
    let options = ["--policy", "post-copy", "--max-bandwidth", "8MiB"];
    migrate(a, DISK, "b", &options).unwrap();
    let filler = small.fill().unwrap();
    let b = cluster.node("b");
    let full = || b.disk(DISK).ok()?["problem"].as_str().map(str::to_owned);
    let problem = wait_for(PATIENCE, full).expect("the node says that it is full");
    says(&problem, &["no space"]);
    let left = b.disk(DISK).unwrap()["missing_bytes"].as_u64().unwrap();
    assert!(left > 0 && left < PARTS << 24, "{left}");
    std::fs::remove_file(filler).unwrap();
    becomes_whole(b, cluster.node("a"), DISK);
    assert!(b.disk(DISK).unwrap()["problem"].is_null());
    let mut found = vec![0; data.len()];
    let mut client = b.connect(DISK);
    for place in places {
        client.read_at(place, &mut found).unwrap();
        assert!(found == data);
    }
}

/// Moves a thin disk of `tib` TiB with 8 MiB of data. Returns the longest wait of a client that writes all the time,
/// and the time after which the disk was whole at the new node.
fn move_thin(policy: &str, tib: u64) -> (Duration, Duration) {
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let size = format!("{tib}TiB");
    a.create_disk(DISK, &size);
    let mut client = a.connect(DISK);
    let data = vec![7; 1 << 20];
    for part in 0..8 {
        client.write_at((tib << 37) * part, &data).unwrap();
    }
    client.flush().unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let ends = Arc::clone(&ended);
    let writing = std::thread::spawn(move || {
        let mut longest = Duration::ZERO;
        while !ends.load(Ordering::Relaxed) {
            let begun = Instant::now();
            client.write_at(4 << 20, &[9; 4096]).unwrap();
            longest = longest.max(begun.elapsed());
            std::thread::sleep(Duration::from_millis(1));
        }
        longest
    });
    let begun = Instant::now();
    moves(a, DISK, "b", &["--policy", policy]);
    becomes_whole(b, a, DISK);
    let whole = begun.elapsed();
    ended.store(true, Ordering::Relaxed);
    let longest = writing.join().unwrap();
    let mut there = b.connect(DISK);
    let mut read = vec![0; 1 << 20];
    for part in 0..8 {
        there.read_at((tib << 37) * part, &mut read).unwrap();
        assert!(read == data, "part {part} of {tib} TiB by {policy}");
    }
    there.read_at((tib << 37) - (1 << 20), &mut read).unwrap();
    assert!(read.iter().all(|byte| *byte == 0));
    println!("{policy}, {tib} TiB: a client waited {longest:?} at most, whole after {whole:?}");
    (longest, whole)
}

#[test]
fn a_thin_disk_of_a_tib_leaves_at_once() {
    let _turn = Scenario::alone();
    let (longest, whole) = move_thin("post-copy", 1);
    // A busy machine is allowed several times the time of an idle one.
    assert!(longest < Duration::from_millis(800), "{longest:?}");
    assert!(whole < Duration::from_secs(20), "{whole:?}");
}

/// Prints a table for docs and people.
#[test]
#[ignore = "takes minutes and measures: make bench SCENE=thin"]
fn thin_disks_of_many_tib_by_every_policy() {
    let _turn = Scenario::alone();
    for policy in policies() {
        for tib in [1, 4, 8] {
            move_thin(policy, tib);
        }
    }
}

#[test]
fn what_is_pulled_keeps_to_the_moves_bandwidth() {
    let (turn, mut cluster) = Scenario::shared().start(&["a", "b"]);
    let size = 24 << 20;
    let mut model = import_pattern(cluster.node("a"), DISK, size, turn.seed).unwrap();
    let options = ["--policy", "post-copy", "--max-bandwidth", "2MiB"];
    let begun = Instant::now();
    moves(cluster.node("a"), DISK, "b", &options);
    // Either node may start anew: the source knows the bound.
    cluster.die_and_start("b");
    cluster.die_and_start("a");
    let first = NbdConnection::connect(&cluster.node("b").nbd(DISK))
        .and_then(|mut client| client.read_at(20 << 20, &mut [0; 4096]));
    assert!(first.is_ok(), "{first:?}");
    becomes_whole(cluster.node("b"), cluster.node("a"), DISK);
    let took = begun.elapsed();
    assert!(took > Duration::from_secs(9), "{size} bytes in {took:?}");
    verify(cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn what_is_asked_of_pushing_must_go_with_the_policy() {
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let a = cluster.node("a");
    a.create_disk("d", "8MiB");
    let refused = |options: &[&str]| a.refusal(&[&["migrate", "d", "--to", "b"], options].concat());
    let text = refused(&["--policy", "mirror", "--push-for", "3"]);
    says(&text, &["mirror pushes nothing"]);
    let text = refused(&["--policy", "push-pull", "--verify"]);
    says(&text, &["cannot be compared"]);
    let text = refused(&["--policy", "post-copy", "--push-threshold", "2"]);
    says(&text, &["post-copy pushes nothing"]);
}
