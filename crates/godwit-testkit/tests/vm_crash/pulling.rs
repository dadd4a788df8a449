//! Deaths while the guest runs at the destination and the rest of the memory is at the source: both QEMUs live on, and
//! so does the guest.

use std::time::Duration;

use godwit_testkit::process::wait_for;
use godwit_testkit::scenario::{PATIENCE, Scenario, says};
use serde_json::Value;

use super::site::{Side, Site};
use super::{AWAY, HOLD, PASS, Victim};

/// The held side, the fail point, and the action.
type Hold = (Side, &'static str, &'static str);

/// A rate at which the rest of the memory takes some seconds.
const OPTIONS: &[&str] = &["--memory", "post-copy", "--max-bandwidth", "8MiB"];
/// Moment after the command to run the guest.
const RUNS: Hold = (Side::Source, "vm::before::quit", PASS);
/// Moment before the command to run the guest.
const ABOUT_TO_RUN: Hold = (Side::Destination, "vm::before::run", HOLD);
/// Longer than either node waits for a sign of life.
const SILENCE: Duration = Duration::from_secs(12);
/// Also long enough for some of the memory to follow.
const SETTLE: Duration = Duration::from_millis(500);

impl Site {
    /// Begins a move and waits until the guest runs and the memory follows. Returns the move's id.
    fn pull(&mut self, hold: Hold) -> String {
        self.move_up_to(hold, OPTIONS);
        std::thread::sleep(SETTLE);
        let known = self.known_moves().unwrap();
        let found = known.last().expect("a move");
        assert_eq!(found["phase"], "pulling_memory", "{found}");
        let left = found["memory"]["bytes_left"].as_u64().unwrap();
        assert!(left > 4 << 20, "too little is left: {found}");
        found["id"].as_str().unwrap().to_owned()
    }

    /// Returns the moves of machines known to the source, in the format of the API.
    fn known_moves(&self) -> std::io::Result<Vec<Value>> {
        let node = self.cluster.node(self.place(Side::Source));
        let body = node.get("/v1/migrations")?;
        let mut moves: Vec<Value> = serde_json::from_str(&body)?;
        moves.retain(|shown| shown["kind"] == "vm");
        Ok(moves)
    }

    /// Waits until the guest is at the destination with all of the memory, and goes on there.
    fn has_pulled(&mut self, id: &str) -> Value {
        let ended = || {
            let mut moves = self.known_moves().ok()?.into_iter();
            moves.find(|shown| shown["id"] == id && !shown["ended_at"].is_null())
        };
        let shown = wait_for(PATIENCE, ended).expect("the move ends");
        println!("{shown}");
        assert_eq!(shown["phase"], "completed", "{shown}");
        let to = self.place(Side::Destination);
        assert_eq!(self.survived(), to);
        shown
    }
}

fn survives(hold: Hold, strike: impl FnMut(&mut Site)) {
    let (_turn, site) = survives_at(hold, strike);
    site.finish();
}

/// Runs a scenario after which the guest is at the source again.
fn survives_at(hold: Hold, mut strike: impl FnMut(&mut Site)) -> (Scenario, Site) {
    let turn = Scenario::shared();
    let mut site = Site::new(turn.seed, 1);
    let id = site.pull(hold);
    strike(&mut site);
    let shown = site.has_pulled(&id);
    says(
        &shown["warnings"].to_string(),
        &["the memory's connection broke"],
    );
    // Nothing of this move is in the way of another.
    site.moves();
    (turn, site)
}

#[test]
fn a_cut_link_delays_the_rest_of_the_memory() {
    survives(RUNS, |site| {
        site.strike(Victim::Link);
        // Once more, while both agree on the missing pages or just after.
        std::thread::sleep(SETTLE);
        site.strike(Victim::Link);
    });
}

#[test]
fn a_silent_link_delays_the_rest_of_the_memory() {
    survives(RUNS, |site| {
        site.fall_silent();
        std::thread::sleep(SILENCE);
        site.heal();
    });
}

#[test]
fn a_source_that_died_goes_on_giving_memory() {
    survives(RUNS, |site| site.strike(Victim::Node(Side::Source)));
}

/// Kills the destination, which has to go on pulling memory.
fn destination_dies(hold: Hold) {
    let mut seen = 0;
    let (_turn, site) = survives_at(hold, |site| {
        seen = site.log_length("b");
        site.strike(Victim::Node(Side::Destination));
    });
    waits_for_memory(&site.log_since("b", seen));
    site.finish();
}

#[test]
fn a_destination_that_died_goes_on_pulling_memory() {
    destination_dies(RUNS);
}

#[test]
fn a_destination_that_dies_before_it_lets_the_guest_run_pulls_its_memory() {
    destination_dies(ABOUT_TO_RUN);
}

/// Expects a restarted node to read the guest's memory only after all of it has arrived.
fn waits_for_memory(log: &str) {
    let whole = log.find("all of the VM's memory is here");
    let attached = log.find("virtual machine attached");
    let whole = whole.expect("all of it comes");
    assert!(attached.is_some_and(|attached| attached > whole), "{log}");
}

#[test]
fn nodes_that_end_in_order_go_on_with_the_memory() {
    survives(RUNS, |site| {
        for side in [Side::Destination, Side::Source] {
            let name = site.place(side);
            site.cluster.node_mut(name).terminate(PATIENCE).unwrap();
            std::thread::sleep(AWAY);
            site.start_node(name);
            std::thread::sleep(SETTLE);
        }
    });
}
