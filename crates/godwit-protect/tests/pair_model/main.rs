//! Explores every order of events of a protected machine with one disk: writes, synchronizations, crashes of both nodes
//! between any two steps, a link that ends at any time, and requests to the witness that are lost, repeated and late.

mod pair;

use stateright::{Checker, Model};

use pair::{Pair, Planted};

fn check(pair: Pair) -> impl Checker<Pair> {
    pair.checker().threads(2).spawn_bfs().join()
}

fn holds_in_all_states(pair: Pair) {
    let checker = check(pair);
    println!(
        "{} states, depth {}",
        checker.unique_state_count(),
        checker.max_depth()
    );
    checker.assert_properties();
}

/// Asserts that this property detects a defect planted into both nodes.
fn is_found(planted: Planted, property: &'static str) {
    let found = check(Pair {
        writes: 1,
        crashes: 1,
        cuts: 1,
        planted,
    });
    assert!(found.discovery(property).is_some());
}

#[test]
fn one_node_acknowledges_and_has_every_acknowledged_write() {
    holds_in_all_states(Pair {
        writes: 2,
        crashes: 1,
        cuts: 1,
        planted: Planted::Nothing,
    });
}

#[test]
fn so_after_two_deaths() {
    holds_in_all_states(Pair {
        writes: 1,
        crashes: 2,
        cuts: 1,
        planted: Planted::Nothing,
    });
}

#[test]
fn a_primary_that_goes_on_without_asking_is_found() {
    is_found(Planted::GoesOn, "at most one node acknowledges");
}

#[test]
fn a_backup_that_takes_over_without_asking_is_found() {
    is_found(Planted::TakesUnasked, "at most one node acknowledges");
}

#[test]
fn a_backup_that_asks_before_it_has_everything_is_found() {
    is_found(
        Planted::TakesUnsynced,
        "an owner has every acknowledged write",
    );
}

#[test]
fn an_acknowledgement_before_the_backup_has_the_write_is_found() {
    is_found(
        Planted::AcknowledgesEarly,
        "an owner has every acknowledged write",
    );
}

#[test]
fn a_witness_that_forgets_is_found() {
    is_found(Planted::StaleWitness, "at most one node acknowledges");
}

#[test]
fn a_pairing_that_is_not_stored_first_is_found() {
    is_found(Planted::PairingNotStored, "at most one node acknowledges");
}

#[test]
fn a_grant_that_a_restarted_backup_keeps_is_found() {
    is_found(Planted::KeepsGrant, "the machine runs again in the end");
}
