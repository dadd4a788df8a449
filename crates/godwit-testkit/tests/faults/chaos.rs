//! Bad links and sudden deaths while a migration keeps its promise. During pauses and while delayed writes are sent, no
//! acknowledged write is lost, and the guest does not wait for a stalled link.
//!
//! Two nodes on loopback reach each other through proxies, one for each direction of connecting.

use std::time::Duration;

use godwit_testkit::process::wait_for;
use godwit_testkit::proxy::{Conditions, Proxy};
use godwit_testkit::random::Random;
use godwit_testkit::scenario::{
    PATIENCE, Scenario, ends, ends_well, finish, import_pattern, load, migration, moves, one_owner,
    other, start_migration, verify,
};
use godwit_testkit::{Cluster, Model, VerifyingClient};
use serde_json::Value;

const DISK: &str = "storm";
const SIZE: u64 = 64 << 20;
/// A link that carries the guest's double writes and takes some seconds for the disk.
const NARROW: Conditions = Conditions {
    delay: Duration::from_millis(1),
    jitter: Duration::from_millis(1),
    rate: Some(24 << 20),
    stalled: false,
    refusing: false,
};
const STALLED: Conditions = Conditions {
    stalled: true,
    ..NARROW
};
/// A promise that the migration can keep on this link, with room for a busy machine.
const PROMISE: [&str; 3] = ["--verify", "--sla", "p99.99<60ms"];

/// Two nodes, and the links between them.
struct Storm {
    cluster: Cluster,
    links: Vec<Proxy>,
}

impl Storm {
    fn new(seed: u64) -> Self {
        let (cluster, links) = Cluster::start_linked(seed).unwrap();
        Self { cluster, links }
    }

    fn set(&self, conditions: Conditions) {
        for link in &self.links {
            link.set(conditions);
        }
    }

    fn heal(&self) {
        self.links.iter().for_each(Proxy::heal);
    }

    /// Starts to move the disk from a to b and waits until a part has been copied.
    fn start(&self, options: &[&str]) -> String {
        let a = self.cluster.node("a");
        let id = start_migration(a, DISK, "b", options).unwrap();
        let copied = |shown: &Value| shown["progress"]["bytes_copied"].as_u64() > Some(SIZE / 4);
        self.wait(&id, "a part was copied", copied);
        id
    }

    /// Waits until the source shows the migration like this.
    fn wait(&self, id: &str, what: &str, like: impl Fn(&Value) -> bool) -> Value {
        let a = self.cluster.node("a");
        let seen = wait_for(PATIENCE, || {
            let shown = migration(a, id);
            like(&shown).then_some(shown)
        });
        seen.unwrap_or_else(|| panic!("never: {what}; {}", migration(a, id)))
    }

    /// Stalls the link until the migration pauses with delayed writes.
    fn pause(&self, id: &str) {
        self.set(STALLED);
        let shown = self.wait(id, "it pauses with delayed writes", |shown| {
            let promise = &shown["promise"];
            !promise["paused"].is_null() && promise["delayed_bytes"].as_u64() > Some(100_000)
        });
        println!("paused: {}", shown["promise"]);
    }

    /// Checks after a storm that the disk has one owner and all of its data, and still moves.
    fn calm(&self, expected: Option<&str>, seed: u64, mut model: Model) -> Model {
        self.heal();
        let owner = one_owner(&self.cluster, DISK).unwrap();
        if let Some(expected) = expected {
            assert_eq!(owner, expected);
        }
        let node = self.cluster.node(owner);
        verify(node, DISK, &mut model).unwrap();
        let other = other(owner);
        let client = load(node, DISK, seed, model).unwrap();
        moves(node, DISK, other, &["--verify", "--sla", "off"]);
        assert!(client.progress(100, PATIENCE));
        let mut model = finish(client).unwrap();
        verify(self.cluster.node(other), DISK, &mut model).unwrap();
        model
    }
}

fn begin(turn: &Scenario) -> (Storm, VerifyingClient) {
    let storm = Storm::new(turn.seed);
    let a = storm.cluster.node("a");
    let model = import_pattern(a, DISK, SIZE, turn.seed).unwrap();
    let client = load(a, DISK, turn.seed, model).unwrap();
    assert!(client.progress(200, PATIENCE));
    storm.set(NARROW);
    (storm, client)
}

/// Returns the latency of the guest's slowest request while the link was stalled for a while.
fn stall(options: &[&str]) -> (Duration, Value) {
    const STILL: Duration = Duration::from_secs(3);
    let turn = Scenario::alone();
    let (storm, client) = begin(&turn);
    let id = storm.start(options);
    storm.set(STALLED);
    std::thread::sleep(STILL);
    storm.set(NARROW);
    let ended = ends(storm.cluster.node("a"), &id, "completed");
    assert_eq!(ended["verified"], true, "{ended}");
    assert!(client.progress(100, PATIENCE));
    let longest = client.stats().longest;
    println!("longest: {longest:?}; {}", ended["promise"]);
    ends_well(client, storm.cluster.node("b"), DISK);
    (longest, ended)
}

#[test]
fn the_guest_does_not_wait_for_a_link_that_stands_still() {
    let (longest, ended) = stall(&PROMISE);
    assert!(longest < Duration::from_secs(2), "{longest:?}");
    let promise = &ended["promise"];
    assert!(
        promise["delayed_bytes_sent"].as_u64() > Some(0),
        "{promise}"
    );
    assert_eq!(promise["delayed_bytes"], 0, "{promise}");
}

/// Measures the wait of the test above in a migration without any pause.
#[test]
fn without_a_promise_the_guest_waits_for_the_link() {
    let (longest, _) = stall(&["--verify", "--sla", "off"]);
    assert!(longest > Duration::from_millis(2500), "{longest:?}");
}

#[test]
fn the_source_dies_in_a_pause() {
    let turn = Scenario::shared();
    let (mut storm, client) = begin(&turn);
    let id = storm.start(&PROMISE);
    storm.pause(&id);
    storm.cluster.node_mut("a").kill();
    assert!(client.wait_disconnected(PATIENCE), "its node was killed");
    storm.heal();
    storm.cluster.node_mut("a").start(&[]).unwrap();
    let model = client.stop(PATIENCE).clean().unwrap();
    // Delayed writes were acknowledged by the source alone, so the source must be the owner.
    storm.calm(Some("a"), turn.seed, model);
}

#[test]
fn the_destination_dies_in_a_pause() {
    let turn = Scenario::shared();
    let (mut storm, client) = begin(&turn);
    let id = storm.start(&PROMISE);
    storm.pause(&id);
    storm.cluster.node_mut("b").kill();
    storm.heal();
    storm.cluster.node_mut("b").start(&[]).unwrap();
    ends(storm.cluster.node("a"), &id, "aborted");
    assert!(client.progress(200, PATIENCE), "{:?}", client.stats());
    let model = finish(client).unwrap();
    storm.calm(Some("a"), turn.seed, model);
}

#[test]
fn the_link_is_cut_in_a_pause() {
    let turn = Scenario::shared();
    let (storm, client) = begin(&turn);
    let id = storm.start(&PROMISE);
    storm.pause(&id);
    for link in &storm.links {
        link.cut();
    }
    ends(storm.cluster.node("a"), &id, "aborted");
    assert!(client.progress(200, PATIENCE), "{:?}", client.stats());
    let model = finish(client).unwrap();
    storm.calm(Some("a"), turn.seed, model);
}

#[test]
fn the_link_is_cut_in_the_middle_of_a_delayed_write() {
    let turn = Scenario::shared();
    let (storm, client) = begin(&turn);
    // A rate at which delayed writes take long.
    let slow = ["--delayed-write-rate", "1000000"];
    let id = storm.start(&[&PROMISE[..], &slow].concat());
    storm.pause(&id);
    // Enough writes are left for the cut to come before all are sent.
    std::thread::sleep(Duration::from_secs(1));
    storm.set(NARROW);
    storm.wait(&id, "delayed writes are sent", |shown| {
        shown["promise"]["delayed_bytes_sent"].as_u64() > Some(0)
    });
    storm.links[0].cut_after(100_001);
    let ended = ends(storm.cluster.node("a"), &id, "aborted");
    assert!(
        ended["promise"]["delayed_bytes"].as_u64() > Some(0),
        "{ended}"
    );
    assert!(client.progress(200, PATIENCE), "{:?}", client.stats());
    let model = finish(client).unwrap();
    storm.calm(Some("a"), turn.seed, model);
}

/// A disturbance of a migration in the last test.
#[derive(Clone, Copy, Debug)]
enum Blow {
    Stall,
    Jitter,
    Cut,
    CutInside,
    Refuse,
    Cancel,
    KillSource,
    KillDestination,
}

const BLOWS: [Blow; 8] = [
    Blow::Stall,
    Blow::Jitter,
    Blow::Cut,
    Blow::CutInside,
    Blow::Refuse,
    Blow::Cancel,
    Blow::KillSource,
    Blow::KillDestination,
];

fn strike(storm: &mut Storm, blow: Blow, random: &mut Random, from: &str, id: &str) {
    let other = other(from);
    let a_while = Duration::from_millis(300 + random.below(1200));
    match blow {
        Blow::Stall => {
            storm.set(STALLED);
            std::thread::sleep(a_while);
            storm.set(NARROW);
        }
        Blow::Jitter => storm.set(Conditions {
            delay: Duration::from_millis(random.below(20)),
            jitter: Duration::from_millis(random.below(60)),
            ..NARROW
        }),
        Blow::Cut => storm.links.iter().for_each(Proxy::cut),
        Blow::CutInside => {
            for link in &storm.links {
                link.cut_after(random.below(4 << 20));
            }
        }
        Blow::Refuse => {
            storm.set(Conditions {
                refusing: true,
                ..NARROW
            });
            storm.links.iter().for_each(Proxy::cut);
            std::thread::sleep(a_while);
            storm.set(NARROW);
        }
        Blow::Cancel => {
            // A late cancel is refused, which is as good.
            let _ = storm
                .cluster
                .node(from)
                .godwit(&["migration", "cancel", id])
                .json();
        }
        Blow::KillSource | Blow::KillDestination => {
            let name = if matches!(blow, Blow::KillSource) {
                from
            } else {
                other
            };
            storm.cluster.node_mut(name).kill();
            std::thread::sleep(a_while / 4);
            storm.cluster.node_mut(name).start(&[]).unwrap();
        }
    }
}

#[test]
fn blow_upon_blow() {
    let turn = Scenario::alone();
    let mut random = Random::new(turn.seed);
    let mut storm = Storm::new(turn.seed);
    let mut model = import_pattern(storm.cluster.node("a"), DISK, SIZE, turn.seed).unwrap();
    let mut owner = "a";
    for round in 0..8 {
        let source = storm.cluster.node(owner);
        let client = load(source, DISK, turn.seed + round, model).unwrap();
        assert!(client.progress(100, PATIENCE));
        storm.set(NARROW);
        let other = other(owner);
        let promise = ["off", "auto", "p99.99<60ms", "p99.99<5ms"][random.below(4) as usize];
        // A promise that the link cannot keep gives way to the deadline. Without a delta all of the disk moves: the
        // blow has to strike before the disk changes hands.
        let bounds = ["--sla", promise, "--deadline", "10s"];
        let options = [&["--verify", "--no-delta"], &bounds[..]].concat();
        let id = start_migration(source, DISK, other, &options).unwrap();
        std::thread::sleep(Duration::from_millis(random.below(4000)));
        // The second blow may find the migration in the pause caused by the first one.
        let blows = [0; 2].map(|_| BLOWS[random.below(BLOWS.len() as u64) as usize]);
        let blows = &blows[..1 + random.below(2) as usize];
        println!("round {round}: --sla {promise}, {blows:?}");
        for blow in blows {
            strike(&mut storm, *blow, &mut random, owner, &id);
            std::thread::sleep(Duration::from_millis(random.below(300)));
        }
        storm.heal();
        let ended = || {
            let shown = migration(storm.cluster.node(owner), &id);
            // A killed node may have forgotten the migration.
            let over = matches!(
                shown["phase"].as_str(),
                None | Some("completed" | "aborted")
            );
            over.then_some(shown)
        };
        let shown = wait_for(PATIENCE, ended)
            .unwrap_or_else(|| panic!("never ends: {}", migration(storm.cluster.node(owner), &id)));
        let now = one_owner(&storm.cluster, DISK).unwrap();
        println!("  {} -> {now}: {}", shown["phase"], shown["error"]);
        let lost_its_node = client.disconnected();
        if !lost_its_node {
            assert!(client.progress(50, PATIENCE), "{:?}", client.stats());
        }
        model = client.stop(PATIENCE).clean().unwrap();
        verify(storm.cluster.node(now), DISK, &mut model).unwrap();
        owner = now;
    }
    storm.calm(None, turn.seed, model);
}
