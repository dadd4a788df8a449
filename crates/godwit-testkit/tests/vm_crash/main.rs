//! Deaths while a virtual machine moves, and while it does not. The guest runs at most once. The guest runs on wherever
//! a QEMU with the memory and the disks is left, and the disks hold every acknowledged write.
//!
//! A fail point holds a node in a phase of the move; then a process is killed or the link is cut. The guest that
//! survives one blow takes the next, from its current node. Each move that reaches its phase thus shows that the blow
//! before left no obstacle.

mod endings;
mod nics;
mod post_copy;
mod protected;
mod pulling;
mod site;
mod zero_copy;

use std::time::Duration;

use godwit_testkit::scenario::{PATIENCE, Scenario, until};
use godwit_testkit::vm::VM;

use site::{Side, Site};

/// Long enough to strike, short enough for all others to wait and to go on.
const HOLD: &str = "sleep(2000)";
/// Only marks the moment in the log.
const PASS: &str = "sleep(1)";
/// Time after which a node is surely inside the phase.
const SETTLE: Duration = Duration::from_millis(300);
/// Duration of a cut of the link.
const CUT: Duration = Duration::from_secs(2);
/// Time for which a node is away.
const AWAY: Duration = Duration::from_millis(500);

/// A moment of a move.
struct Moment {
    phase: &'static str,
    /// The held side, the fail point, and the action.
    hold: (Side, &'static str, &'static str),
    options: &'static [&'static str],
}

impl Moment {
    /// Returns a moment in which a fail point holds a side.
    const fn held(side: Side, phase: &'static str, point: &'static str) -> Self {
        Self {
            phase,
            hold: (side, point, HOLD),
            options: &[],
        }
    }

    /// Returns the same moment of a move with other options.
    const fn with(self, options: &'static [&'static str]) -> Self {
        Self { options, ..self }
    }
}

const COPYING_DISKS: Moment = Moment::held(Side::Source, "copying disks", "vm::copying-disks");
/// A rate below the changes of the guest's memory.
const MEMORY: Moment = Moment {
    phase: "copying memory",
    hold: (Side::Source, "vm::copying-memory", PASS),
    options: &["--max-bandwidth", "16MiB"],
};
const STOPPED: Moment = Moment::held(Side::Source, "stopped", "vm::pre-switchover");
/// The destination could run the guest, and has no disks.
const LOADED: Moment = Moment::held(Side::Source, "loaded", "vm::loaded");
/// The destination has the memory and has not accepted the disks.
const ACCEPTING: Moment = Moment::held(Side::Destination, "accepting", "persist::before::accepted");
/// The disks are accepted, and the source is about to record their handover.
const GIVING: Moment = Moment::held(Side::Source, "giving", "persist::before::group");
const GIVEN: Moment = Moment::held(Side::Source, "given", "persist::after::group");
/// The disks are the destination's, and the QEMU there is about to get the command to run.
const BEFORE_RUN: Moment = Moment::held(Side::Destination, "before it runs", "vm::before::run");
const COMPLETING: Moment = Moment::held(Side::Source, "completing", "vm::before::quit");

/// The target of a blow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Node(Side),
    Qemu(Side),
    Link,
}

/// The required outcome for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Stays,
    Moves,
    /// The guest runs at either node.
    Survives,
    /// The guest's QEMU was killed: the disks are at this node, and the guest can start anew.
    Crashes(Side),
}

const SOURCE: Victim = Victim::Node(Side::Source);
const DESTINATION: Victim = Victim::Node(Side::Destination);
const SOURCE_QEMU: Victim = Victim::Qemu(Side::Source);
const DESTINATION_QEMU: Victim = Victim::Qemu(Side::Destination);

/// A moment, the target of the blow, and the required outcome for the guest.
type Blow = (&'static Moment, Victim, Outcome);

/// The source is killed.
const SOURCE_DIES: &[Blow] = &[
    (&COPYING_DISKS, SOURCE, Outcome::Stays),
    (&MEMORY, SOURCE, Outcome::Stays),
    (&STOPPED, SOURCE, Outcome::Stays),
    (&ACCEPTING, SOURCE, Outcome::Stays),
    (&GIVING, SOURCE, Outcome::Stays),
    (&GIVEN, SOURCE, Outcome::Moves),
    (&BEFORE_RUN, SOURCE, Outcome::Moves),
    (&COMPLETING, SOURCE, Outcome::Moves),
];

/// The destination is killed.
const DESTINATION_DIES: &[Blow] = &[
    (&COPYING_DISKS, DESTINATION, Outcome::Stays),
    (&MEMORY, DESTINATION, Outcome::Stays),
    (&STOPPED, DESTINATION, Outcome::Stays),
    (&ACCEPTING, DESTINATION, Outcome::Stays),
    // Nothing takes back the record that the source is about to store.
    (&GIVING, DESTINATION, Outcome::Moves),
    (&BEFORE_RUN, DESTINATION, Outcome::Moves),
    (&COMPLETING, DESTINATION, Outcome::Moves),
];

/// The nodes cannot reach each other for a while.
const LINK_IS_CUT: &[Blow] = &[
    (&COPYING_DISKS, Victim::Link, Outcome::Stays),
    (&MEMORY, Victim::Link, Outcome::Stays),
    (&STOPPED, Victim::Link, Outcome::Stays),
    (&ACCEPTING, Victim::Link, Outcome::Survives),
    (&GIVING, Victim::Link, Outcome::Moves),
    (&BEFORE_RUN, Victim::Link, Outcome::Moves),
    (&COMPLETING, Victim::Link, Outcome::Moves),
];

/// The source's QEMU is killed.
const SOURCES_QEMU_DIES: &[Blow] = &[
    (&COPYING_DISKS, SOURCE_QEMU, Outcome::Crashes(Side::Source)),
    (&MEMORY, SOURCE_QEMU, Outcome::Crashes(Side::Source)),
    (&STOPPED, SOURCE_QEMU, Outcome::Crashes(Side::Source)),
    // The destination has the memory.
    (&GIVING, SOURCE_QEMU, Outcome::Moves),
    (&BEFORE_RUN, SOURCE_QEMU, Outcome::Moves),
    (&COMPLETING, SOURCE_QEMU, Outcome::Moves),
];

/// The destination's QEMU is killed.
const DESTINATIONS_QEMU_DIES: &[Blow] = &[
    (&COPYING_DISKS, DESTINATION_QEMU, Outcome::Stays),
    (&MEMORY, DESTINATION_QEMU, Outcome::Stays),
    (&STOPPED, DESTINATION_QEMU, Outcome::Stays),
    (&ACCEPTING, DESTINATION_QEMU, Outcome::Stays),
    (
        &BEFORE_RUN,
        DESTINATION_QEMU,
        Outcome::Crashes(Side::Destination),
    ),
    (
        &COMPLETING,
        DESTINATION_QEMU,
        Outcome::Crashes(Side::Destination),
    ),
];

impl Site {
    /// Strikes the target, and brings it back if possible.
    fn strike(&mut self, victim: Victim) {
        match victim {
            Victim::Node(side) => {
                let name = self.place(side);
                self.cluster.node_mut(name).kill();
                std::thread::sleep(AWAY);
                self.start_node(name);
            }
            Victim::Qemu(side) => self.kill_qemu(self.place(side)),
            Victim::Link => {
                self.cut();
                std::thread::sleep(CUT);
                self.heal();
            }
        }
    }

    /// Makes one move, strikes, and checks the outcome.
    fn blow(&mut self, moment: &Moment, victim: Victim, outcome: Outcome) {
        let (from, to) = (self.place(Side::Source), self.place(Side::Destination));
        println!("{victim:?} in phase '{}', from {from}", moment.phase);
        self.move_up_to(moment.hold, moment.options);
        std::thread::sleep(SETTLE);
        self.strike(victim);
        match outcome {
            Outcome::Crashes(side) => {
                let owner = self.place(side);
                self.crashed(owner);
                self.boot_again(owner);
            }
            _ => {
                let at = self.survived();
                let right = match outcome {
                    Outcome::Stays => at == from,
                    Outcome::Moves => at == to,
                    _ => true,
                };
                assert!(right, "it runs at '{at}' after {victim:?}: not {outcome:?}");
            }
        }
    }
}

fn blows(all: &[Blow]) {
    let turn = Scenario::shared();
    let mut site = Site::new(turn.seed, 2);
    for (moment, victim, outcome) in all {
        site.blow(moment, *victim, *outcome);
    }
    site.moves();
    site.finish();
}

#[test]
fn the_source_dies() {
    blows(SOURCE_DIES);
}

#[test]
fn the_destination_dies() {
    blows(DESTINATION_DIES);
}

#[test]
fn the_link_is_cut() {
    blows(LINK_IS_CUT);
}

#[test]
fn the_sources_qemu_dies() {
    blows(SOURCES_QEMU_DIES);
}

#[test]
fn the_destinations_qemu_dies() {
    blows(DESTINATIONS_QEMU_DIES);
}

/// QEMU connects again to the node's next process and hands over the requests in flight.
#[test]
fn a_node_dies_again_and_again_under_its_guest() {
    let turn = Scenario::shared();
    let mut site = Site::with_load(turn.seed, 2, 0);
    let pid = site.pid("a");
    for away in [0, 50, 300, 1500, 0] {
        site.guest.console.mark(PATIENCE).unwrap();
        site.cluster.node_mut("a").kill();
        std::thread::sleep(Duration::from_millis(away));
        site.start_node("a");
        assert_eq!(site.survived(), "a");
        println!(
            "away for {away} ms; the guest waited {:?}",
            site.guest.console.host_gap()
        );
    }
    assert_eq!(site.pid("a"), pid, "another QEMU runs the guest");
    site.moves();
    site.finish();
}

/// Both disks of a machine change hands, or neither.
#[test]
fn a_disk_that_cannot_move_keeps_all_here() {
    let turn = Scenario::shared();
    let mut site = Site::new(turn.seed, 2);
    // The first disk to sync at the destination fails, the other does not.
    for (point, action) in [
        ("disk::barrier::sync", "1*return(5)->off"),
        (
            "persist::before::accepted",
            "1*sleep(1)->1*sleep(2000)->off",
        ),
    ] {
        println!("{point}={action}");
        site.set_point("b", (point, action));
        let seen = site.log_length("b");
        if point.starts_with("disk::") {
            let failure = site.guest.try_migrate(site.cluster.node("a"), "b", &[]);
            let failure = failure.expect_err("a disk failed");
            assert!(failure.text.contains("disk"), "{failure}");
        } else {
            // A disk is accepted, the other is held: the held disk's migration is cancelled.
            site.start_move(&[]);
            until("both disks come to be accepted", || {
                site.log_since("b", seen).matches(point).count() == 2
            });
            let waits = |disk: &&String| site.cluster.node("b").disk_state(disk) != "accepted";
            let held: Vec<&String> = site.guest.disks().iter().filter(waits).collect();
            assert_eq!(held.len(), 1, "one disk is held");
            let shown = site.cluster.node("a").disk(held[0]).unwrap();
            let id = shown["migration"].as_str().expect("it moves").to_owned();
            let cancelled = site.cluster.node("a").json(&["migration", "cancel", &id]);
            assert_eq!(cancelled["phase"], "aborted", "{cancelled}");
        }
        assert_eq!(site.survived(), "a");
        let gone = || site.cluster.node("b").godwit(&["vm", "show", VM]).json();
        assert!(gone().is_err(), "nothing of it stays: {:?}", gone());
    }
    site.moves();
    site.finish();
}
