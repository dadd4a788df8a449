//! Several requests for one name at once: one gets the name, and the others are refused with the reason.

use std::time::Duration;

use godwit_testkit::Cluster;
use godwit_testkit::cluster::{ClusterOptions, Failure, Node, godwit_binary};
use godwit_testkit::process::{machines_in, wait_for};
use godwit_testkit::scenario::{PATIENCE, Scenario, run_small_machine};

const MACHINE: &str = "wanted";
/// Long enough for others to ask meanwhile.
const HOLD: &str = "sleep(2000)";

fn cluster(names: &[&str]) -> Cluster {
    let options = ClusterOptions {
        godwit: godwit_binary().unwrap(),
        tls: false,
    };
    Cluster::prepare(names, options).unwrap()
}

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

fn listed(node: &Node) -> usize {
    let listed = node.godwit(&["vm", "list"]).json().unwrap();
    listed.as_array().unwrap().len()
}

#[test]
fn of_machines_run_at_once_one_wins() {
    let _turn = Scenario::begin("machines", "of_machines_run_at_once_one_wins");
    let mut cluster = cluster(&["a"]);
    cluster.start_all().unwrap();
    let a = cluster.node("a");
    for _ in 0..8 {
        one_wins(&at_once(a, &run_again()), &["a VM named \"wanted\" is"]);
        assert_eq!((listed(a), machines_in(&a.spec().dir).len()), (1, 1));
        a.godwit(&["vm", "stop", MACHINE, "--force"])
            .text()
            .unwrap();
        assert_eq!((listed(a), machines_in(&a.spec().dir).len()), (0, 0));
    }
}

#[test]
fn a_machine_that_ends_keeps_its_name_until_it_is_gone() {
    let _turn = Scenario::begin(
        "machines",
        "a_machine_that_ends_keeps_its_name_until_it_is_gone",
    );
    let mut cluster = cluster(&["a"]);
    cluster
        .node_mut("a")
        .start(&[("vm::forgetting", HOLD)])
        .unwrap();
    let a = cluster.node("a");
    a.godwit(&run_again()).text().unwrap();
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| a.godwit(&["vm", "stop", MACHINE, "--force"]).text());
        wait_for(PATIENCE, || {
            a.log_tail(20).contains("vm::forgetting").then_some(())
        })
        .unwrap();
        let refusal = a.refusal(&run_again());
        assert!(refusal.contains("is being stopped"), "{refusal}");
        stopping.join().unwrap().unwrap();
    });
    a.godwit(&run_again()).text().unwrap();
    assert_eq!((listed(a), machines_in(&a.spec().dir).len()), (1, 1));
}

#[test]
fn a_polite_stop_is_overtaken_by_a_forced_one() {
    let _turn = Scenario::begin("machines", "a_polite_stop_is_overtaken_by_a_forced_one");
    let mut cluster = cluster(&["a"]);
    cluster.start_all().unwrap();
    let a = cluster.node("a");
    a.godwit(&run_again()).text().unwrap();
    std::thread::scope(|scope| {
        // A guest that never ran does not shut down.
        let polite = scope.spawn(|| a.godwit(&["vm", "stop", MACHINE]).text());
        std::thread::sleep(Duration::from_secs(1));
        a.godwit(&["vm", "stop", MACHINE, "--force"])
            .text()
            .unwrap();
        assert_eq!(listed(a), 0);
        polite.join().unwrap().unwrap();
    });
}

#[test]
fn a_name_is_not_given_to_one_that_comes_and_one_that_starts() {
    let _turn = Scenario::begin(
        "machines",
        "a_name_is_not_given_to_one_that_comes_and_one_that_starts",
    );
    let mut cluster = cluster(&["a", "b"]);
    cluster.node_mut("a").start(&[]).unwrap();
    cluster
        .node_mut("b")
        .start(&[("vm::claimed", HOLD)])
        .unwrap();
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    run_small_machine(a, MACHINE, "disk0", &["-S"]).unwrap();
    let machine = format!("vm/{MACHINE}");
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| a.godwit(&["migrate", &machine, "--to", "b"]).text());
        wait_for(PATIENCE, || {
            b.log_tail(20).contains("vm::claimed").then_some(())
        })
        .unwrap();
        let refusal = b.refusal(&run_again());
        assert!(refusal.contains("a VM named \"wanted\" is"), "{refusal}");
        moving.join().unwrap().unwrap();
    });
    assert_eq!((listed(b), machines_in(&b.spec().dir).len()), (1, 1));
}

#[test]
fn of_disks_and_files_made_at_once_one_wins() {
    let _turn = Scenario::begin("machines", "of_disks_and_files_made_at_once_one_wins");
    let mut cluster = cluster(&["a"]);
    cluster.start_all().unwrap();
    let a = cluster.node("a");
    let raw = cluster.dir().join("raw").display().to_string();
    std::fs::write(&raw, vec![1; 1 << 20]).unwrap();
    let taken = ["exists on this node", "exists already"];
    one_wins(
        &at_once(a, &["disk", "create", "new", "--size", "1M"]),
        &taken,
    );
    one_wins(&at_once(a, &["disk", "import", "copied", &raw]), &taken);
    let used = ["is the image of", "in use", "exists on this node"];
    one_wins(
        &at_once(a, &["disk", "create", "there", "--path", &raw]),
        &used,
    );
    let disks = a.godwit(&["disk", "list"]).json().unwrap();
    assert_eq!(disks.as_array().unwrap().len(), 3, "{disks}");
}
