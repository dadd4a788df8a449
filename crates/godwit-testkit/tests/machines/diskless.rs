//! A machine without disks has one owner that runs it, whichever node dies during a move.

use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node, godwit_binary};
use godwit_testkit::process::{machines_in, wait_for};
use godwit_testkit::random::Random;
use godwit_testkit::scenario::{PATIENCE, Scenario};

const MACHINE: &str = "bare";
/// Long enough to strike, short enough to go on.
const HOLD: &str = "sleep(1500)";
/// Time after which a node is surely at its fail point.
const SETTLE: Duration = Duration::from_millis(300);

/// The held node, and the fail point.
type Held = (&'static str, &'static str);

fn cluster() -> Cluster {
    let options = ClusterOptions {
        godwit: godwit_binary().unwrap(),
        tls: false,
    };
    Cluster::prepare(&["a", "b"], options).unwrap()
}

fn run_machine(node: &Node) {
    let run = ["vm", "run", MACHINE, "--accel", "tcg", "--memory", "64M"];
    node.godwit(&[&run[..], &["--", "-nic", "none"]].concat())
        .text()
        .unwrap();
}

/// Starts two nodes and a machine at the first, and moves the machine until the fail point is reached.
fn held((node, point): Held) -> Cluster {
    let mut cluster = cluster();
    for name in ["a", "b"] {
        let points = [(point, HOLD)];
        let points = if name == node { &points[..] } else { &[] };
        cluster.node_mut(name).start(points).unwrap();
    }
    let a = cluster.node("a");
    run_machine(a);
    let machine = format!("vm/{MACHINE}");
    a.godwit(&["migrate", &machine, "--to", "b", "--detach"])
        .json()
        .unwrap();
    let reached = || {
        cluster
            .node(node)
            .log_tail(40)
            .contains(point)
            .then_some(())
    };
    wait_for(PATIENCE, reached).expect("the move comes to its point");
    std::thread::sleep(SETTLE);
    cluster
}

fn state(node: &Node) -> String {
    let shown = node.godwit(&["vm", "show", MACHINE]).json();
    shown.map_or_else(
        |_| String::from("unknown"),
        |machine| machine["state"].as_str().unwrap().to_owned(),
    )
}

/// Waits until the machine runs at one node, with one QEMU and no migration at either node. Returns the node.
fn runs_once(cluster: &Cluster) -> &'static str {
    let settled = || {
        let states = ["a", "b"].map(|name| state(cluster.node(name)));
        let ran = states.iter().filter(|state| *state == "running").count();
        if ran == 2 {
            // The machine may have moved between the two looks.
            let still = ["a", "b"].map(|name| state(cluster.node(name)));
            assert_ne!(still, ["running", "running"], "it runs twice");
            return None;
        }
        let over = |state: &String| matches!(state.as_str(), "running" | "departed" | "unknown");
        let moves = |name: &str| {
            let shown = cluster.node(name).godwit(&["vm", "show", MACHINE]).json();
            shown.is_ok_and(|machine| !machine["migration"].is_null())
        };
        let alone = machines_in(cluster.dir()).len() == 1;
        let idle = !moves("a") && !moves("b");
        (ran == 1 && alone && idle && states.iter().all(over))
            .then(|| if states[0] == "running" { "a" } else { "b" })
    };
    wait_for(PATIENCE, settled).unwrap_or_else(|| {
        let shown = |name| cluster.node(name).godwit(&["vm", "show", MACHINE]).json();
        panic!("it does not run once: {:?}, {:?}", shown("a"), shown("b"))
    })
}

fn survives(test: &str, victim: &str, moments: &[(Held, &str)]) {
    let _turn = Scenario::begin("machines", test);
    for (point, owner) in moments {
        let mut cluster = held(*point);
        cluster.node_mut(victim).kill();
        cluster.node_mut(victim).start(&[]).unwrap();
        assert_eq!(runs_once(&cluster), *owner, "{victim} died at {point:?}");
    }
}

#[test]
fn it_outlives_its_destinations_death() {
    survives(
        "it_outlives_its_destinations_death",
        "b",
        &[
            (("a", "vm::copying-memory"), "a"),
            (("a", "persist::before::group"), "b"),
            (("a", "persist::after::group"), "b"),
            (("b", "vm::before::run"), "b"),
            (("a", "vm::before::quit"), "b"),
        ],
    );
}

#[test]
fn it_outlives_its_sources_death() {
    survives(
        "it_outlives_its_sources_death",
        "a",
        &[
            (("a", "vm::loaded"), "a"),
            (("a", "persist::before::group"), "a"),
            (("a", "persist::after::group"), "b"),
            (("b", "vm::before::run"), "b"),
        ],
    );
}

#[test]
fn an_operator_decides_where_its_source_is_gone() {
    let _turn = Scenario::begin("machines", "an_operator_decides_where_its_source_is_gone");
    for forced in ["resume", "stop"] {
        let mut cluster = held(("a", "persist::after::group"));
        cluster.node_mut("a").kill();
        let b = cluster.node("b");
        let doubts = || {
            let shown = b.godwit(&["vm", "show", MACHINE]).json().ok()?;
            shown["problem"].is_string().then_some(())
        };
        wait_for(PATIENCE, doubts).expect("it tells that it is in doubt");
        assert_eq!(state(b), "incoming");
        let refusal = b.refusal(&["vm", forced, MACHINE]);
        assert!(
            refusal.contains("two of it") && refusal.contains("--force"),
            "{refusal}"
        );
        b.godwit(&["vm", forced, MACHINE, "--force"])
            .text()
            .unwrap();
        match forced {
            "resume" => {
                assert_eq!(state(b), "running");
                cluster.node_mut("a").start(&[]).unwrap();
                assert_eq!(runs_once(&cluster), "b");
            }
            _ => assert_eq!(state(b), "unknown"),
        }
    }
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=diskless"]
fn it_outlives_deaths_at_any_moment() {
    let turn = Scenario::begin("machines", "it_outlives_deaths_at_any_moment");
    let mut random = Random::new(turn.seed);
    let mut cluster = cluster();
    cluster.start_all().unwrap();
    run_machine(cluster.node("a"));
    let mut at = "a";
    for _ in 0..40 {
        let to = if at == "a" { "b" } else { "a" };
        let victim = if random.percent(70) { to } else { at };
        let machine = format!("vm/{MACHINE}");
        let detached = ["migrate", &machine, "--to", to, "--detach"];
        cluster.node(at).godwit(&detached).json().unwrap();
        std::thread::sleep(Duration::from_millis(random.below(1500)));
        cluster.node_mut(victim).kill();
        cluster.node_mut(victim).start(&[]).unwrap();
        println!("{victim} died while it moved from {at}");
        at = runs_once(&cluster);
    }
}
