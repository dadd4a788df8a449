//! A move is changed while under way: the disk leaves now, or the move keeps other bounds.

use std::time::{Duration, Instant};

use godwit_testkit::Cluster;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{
    PATIENCE, Scenario, becomes_whole, ends, ends_well, finish, import_pattern, migration, says,
    start_migration, verify,
};
use godwit_testkit::vm::{GuestLoad, NodeGuest};

const DISK: &str = "changing";
const SIZE: u64 = 96 << 20;
/// At this rate the copy would take a minute and a half. A delta would be over at once.
const SLOW: [&str; 5] = ["--max-bandwidth", "1M", "--sla", "off", "--no-delta"];

/// Starts a move and waits until something of the disk has arrived: a mirror's writes may leave copies no room.
fn under_way(cluster: &Cluster, from: &str, to: &str, more: &[&str]) -> String {
    let node = cluster.node(from);
    let options = [&SLOW, more].concat();
    let id = start_migration(node, DISK, to, &options).unwrap();
    let is_there = || {
        let progress = migration(node, &id)["progress"].clone();
        let bytes = |what: &str| progress[what].as_u64();
        (bytes("bytes_copied")? + bytes("double_write_bytes")? > 0).then_some(())
    };
    assert!(wait_for(PATIENCE, is_there).is_some());
    id
}

#[test]
fn whatever_its_policy_a_move_can_be_told_to_leave_now() {
    let (_turn, cluster, client) = Scenario::shared().under_load(DISK, SIZE);
    assert!(client.progress(300, PATIENCE));
    let ways = [("a", "b"), ("b", "a")].into_iter().cycle();
    let moves: [(&[&str], &[&str]); 4] = [
        (&["--verify"], &["push-pull"]),
        (
            &["--policy", "pre-copy"],
            &["push-pull", "--push-threshold", "1"],
        ),
        (&["--policy", "mirror"], &["post-copy"]),
        (
            &["--policy", "push-pull"],
            &["push-pull", "--push-for", "1"],
        ),
    ];
    for ((options, leaves), (from, to)) in moves.into_iter().zip(ways) {
        let node = cluster.node(from);
        let id = under_way(&cluster, from, to, options);
        assert!(client.progress(100, PATIENCE), "{:?}", client.stats());
        let told = Instant::now();
        // The bound holds for pulled data, too.
        let words: [&[&str]; 3] = [
            &["migration", "switch", &id, "--max-bandwidth", "1G"],
            &["--policy"],
            leaves,
        ];
        let changed = node.json(&words.concat());
        assert_eq!(changed["options"]["policy"], leaves[0], "{changed}");
        assert_eq!(changed["options"]["verify"], false, "{changed}");
        ends(node, &id, "completed");
        println!(
            "{options:?}, {leaves:?}: handed over {:?} later",
            told.elapsed()
        );
        assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
        becomes_whole(cluster.node(to), node, DISK);
    }
    ends_well(client, cluster.node("a"), DISK);
}

#[test]
fn a_move_keeps_the_bounds_that_it_was_given_last() {
    let (_turn, cluster, mut model) = Scenario::shared().with_disk(DISK, SIZE);
    let a = cluster.node("a");
    let id = under_way(&cluster, "a", "b", &["--verify"]);
    let other = [
        "--sla",
        "p99<50ms",
        "--deadline",
        "1h",
        "--max-bandwidth",
        "2M",
    ];
    let words = [&["migration", "switch", &id], &other[..]].concat();
    let changed = a.json(&words);
    let options = &changed["options"];
    assert_eq!(options["sla"], "p99<50ms", "{changed}");
    assert_eq!(options["deadline_seconds"], 3600, "{changed}");
    assert_eq!(options["max_bandwidth"], 2 << 20, "{changed}");
    assert_eq!(options["policy"], "double-write", "{changed}");
    let promised = || (migration(a, &id)["promise"]["limit_us"] == 50_000).then_some(());
    assert!(wait_for(PATIENCE, promised).is_some(), "{changed}");
    let free = [
        "--sla",
        "off",
        "--deadline",
        "none",
        "--max-bandwidth",
        "none",
    ];
    let words = [&["migration", "switch", &id[..8]], &free[..]].concat();
    let said = a.text(&words);
    says(&said, &["goes on as you asked"]);
    let moved = ends(a, &id, "completed");
    assert_eq!(moved["verified"], true, "{moved}");
    assert!(moved["options"]["max_bandwidth"].is_null(), "{moved}");
    verify(cluster.node("b"), DISK, &mut model).unwrap();
}

#[test]
fn a_move_without_a_policy_says_which_it_has_and_leaves_when_its_deadline_comes() {
    let (_turn, cluster, mut model) = Scenario::shared().with_disk(DISK, SIZE);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    // The copy would take half a minute.
    let bounds = ["--max-bandwidth", "3M", "--deadline", "4s", "--sla", "off"];
    let known = [
        &["migrate", DISK, "--to", "b", "--policy", "double-write"],
        &bounds[..],
    ]
    .concat();
    let text = a.refusal(&known);
    says(&text, &["longer than the deadline"]);
    let id = start_migration(a, DISK, "b", &bounds).unwrap();
    let begins = migration(a, &id)["options"].clone();
    assert_eq!(begins["policy"], "double-write", "{begins}");
    let why = begins["policy_reason"].as_str().unwrap();
    says(why, &["96 MiB go in one pass"]);
    let moved = ends(a, &id, "completed");
    assert_eq!(moved["options"]["policy"], "push-pull", "{moved}");
    let shown = a.text(&["migration", "show", &id]);
    says(&shown, &["its deadline has come"]);
    becomes_whole(b, a, DISK);
    verify(b, DISK, &mut model).unwrap();
}

#[test]
fn a_move_without_a_policy_leaves_a_guest_whose_writes_take_the_link() {
    let (_turn, cluster, client) = Scenario::shared().under_load(DISK, SIZE);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    // Less than the guest writes.
    let bounds = ["--max-bandwidth", "3M", "--sla", "off"];
    let id = start_migration(a, DISK, "b", &bounds).unwrap();
    let moved = ends(a, &id, "completed");
    let why = moved["options"]["policy_reason"].as_str().unwrap();
    assert_eq!(moved["options"]["policy"], "push-pull", "{moved}");
    says(why, &["of what is sent are the guest's writes"]);
    becomes_whole(b, a, DISK);
    ends_well(client, b, DISK);
}

#[test]
fn all_disks_of_a_machine_leave_when_it_is_told_to() {
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let guest = NodeGuest::start(&cluster, "a", 2, 96, &GuestLoad::seeded(turn.seed)).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let options = [&SLOW[..], &["--detach"]].concat();
    let moving = guest.try_migrate(a, "b", &options).unwrap();
    let id = moving["id"].as_str().unwrap().to_owned();
    let leave = [
        "migration",
        "switch",
        &id,
        "--policy",
        "push-pull",
        "--max-bandwidth",
        "none",
    ];
    let told = || a.godwit(&leave).json().ok();
    let changed = wait_for(PATIENCE, told).expect("its disks are on their way");
    for disk in changed["disks"].as_array().unwrap() {
        assert_eq!(disk["options"]["policy"], "push-pull", "{changed}");
    }
    ends(a, &id, "completed");
    for disk in changed["disks"].as_array().unwrap() {
        becomes_whole(b, a, disk["disk"].as_str().unwrap());
    }
    println!("{:?}", guest.finish(b).unwrap());
}

#[test]
fn a_move_under_way_refuses_the_promise_that_its_start_refuses() {
    let (_turn, cluster, client) = Scenario::shared().under_load(DISK, SIZE);
    let a = cluster.node("a");
    assert!(client.progress(500, PATIENCE));
    let promise = ["--sla", "p99<10us"];
    a.refuses(
        &[&["migrate", DISK, "--to", "b"], &promise[..]].concat(),
        &["cannot be kept"],
    );
    let id = under_way(&cluster, "a", "b", &[]);
    let text = a.refusal(&[&["migration", "switch", &id], &promise[..]].concat());
    says(&text, &["cannot be kept"]);
    assert!(migration(a, &id)["options"]["sla"].is_null());
    a.text(&["migration", "cancel", &id]);
    finish(client).unwrap();
}

#[test]
fn what_cannot_be_changed_is_refused_with_a_sentence() {
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    import_pattern(a, DISK, SIZE, 5).unwrap();
    let id = under_way(&cluster, "a", "b", &[]);
    let refused = |options: &[&str]| a.refusal(&[&["migration", "switch", &id], options].concat());
    let text = refused(&[]);
    says(&text, &["--policy"]);
    let text = refused(&["--push-for", "3"]);
    says(&text, &["--policy"]);
    let text = refused(&["--policy", "post-copy", "--push-for", "3"]);
    says(&text, &["post-copy pushes nothing"]);
    let text = refused(&["--sla", "auto"]);
    says(&text, &["only before it"]);
    b.refuses(
        &["migration", "switch", &id, "--max-bandwidth", "1G"],
        &["node 'a' conducts it"],
    );
    let text = a.refusal(&["migration", "switch", "ffff", "--sla", "off"]);
    says(&text, &["there is no migration 'ffff'"]);
    assert_eq!(migration(a, &id)["options"]["policy"], "double-write");
    a.text(&["migration", "cancel", &id]);
    std::thread::sleep(Duration::from_millis(100));
    let text = refused(&["--policy", "push-pull"]);
    says(&text, &["it has ended: it is aborted"]);
}
