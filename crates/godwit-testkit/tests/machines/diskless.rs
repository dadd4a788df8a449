//! A machine without disks has one owner that runs it, whichever node dies during a move.

use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::process::{machines_in, wait_for};
use godwit_testkit::random::Random;
use godwit_testkit::scenario::{PATIENCE, Scenario, other, until};

const MACHINE: &str = "bare";
/// Long enough to strike, short enough to go on.
const HOLD: &str = "sleep(1500)";
/// Time after which a node is surely at its fail point.
const SETTLE: Duration = Duration::from_millis(300);

/// The held node, and the fail point.
type Held = (&'static str, &'static str);

/// Starts two nodes and a machine at the first, and moves the machine until the fail point is reached.
fn held((node, point): Held) -> Cluster {
    let cluster = Cluster::plain(&["a", "b"]).start_held(node, (point, HOLD));
    let a = cluster.node("a");
    a.run_vm(MACHINE, &[], &[]);
    a.start_vm_move(MACHINE, "b");
    cluster.node(node).reaches(point);
    std::thread::sleep(SETTLE);
    cluster
}

/// Waits until the machine runs at one node, with one QEMU and no migration at either node. Returns the node.
fn runs_once(cluster: &Cluster) -> &'static str {
    let settled = || {
        let states = ["a", "b"].map(|name| cluster.node(name).vm_state(MACHINE));
        let ran = states.iter().filter(|state| *state == "running").count();
        if ran == 2 {
            // The machine may have moved between the two looks.
            let still = ["a", "b"].map(|name| cluster.node(name).vm_state(MACHINE));
            assert_ne!(still, ["running", "running"], "it runs twice");
            return None;
        }
        let over = |state: &String| matches!(state.as_str(), "running" | "departed" | "unknown");
        let moves = |name: &str| !cluster.node(name).vm(MACHINE)["migration"].is_null();
        let alone = machines_in(cluster.dir()).len() == 1;
        let idle = !moves("a") && !moves("b");
        (ran == 1 && alone && idle && states.iter().all(over))
            .then(|| if states[0] == "running" { "a" } else { "b" })
    };
    wait_for(PATIENCE, settled).unwrap_or_else(|| {
        let shown = ["a", "b"].map(|name| cluster.node(name).vm(MACHINE));
        panic!("it does not run once: {shown:?}")
    })
}

fn survives(victim: &str, moments: &[(Held, &str)]) {
    let _turn = Scenario::shared();
    for (point, owner) in moments {
        let mut cluster = held(*point);
        cluster.die_and_start(victim);
        assert_eq!(runs_once(&cluster), *owner, "{victim} died at {point:?}");
    }
}

#[test]
fn it_outlives_its_destinations_death() {
    survives(
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
    let _turn = Scenario::shared();
    for forced in ["resume", "stop"] {
        let mut cluster = held(("a", "persist::after::group"));
        cluster.node_mut("a").kill();
        let b = cluster.node("b");
        until("it tells that it is in doubt", || {
            b.vm(MACHINE)["problem"].is_string()
        });
        assert_eq!(b.vm_state(MACHINE), "incoming");
        b.refuses(&["vm", forced, MACHINE], &["two of it", "--force"]);
        b.text(&["vm", forced, MACHINE, "--force"]);
        match forced {
            "resume" => {
                assert_eq!(b.vm_state(MACHINE), "running");
                cluster.node_mut("a").start(&[]).unwrap();
                assert_eq!(runs_once(&cluster), "b");
            }
            _ => assert_eq!(b.vm_state(MACHINE), "unknown"),
        }
    }
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=diskless"]
fn it_outlives_deaths_at_any_moment() {
    let turn = Scenario::shared();
    let mut random = Random::new(turn.seed);
    let mut cluster = Cluster::plain(&["a", "b"]).started();
    cluster.node("a").run_vm(MACHINE, &[], &[]);
    let mut at = "a";
    for _ in 0..40 {
        let to = other(at);
        let victim = if random.percent(70) { to } else { at };
        cluster.node(at).start_vm_move(MACHINE, to);
        std::thread::sleep(Duration::from_millis(random.below(1500)));
        cluster.die_and_start(victim);
        println!("{victim} died while it moved from {at}");
        at = runs_once(&cluster);
    }
}
