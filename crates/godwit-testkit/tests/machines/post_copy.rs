//! A virtual machine that moves before its memory does, with a guest that checks its disks and its memory.

use std::process::Command;

use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, says};
use godwit_testkit::vm::{GuestLoad, NodeGuest, VM};

const DISK_MIB: u64 = 96;

#[test]
fn a_guest_works_while_its_memory_follows_it() {
    let (turn, cluster) = Scenario::alone().start(&["a", "b"]);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let guest =
        NodeGuest::start(&cluster, "a", 2, DISK_MIB, &GuestLoad::seeded(turn.seed)).unwrap();
    for (from, to, memory) in [
        (a, "b", "post-copy"),
        (b, "a", "hybrid"),
        (a, "b", "post-copy"),
    ] {
        let (moved, gaps) = guest.migrate(from, to, &["--memory", memory]).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        println!("{memory}: {moved} {gaps:?}");
    }
    println!("{:?}", guest.finish(b).unwrap());
}

#[test]
fn a_machine_whose_memory_is_lost_on_the_way_ends_and_says_so() {
    let (turn, cluster) = Scenario::alone().start(&["a", "b"]);
    let (a, b) = (cluster.node("a"), cluster.node("b"));
    let guest =
        NodeGuest::start(&cluster, "a", 1, DISK_MIB, &GuestLoad::seeded(turn.seed)).unwrap();
    let source = a.json(&["vm", "show", VM])["pid"].to_string();
    let show = || b.godwit(&["vm", "show", VM]).json().ok();
    // Slow enough for the memory to be still on the way when the source is gone.
    let options = ["--memory", "post-copy", "--max-bandwidth", "32M"];
    let failure = std::thread::scope(|scope| {
        let moves = scope.spawn(|| guest.try_migrate(a, "b", &options));
        wait_for(PATIENCE, || (show()?["state"] == "running").then_some(())).unwrap();
        let killed = Command::new("kill").args(["-KILL", &source]).status();
        assert!(killed.unwrap().success(), "the source has to be there");
        moves.join().unwrap().unwrap_err()
    });
    println!("{failure}");
    let problem = wait_for(PATIENCE, || {
        let shown = show()?;
        (shown["state"] != "running").then(|| shown["problem"].to_string())
    });
    let problem = problem.unwrap();
    says(&problem, &["memory did not arrive"]);
    assert_eq!(b.disk_state(&guest.disks()[0]), "serving");
}
