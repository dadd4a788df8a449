//! Deaths during the switchover of a guest whose memory stays in place, and while the memory follows. Two QEMUs map the
//! same memory, and still the guest runs once, and the memory is whole wherever the guest survives.

use std::process::Stdio;
use std::time::Duration;

use godwit_testkit::cluster::MemoryPool;
use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, until};
use godwit_testkit::vm::VM;
use rustix::process::{Pid, Signal};

use super::site::{Side, Site, send};
use super::{
    Blow, DESTINATION, DESTINATION_QEMU, HOLD, Moment, Outcome, SOURCE, SOURCE_QEMU, Victim,
};

const OPTIONS: &[&str] = &["--memory", "zero-copy", "--stay-in-pool"];

/// The destination has been offered the memory.
const OFFERED: Moment = Moment {
    phase: "offered",
    ..super::COPYING_DISKS.with(OPTIONS)
};
/// Both QEMUs have the guest's memory and devices, and neither runs it.
const LOADED: Moment = super::LOADED.with(OPTIONS);
const ACCEPTING: Moment = super::ACCEPTING.with(OPTIONS);
const GIVING: Moment = super::GIVING.with(OPTIONS);
/// The record says that the guest is given away; the memory does not yet.
const GIVEN: Moment = super::GIVEN.with(OPTIONS);
/// The memory says so as well.
const MEMORY_GIVEN: Moment = Moment {
    phase: "memory given",
    hold: (Side::Source, "vm::memory-given", HOLD),
    options: OPTIONS,
};
const BEFORE_RUN: Moment = super::BEFORE_RUN.with(OPTIONS);
const COMPLETING: Moment = super::COMPLETING.with(OPTIONS);

const LOST: Outcome = Outcome::Crashes(Side::Destination);
const ENDED: Outcome = Outcome::Crashes(Side::Source);

/// Every blow to a move.
const BLOWS: &[Blow] = &[
    (&OFFERED, SOURCE, Outcome::Stays),
    (&OFFERED, DESTINATION, Outcome::Stays),
    (&OFFERED, SOURCE_QEMU, ENDED),
    (&OFFERED, DESTINATION_QEMU, Outcome::Stays),
    (&LOADED, SOURCE, Outcome::Stays),
    (&LOADED, DESTINATION, Outcome::Stays),
    // The destination has everything to run the guest.
    (&LOADED, SOURCE_QEMU, Outcome::Moves),
    (&LOADED, DESTINATION_QEMU, Outcome::Stays),
    (&LOADED, Victim::Link, Outcome::Stays),
    (&ACCEPTING, SOURCE, Outcome::Stays),
    (&ACCEPTING, DESTINATION, Outcome::Stays),
    (&ACCEPTING, DESTINATION_QEMU, Outcome::Stays),
    (&GIVING, SOURCE, Outcome::Stays),
    (&GIVING, DESTINATION, Outcome::Moves),
    (&GIVING, SOURCE_QEMU, Outcome::Moves),
    (&GIVING, DESTINATION_QEMU, LOST),
    (&GIVEN, SOURCE, Outcome::Moves),
    (&GIVEN, SOURCE_QEMU, Outcome::Moves),
    (&GIVEN, DESTINATION, Outcome::Moves),
    (&GIVEN, DESTINATION_QEMU, LOST),
    (&MEMORY_GIVEN, SOURCE, Outcome::Moves),
    (&MEMORY_GIVEN, DESTINATION, Outcome::Moves),
    (&BEFORE_RUN, SOURCE, Outcome::Moves),
    (&BEFORE_RUN, DESTINATION, Outcome::Moves),
    (&BEFORE_RUN, SOURCE_QEMU, Outcome::Moves),
    (&BEFORE_RUN, DESTINATION_QEMU, LOST),
    (&COMPLETING, SOURCE, Outcome::Moves),
    (&COMPLETING, DESTINATION, Outcome::Moves),
    (&COMPLETING, SOURCE_QEMU, Outcome::Moves),
    (&COMPLETING, DESTINATION_QEMU, LOST),
];

/// The victim while the guest's memory leaves the pool, or afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mover {
    /// The node that moves the memory, between two runs of chunks.
    Node,
    /// The same node while QEMU is in the middle of a chunk.
    NodeMidChunk,
    Qemu,
    /// The node from which the guest came.
    Other,
    /// The node, when all has moved.
    NodeAfterwards,
    QemuAfterwards,
}

const MOVERS: [Mover; 6] = [
    Mover::Node,
    Mover::NodeMidChunk,
    Mover::Qemu,
    Mover::Other,
    Mover::NodeAfterwards,
    Mover::QemuAfterwards,
];

/// The guest has 24 runs of memory, and the blow comes after more than half of them.
const HELD_HALFWAY: &str = "13*sleep(1)->1*sleep(2000)->off";

impl Site {
    /// Returns the owner of the guest's memory, as the pool shows it.
    fn owner_of_memory(&self, node: &str) -> String {
        let shown = self.cluster.node(node);
        let shown = shown.godwit(&["memory-pool", "show", MemoryPool::NAME]);
        let shown = shown.json().unwrap();
        assert_eq!(shown["segments"].as_array().unwrap().len(), 1, "{shown}");
        shown["segments"][0]["owner"].as_str().unwrap().to_owned()
    }

    fn owns_its_memory(&self) {
        let at = self.place(Side::Source);
        for node in ["a", "b"] {
            assert_eq!(self.owner_of_memory(node), at, "as {node} sees it");
        }
    }

    /// Lets the guest's memory go one way; returns true if all of it has gone.
    fn memory_goes(&self, to: &str) -> bool {
        let node = self.cluster.node(self.place(Side::Source));
        node.godwit(&["vm", "memory", VM, "--to", to])
            .json()
            .is_ok()
    }

    /// Returns the bytes of the guest's memory in the pool, and of the whole memory.
    fn in_pool(&self) -> (u64, u64) {
        let node = self.cluster.node(self.place(Side::Source));
        let memory = self.guest.memory(node).unwrap();
        let number = |name: &str| memory[name].as_u64().unwrap();
        (number("bytes_in_pool"), number("bytes"))
    }

    /// Waits until most of the guest's memory is local. The start alone would prove little: the disks seldom read or
    /// write there.
    fn most_is_local(&self) {
        let most = || {
            let (in_pool, all) = self.in_pool();
            (in_pool * 2 < all).then_some(())
        };
        wait_for(PATIENCE, most).expect("its memory moves");
    }

    /// Lets most of the guest's memory go to the node, and the rest stay.
    fn most_goes(&self) {
        std::thread::scope(|scope| {
            let moving = scope.spawn(|| self.memory_goes("local"));
            self.most_is_local();
            let node = self.cluster.node(self.place(Side::Source));
            // A late cancel is harmless.
            let _ = node.godwit(&["vm", "memory", VM, "--cancel"]).json();
            moving.join().unwrap();
        });
    }

    /// Kills the node that moves memory while QEMU is stopped somewhere within a run. Returns true if the memory is in
    /// both places afterwards.
    fn mid_chunk(&mut self, delay: Duration) -> bool {
        let at = self.place(Side::Source);
        let qemu = self.pid(at);
        self.most_goes();
        std::thread::scope(|scope| {
            let moving = scope.spawn(|| self.memory_goes("local"));
            std::thread::sleep(delay);
            send(qemu, Signal::STOP);
            // The node's request is under way, and does not end.
            std::thread::sleep(Duration::from_millis(100));
            let node = self.cluster.node(at).pid().unwrap();
            send(
                Pid::from_raw(i32::try_from(node).unwrap()).unwrap(),
                Signal::KILL,
            );
            send(qemu, Signal::CONT);
            moving.join().unwrap();
        });
        self.cluster.node_mut(at).kill();
        self.start_node(at);
        assert_eq!(self.survived(), at);
        let (in_pool, all) = self.in_pool();
        println!("  stopped after {delay:?}: {in_pool} of {all} bytes are in the pool");
        let halfway = 0 < in_pool && in_pool < all;
        assert!(self.memory_goes("pool"), "it goes back from wherever it is");
        self.guest.alive().unwrap();
        halfway
    }

    /// Strikes a memory move held between two runs of chunks.
    fn between_runs(&mut self, strike: impl FnOnce(&mut Self)) {
        let at = self.place(Side::Source);
        self.set_point(at, ("vm::moving-memory", HELD_HALFWAY));
        let node = self.cluster.node(at);
        let options = ["vm", "memory", VM, "--to", "local"];
        let mut moving = node.godwit(&options).printing_json();
        let moving = moving.stdout(Stdio::null()).stderr(Stdio::null());
        let mut moving = moving.spawn().unwrap();
        self.most_is_local();
        strike(self);
        // The move has ended by then, or the node or QEMU is gone.
        moving.wait().unwrap();
    }

    fn moving_blow(&mut self, mover: Mover) {
        let (at, other) = (self.place(Side::Source), self.place(Side::Destination));
        println!("{mover:?} dies while memory moves at {at}");
        match mover {
            Mover::Node => {
                self.between_runs(|site| site.strike(SOURCE));
                assert_eq!(self.survived(), at);
                let (in_pool, all) = self.in_pool();
                assert!(0 < in_pool && in_pool < all, "{in_pool} of {all}");
            }
            Mover::NodeMidChunk => {
                let tries = [20, 90, 200].map(Duration::from_millis);
                let hits = tries.iter().filter(|delay| self.mid_chunk(**delay)).count();
                assert!(hits > 0, "no try met a move that was under way");
            }
            Mover::Qemu => self.between_runs(|site| site.strike(SOURCE_QEMU)),
            Mover::Other => {
                self.between_runs(|site| site.strike(DESTINATION));
                until("it goes on", || self.in_pool().0 == 0);
            }
            Mover::NodeAfterwards | Mover::QemuAfterwards => {
                assert!(self.memory_goes("local"));
                assert_eq!(self.in_pool().0, 0);
                let afterwards = mover == Mover::NodeAfterwards;
                self.strike(if afterwards { SOURCE } else { SOURCE_QEMU });
            }
        }
        if matches!(mover, Mover::Qemu | Mover::QemuAfterwards) {
            self.crashed(at);
            self.boot_again(at);
        } else {
            assert_eq!(self.survived(), at);
            assert!(self.memory_goes("pool"));
            self.guest.alive().unwrap();
        }
        self.owns_its_memory();
        // And all of the memory can be given away again.
        let from = self.cluster.node(at);
        let moved = self.guest.try_migrate(from, other, OPTIONS).unwrap();
        assert_eq!(moved["phase"], "completed", "{moved}");
        assert_eq!(self.survived(), other);
    }
}

/// Plays the blows selected by `pick` with the seed.
fn play(pick: impl FnOnce(usize) -> (Vec<Blow>, Vec<Mover>)) {
    let turn = Scenario::shared();
    let (blows, movers) = pick(usize::try_from(turn.seed).unwrap());
    let mut site = Site::pooled(turn.seed);
    site.guest.loads_on_memory_work().unwrap();
    for (moment, victim, outcome) in blows {
        site.blow(moment, victim, outcome);
        site.owns_its_memory();
    }
    for mover in movers {
        site.moving_blow(mover);
    }
    let at = site.cluster.node(site.place(Side::Source));
    println!("{:?}", site.guest.finish(at).unwrap());
    assert_eq!(site.guest.console.repeated(), 0);
    at.stop_vm(VM);
    let pool = site.pool.as_ref().unwrap();
    assert!(pool.is_empty().unwrap(), "the pool is free again");
}

/// A blow to a move and one while memory follows, picked by the seed: each seed below 180 gives another pair. The
/// default seed always gives the same pair, so that a change is not refused for an unrelated failure.
#[test]
fn a_guest_whose_memory_stays_survives_a_few_deaths() {
    play(|seed| {
        let mover = MOVERS[seed / BLOWS.len() % MOVERS.len()];
        (vec![BLOWS[seed % BLOWS.len()]], vec![mover])
    });
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=zero_copy"]
fn a_guest_whose_memory_stays_survives_each_death_of_a_move() {
    play(|_| (BLOWS.to_vec(), Vec::new()));
}

#[test]
#[ignore = "takes minutes: make test-slow ONLY=zero_copy"]
fn a_guest_survives_each_death_while_its_memory_follows() {
    play(|_| (Vec::new(), MOVERS.to_vec()));
}
