//! Explores every order of events of a protected machine that is checkpointed: work and packets of its guest, captures,
//! parts of checkpoints on two connections, acknowledgements, deaths of both hosts between any two steps, a link that ends
//! at any time, and requests to the witness that are lost, repeated and late.
//!
//! The nodes follow the rules of [`godwit_protect::checkpoints`].

mod node;
mod pair;

use stateright::{Checker, HasDiscoveries, Model};

use pair::{Pair, Planted};

const ONE_RELEASES: &str = "at most one node releases packets unasked";
const NOTHING_MISSES: &str = "the owner has every state that a client has seen";
const OF_ONE_CHECKPOINT: &str = "the owner's memory and disk are of one moment";

const RUNS_AGAIN: &str = "the machine runs again in the end";

const SMALL: Pair = Pair {
    works: 2,
    captures: 2,
    crashes: 1,
    cuts: 1,
    planted: Planted::Nothing,
};

fn holds_in_all_states(pair: Pair) -> impl Checker<Pair> {
    let checker = pair.checker().threads(2).spawn_bfs().join();
    println!(
        "{} states, depth {}",
        checker.unique_state_count(),
        checker.max_depth()
    );
    for property in [ONE_RELEASES, NOTHING_MISSES, OF_ONE_CHECKPOINT, RUNS_AGAIN] {
        checker.assert_no_discovery(property);
    }
    checker
}

/// Asserts that this property detects a defect planted into both nodes.
fn is_found(planted: Planted, property: &'static str) {
    let pair = Pair { planted, ..SMALL };
    let found = HasDiscoveries::AllOf([property].into());
    let checker = pair.checker().threads(2).finish_when(found);
    assert!(checker.spawn_bfs().join().discovery(property).is_some());
}

#[test]
fn clients_see_only_what_the_owner_has() {
    holds_in_all_states(SMALL).assert_properties();
}

#[test]
fn so_with_a_third_checkpoint() {
    holds_in_all_states(Pair {
        captures: 3,
        crashes: 0,
        ..SMALL
    });
}

#[test]
fn so_after_two_deaths() {
    holds_in_all_states(Pair {
        crashes: 2,
        cuts: 0,
        ..SMALL
    });
}

#[test]
fn packets_released_before_the_acknowledgement_are_found() {
    is_found(Planted::ReleasesEarly, NOTHING_MISSES);
}

#[test]
fn packets_held_only_once_paired_are_found() {
    is_found(Planted::HoldsLate, NOTHING_MISSES);
}

#[test]
fn a_capture_beside_an_open_request_is_found() {
    is_found(Planted::CapturesOpen, OF_ONE_CHECKPOINT);
}

#[test]
fn packets_that_leave_after_a_restart_are_found() {
    is_found(Planted::RestartReleases, ONE_RELEASES);
}

#[test]
fn a_pairing_before_the_first_whole_checkpoint_is_found() {
    is_found(Planted::PairsEarly, OF_ONE_CHECKPOINT);
}

#[test]
fn memory_ahead_of_the_disk_is_found() {
    is_found(Planted::MemoryAhead, OF_ONE_CHECKPOINT);
}

#[test]
fn a_disk_ahead_of_memory_is_found() {
    is_found(Planted::DiskAhead, OF_ONE_CHECKPOINT);
}

#[test]
fn kept_writes_that_are_dropped_early_are_found() {
    is_found(Planted::DropsEarly, OF_ONE_CHECKPOINT);
}

#[test]
fn an_old_primary_that_goes_on_is_found() {
    is_found(Planted::IgnoresEnd, ONE_RELEASES);
}

#[test]
fn a_primary_that_goes_on_without_asking_is_found() {
    is_found(Planted::GoesOn, ONE_RELEASES);
}

#[test]
fn a_witness_that_forgets_is_found() {
    is_found(Planted::StaleWitness, ONE_RELEASES);
}
