//! A machine that stands still keeps standing still, at either node, after a node has died in its move.

use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::scenario::Scenario;

const MACHINE: &str = "still";
/// Long enough to strike.
const HOLD: &str = "sleep(2000)";
/// Time in which a guest that must stand still would go on.
const MOMENT: Duration = Duration::from_secs(2);

/// Moves a machine that never runs until a node reaches the fail point, and kills and starts the node: the machine
/// stands still there.
fn stands_still_where_it_died(name: &str, point: &str) {
    let _turn = Scenario::shared();
    let mut cluster = Cluster::secure(&["a", "b"]).start_held(name, (point, HOLD));
    let a = cluster.node("a");
    a.run_vm_on(MACHINE, "disk0", &["-S"]);
    a.start_vm_move(MACHINE, "b");
    cluster.node(name).reaches(point);
    cluster.die_and_start(name);
    let node = cluster.node(name);
    node.vm_comes_to(MACHINE, "paused");
    std::thread::sleep(MOMENT);
    assert_eq!(node.vm_state(MACHINE), "paused");
    node.stop_vm(MACHINE);
}

#[test]
fn it_stands_still_at_a_source_that_died() {
    stands_still_where_it_died("a", "vm::loaded");
}

#[test]
fn it_stands_still_at_a_destination_that_died() {
    stands_still_where_it_died("b", "vm::before::run");
}
