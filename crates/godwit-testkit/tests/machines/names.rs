//! Several requests for one name at once: one gets the name, and the others are refused with the reason.

use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{Failure, Node};
use godwit_testkit::scenario::Scenario;

const MACHINE: &str = "wanted";
/// Long enough for others to ask meanwhile.
const HOLD: &str = "sleep(2000)";

/// Returns the results of three equal requests at once.
fn at_once(node: &Node, args: &[&str]) -> Vec<Result<String, Failure>> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| node.godwit(args).text()))
            .collect();
        asked.into_iter().map(|it| it.join().unwrap()).collect()
    })
}

/// Expects one success, and refusals of the others for one of these reasons.
fn one_wins(answers: &[Result<String, Failure>], why: &[&str]) {
    let won = answers.iter().filter(|answer| answer.is_ok()).count();
    assert_eq!(won, 1, "{answers:?}");
    for refused in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        assert!(
            why.iter().any(|why| refused.text.contains(why)),
            "{refused}"
        );
    }
}

fn run_again() -> Vec<&'static str> {
    let run = ["vm", "run", MACHINE, "--accel", "tcg", "--memory", "64M"];
    [&run[..], &["--", "-nodefaults", "-S"]].concat()
}

/// Expects so many machines in the node's list, each with its QEMU.
fn has_machines(node: &Node, number: usize) {
    let listed = node.json(&["vm", "list"]);
    let listed = listed.as_array().unwrap().len();
    assert_eq!((listed, node.qemus().len()), (number, number));
}

#[test]
fn of_machines_run_at_once_one_wins() {
    let _turn = Scenario::shared();
    let cluster = Cluster::plain(&["a"]).started();
    let a = cluster.node("a");
    for _ in 0..8 {
        one_wins(&at_once(a, &run_again()), &["a VM named \"wanted\" is"]);
        has_machines(a, 1);
        a.stop_vm(MACHINE);
        has_machines(a, 0);
    }
}

#[test]
fn a_machine_that_ends_keeps_its_name_until_it_is_gone() {
    let _turn = Scenario::shared();
    let cluster = Cluster::plain(&["a"]).start_held("a", ("vm::forgetting", HOLD));
    let a = cluster.node("a");
    a.text(&run_again());
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| a.godwit(&["vm", "stop", MACHINE, "--force"]).text());
        a.reaches("vm::forgetting");
        a.refuses(&run_again(), &["is being stopped"]);
        stopping.join().unwrap().unwrap();
    });
    a.text(&run_again());
    has_machines(a, 1);
}

#[test]
fn a_polite_stop_is_overtaken_by_a_forced_one() {
    let _turn = Scenario::shared();
    let cluster = Cluster::plain(&["a"]).started();
    let a = cluster.node("a");
    a.text(&run_again());
    std::thread::scope(|scope| {
        // A guest that never ran does not shut down.
        let polite = scope.spawn(|| a.godwit(&["vm", "stop", MACHINE]).text());
        std::thread::sleep(Duration::from_secs(1));
        a.stop_vm(MACHINE);
        has_machines(a, 0);
        polite.join().unwrap().unwrap();
    });
}

#[test]
fn a_name_is_not_given_to_one_that_comes_and_one_that_starts() {
    let _turn = Scenario::shared();
    let cluster = Cluster::plain(&["a", "b"]).start_held("b", ("vm::claimed", HOLD));
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    a.run_vm_on(MACHINE, "disk0", &["-S"]);
    let machine = format!("vm/{MACHINE}");
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| a.godwit(&["migrate", &machine, "--to", "b"]).text());
        b.reaches("vm::claimed");
        b.refuses(&run_again(), &["a VM named \"wanted\" is"]);
        moving.join().unwrap().unwrap();
    });
    has_machines(b, 1);
}

#[test]
fn of_disks_and_files_made_at_once_one_wins() {
    let _turn = Scenario::shared();
    let cluster = Cluster::plain(&["a"]).started();
    let a = cluster.node("a");
    let raw = cluster.dir().join("raw").display().to_string();
    std::fs::write(&raw, vec![1; 1 << 20]).unwrap();
    let taken = ["exists on this node", "exists already"];
    let used = ["is the image of", "in use", "exists on this node"];
    let new = ["disk", "create", "new", "--size", "1M"];
    one_wins(&at_once(a, &new), &taken);
    one_wins(&at_once(a, &["disk", "import", "copied", &raw]), &taken);
    let there = ["disk", "create", "there", "--path", &raw];
    one_wins(&at_once(a, &there), &used);
    let disks = a.json(&["disk", "list"]);
    assert_eq!(disks.as_array().unwrap().len(), 3, "{disks}");
}
