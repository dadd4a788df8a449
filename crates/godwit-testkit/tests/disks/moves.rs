//! Moves of disks under load: two at a time, there and back, far away, and none after a cancel.

use std::time::{Duration, Instant};

use godwit_testkit::process::wait_for;
use godwit_testkit::proxy::Conditions;
use godwit_testkit::random::Random;
use godwit_testkit::scenario::{
    PATIENCE, Scenario, await_end, ends, ends_well, finish, import_pattern, load, migration, moves,
    says, start_migration, verify,
};
use godwit_testkit::{Cluster, VerifyingClient, Workload};

const SIZE: u64 = 96 << 20;

fn keep_going(client: &VerifyingClient) {
    assert!(
        client.progress(300, PATIENCE),
        "the load stopped: {:?}",
        client.stats()
    );
    let stats = client.stats();
    assert_eq!(
        (stats.errors, stats.violations),
        (0, 0),
        "{:?}",
        stats.problems
    );
}

#[test]
fn two_disks_move_at_the_same_time() {
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let one = import_pattern(a, "one", SIZE, turn.seed).unwrap();
    let two = import_pattern(b, "two", SIZE, turn.seed + 1).unwrap();
    let three = import_pattern(a, "three", SIZE, turn.seed + 2).unwrap();
    let one = load(a, "one", turn.seed, one).unwrap();
    let two = load(b, "two", turn.seed + 1, two).unwrap();
    let three = load(a, "three", turn.seed + 2, three).unwrap();
    let limit = ["--verify", "--max-bandwidth", "48MiB"];
    let ids = [
        (a, start_migration(a, "one", "b", &limit).unwrap()),
        (b, start_migration(b, "two", "a", &limit).unwrap()),
        (a, start_migration(a, "three", "b", &limit).unwrap()),
    ];
    let copying = ids.iter().filter(|(node, id)| {
        let phase = migration(node, id)["phase"].clone();
        phase != "completed" && phase != "aborted"
    });
    assert!(copying.count() >= 2, "they were to overlap");
    for (node, id) in &ids {
        let ended = ends(node, id, "completed");
        assert_eq!(ended["verified"], true, "{ended}");
    }
    for (client, node, disk) in [(one, b, "one"), (two, a, "two"), (three, b, "three")] {
        keep_going(&client);
        ends_well(client, node, disk);
        assert_eq!(node.disk_state(disk), "serving");
    }
}

#[test]
fn a_disk_moves_there_and_back_and_there_with_clients_attached() {
    let (_turn, cluster, client) = Scenario::shared().under_load("tour", SIZE);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    keep_going(&client);
    for (from, to) in [(a, "b"), (b, "a"), (a, "b")] {
        moves(from, "tour", to, &["--verify"]);
        keep_going(&client);
        assert_eq!(cluster.node(to).disk_state("tour"), "serving");
        assert_eq!(from.disk_state("tour"), "departed");
    }
    println!("longest request: {:?}", client.stats().longest);
    let mut model = finish(client).unwrap();
    verify(b, "tour", &mut model).unwrap();
    // A new client at the old node is told the disk's new node.
    let refusal = verify(a, "tour", &mut model).unwrap_err();
    says(&refusal, &["node 'b'"]);
    assert_eq!(b.disk("tour").unwrap()["epoch"], 4);
}

#[test]
fn a_cancel_at_any_moment_costs_nothing() {
    let (turn, cluster, client) = Scenario::shared().under_load("calm", SIZE);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let mut random = Random::new(turn.seed);
    let (mut aborted, mut rounds) = (0, 0);
    let mut at = a;
    while rounds < 12 {
        rounds += 1;
        let other = if at.name() == "a" { b } else { a };
        // About a second and a half of copying, so the cancel may come in any phase.
        let options = ["--max-bandwidth", "64MiB", "--verify"];
        let options = &options[..if random.percent(50) { 3 } else { 2 }];
        let id = start_migration(at, "calm", other.name(), options).unwrap();
        std::thread::sleep(Duration::from_millis(random.below(2500)));
        let cancelled = at.godwit(&["migration", "cancel", &id]).json();
        let ended = await_end(at, &id);
        println!(
            "round {rounds}: {} (cancel: {})",
            ended["phase"],
            cancelled.is_ok()
        );
        if ended["phase"] == "completed" {
            at = other;
        } else {
            assert_eq!(ended["phase"], "aborted", "{ended}");
            aborted += 1;
        }
        keep_going(&client);
        assert_eq!(at.disk_state("calm"), "serving");
    }
    assert!(aborted > 0, "every migration was too fast to be cancelled");
    let other = if at.name() == "a" { b } else { a };
    moves(at, "calm", other.name(), &["--verify"]);
    println!("longest request: {:?}", client.stats().longest);
    ends_well(client, other, "calm");
}

#[test]
fn a_guest_that_writes_more_than_the_link_takes_does_not_keep_its_disk_from_arriving() {
    const SIZE: u64 = 32 << 20;
    const LINK: u64 = 8 << 20;
    let turn = Scenario::alone();
    let (cluster, links) = Cluster::start_linked(turn.seed).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let model = import_pattern(a, "busy", SIZE, turn.seed).unwrap();
    for link in &links {
        link.set(Conditions {
            rate: Some(LINK),
            ..Conditions::default()
        });
    }
    let workload = Workload::new(turn.seed).rate(None);
    let client = VerifyingClient::start(&a.nbd("busy"), &workload, model).unwrap();
    // Without a user's choice, the guest's performance in this time becomes the promise.
    std::thread::sleep(Duration::from_secs(3));
    let id = start_migration(a, "busy", "b", &[]).unwrap();
    let ended = await_end(a, &id);
    assert_eq!(ended["phase"], "completed", "{}", migration(a, &id));
    keep_going(&client);
    ends_well(client, b, "busy");
}

#[test]
fn a_guest_does_not_wait_for_the_way_to_a_node_far_away() {
    // Without a promise nothing pauses, and all writes to copied ranges go to both nodes.
    to_a_node_far_away(&["--sla", "off"]);
}

#[test]
fn nor_does_one_whose_promise_is_shorter_than_that_way() {
    to_a_node_far_away(&["--sla", "p99.9<5ms"]);
}

/// Moves a disk while the guest writes to copied ranges, and expects no wait for a round trip.
fn to_a_node_far_away(promise: &[&str]) {
    const WAY: Duration = Duration::from_millis(20);
    const WRITES: u64 = 100;
    const BLOCK: u64 = 4096;
    let turn = Scenario::alone();
    let (cluster, links) = Cluster::start_linked(turn.seed).unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    import_pattern(a, "far", SIZE, turn.seed).unwrap();
    for link in &links {
        link.set(Conditions {
            delay: WAY,
            ..Conditions::default()
        });
    }
    let options = [promise, &["--max-bandwidth", "16MiB", "--verify"]].concat();
    let id = start_migration(a, "far", "b", &options).unwrap();
    let written = WRITES * BLOCK;
    let begun =
        || (migration(a, &id)["progress"]["bytes_copied"].as_u64()? > written).then_some(());
    wait_for(PATIENCE, begun).expect("the copy begins");
    let data = vec![0xc5; BLOCK as usize];
    let mut guest = a.connect("far");
    let mut took: Vec<Duration> = (0..WRITES)
        .map(|block| {
            let asked = Instant::now();
            guest.write_at(block * BLOCK, &data).unwrap();
            asked.elapsed()
        })
        .collect();
    assert_eq!(migration(a, &id)["phase"], "copying");
    drop(guest);
    took.sort_unstable();
    let median = took[took.len() / 2];
    println!("half of the writes took at most {median:?}");
    assert!(
        median < WAY / 10,
        "a way there and back is {:?}: {took:?}",
        2 * WAY
    );
    let ended = ends(a, &id, "completed");
    assert_eq!(ended["verified"], true, "{ended}");
    let mut there = vec![0; written as usize];
    let mut reader = b.connect("far");
    reader.read_at(0, &mut there).unwrap();
    assert!(there.iter().all(|&byte| byte == 0xc5), "a write is missing");
}
