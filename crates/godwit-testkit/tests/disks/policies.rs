//! Disks and machines move by every policy, under load, and nothing is lost.

use godwit_testkit::Cluster;
use godwit_testkit::scenario::{PATIENCE, Scenario, ends_well, moves, other, says};
use godwit_testkit::vm::{GuestLoad, NodeGuest};

const SIZE: u64 = 96 << 20;
const POLICIES: [&str; 3] = ["pre-copy", "mirror", "double-write"];

#[test]
fn a_disk_moves_by_every_policy_under_load() {
    let (_turn, cluster, client) = Scenario::shared().under_load("tour", SIZE);
    let ways = [("a", "b"), ("b", "a")].into_iter().cycle();
    let options: [&[&str]; 2] = [&["--verify"], &["--sla", "off"]];
    let ways_to_move = POLICIES
        .iter()
        .flat_map(|policy| options.map(|rest| (policy, rest)));
    for ((policy, rest), (from, to)) in ways_to_move.zip(ways) {
        let words = [&["--no-delta", "--policy", policy], rest].concat();
        let moved = moves(cluster.node(from), "tour", to, &words);
        assert_eq!(moved["verified"], rest == ["--verify"], "{moved}");
        assert_eq!(moved["options"]["policy"], *policy, "{moved}");
        let doubled = moved["progress"]["double_write_bytes"].as_u64().unwrap();
        let copied = moved["progress"]["bytes_copied"].as_u64().unwrap();
        println!("{policy} {rest:?}: {doubled} bytes of double writes, {copied} copied");
        match *policy {
            "pre-copy" => assert!(copied > SIZE, "the guest wrote meanwhile: {moved}"),
            _ => assert_eq!(copied, SIZE, "{moved}"),
        }
        assert!(client.progress(300, PATIENCE), "{:?}", client.stats());
    }
    ends_well(client, cluster.node("a"), "tour");
}

#[test]
fn a_machine_moves_by_every_policy() {
    let (turn, cluster) = Scenario::shared().start(&["a", "b"]);
    let guest = NodeGuest::start(&cluster, "a", 2, 96, &GuestLoad::seeded(turn.seed)).unwrap();
    let mut at = "a";
    for policy in POLICIES {
        let to = other(at);
        let options = ["--policy", policy, "--verify"];
        let (moved, gaps) = guest.migrate(cluster.node(at), to, &options).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        println!("{policy}: {gaps:?}");
        at = to;
    }
    println!("{:?}", guest.finish(cluster.node(at)).unwrap());
}

#[test]
fn rounds_are_what_pre_copy_has() {
    let cluster = Cluster::start(&["a", "b"]).unwrap();
    let a = cluster.node("a");
    a.create_disk("d", "8MiB");
    let refused = |options: &[&str]| a.refusal(&[&["migrate", "d", "--to", "b"], options].concat());
    let no_rounds = refused(&["--policy", "mirror", "--max-rounds", "2"]);
    says(&no_rounds, &["mirror"]);
    let odd = refused(&["--policy", "pre-copy", "--round-block", "5000"]);
    says(&odd, &["4 KiB"]);
    let none = refused(&["--policy", "pre-copy", "--max-rounds", "0"]);
    says(&none, &["round"]);
    let options = [
        "--policy",
        "pre-copy",
        "--round-block",
        "1G",
        "--round-left",
        "0",
        "--max-rounds",
        "1",
    ];
    let moved = moves(a, "d", "b", &options);
    assert_eq!(
        moved["options"]["rounds"]["block_bytes"],
        1 << 30,
        "{moved}"
    );
}
