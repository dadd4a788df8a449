//! A machine that stands still keeps standing still, at either node, after a node has died in its move.

use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Node};
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, run_small_machine};

const MACHINE: &str = "still";
/// Long enough to strike.
const HOLD: &str = "sleep(2000)";
/// Time in which a guest that must stand still would go on.
const MOMENT: Duration = Duration::from_secs(2);

/// Starts a machine that never runs at the first of two nodes, one of which has this fail point.
fn held(node: &str, point: &str) -> Cluster {
    let mut cluster = Cluster::prepare(&["a", "b"], ClusterOptions::secure().unwrap()).unwrap();
    for name in ["a", "b"] {
        let points = [(point, HOLD)];
        let points = if name == node { &points[..] } else { &[] };
        cluster.node_mut(name).start(points).unwrap();
    }
    run_small_machine(cluster.node("a"), MACHINE, "disk0", &["-S"]).unwrap();
    cluster
}

/// Moves the machine until the node reaches the fail point, and kills and restarts the node.
fn strike(cluster: &mut Cluster, node: &str, point: &str) {
    let machine = format!("vm/{MACHINE}");
    let detached = ["migrate", &machine, "--to", "b", "--detach"];
    cluster.node("a").godwit(&detached).json().unwrap();
    let reached = || {
        let log = std::fs::read_to_string(cluster.node(node).log_path()).unwrap();
        log.contains(point).then_some(())
    };
    wait_for(PATIENCE, reached).expect("the move comes to its point");
    cluster.node_mut(node).kill();
    cluster.node_mut(node).start(&[]).unwrap();
}

fn state(node: &Node) -> String {
    let shown = node.godwit(&["vm", "show", MACHINE]).json();
    shown.map_or_else(
        |failure| failure.to_string(),
        |machine| machine["state"].as_str().unwrap().to_owned(),
    )
}

/// Waits until the machine stands still here, and checks that nothing changes.
fn stands_still(node: &Node) {
    let still = wait_for(PATIENCE, || (state(node) == "paused").then_some(()));
    still.unwrap_or_else(|| panic!("it is {}", state(node)));
    std::thread::sleep(MOMENT);
    assert_eq!(state(node), "paused");
}

fn stop(node: &Node) {
    node.godwit(&["vm", "stop", "--force", MACHINE])
        .text()
        .unwrap();
}

#[test]
fn it_stands_still_at_a_source_that_died() {
    let _turn = Scenario::begin("machines", "it_stands_still_at_a_source_that_died");
    let mut cluster = held("a", "vm::loaded");
    strike(&mut cluster, "a", "vm::loaded");
    stands_still(cluster.node("a"));
    stop(cluster.node("a"));
}

#[test]
fn it_stands_still_at_a_destination_that_died() {
    let _turn = Scenario::begin("machines", "it_stands_still_at_a_destination_that_died");
    let mut cluster = held("b", "vm::before::run");
    strike(&mut cluster, "b", "vm::before::run");
    stands_still(cluster.node("b"));
    stop(cluster.node("b"));
}
