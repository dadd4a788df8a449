//! Explores every order of events of the authority protocol on two nodes: messages lost, repeated and reordered,
//! crashes between any two steps, cancels, and the disk coming back.

mod model;

use stateright::{Checker, Model};

use model::{Leaves, Planted, TwoNodes};

/// Asserts that this property detects a step planted into a migration with these leftovers.
fn is_found((leaves, planted): (Leaves, Planted), property: &'static str) {
    let found = check(TwoNodes {
        migrations: 1,
        leaves: [leaves, Leaves::Nothing],
        planted,
    });
    assert!(found.discovery(property).is_some());
}

fn check(nodes: TwoNodes) -> impl Checker<TwoNodes> {
    nodes.checker().threads(2).spawn_bfs().join()
}

fn holds_in_all_states(checker: impl Checker<TwoNodes>) {
    println!(
        "{} states, depth {}",
        checker.unique_state_count(),
        checker.max_depth()
    );
    checker.assert_properties();
}

#[test]
fn no_state_has_two_owners_or_a_doubt_that_cannot_be_resolved() {
    holds_in_all_states(check(TwoNodes {
        migrations: 2,
        leaves: [Leaves::Nothing; 2],
        planted: Planted::Nothing,
    }));
}

#[test]
fn what_a_node_lacks_is_kept_for_it_until_it_has_come() {
    holds_in_all_states(check(TwoNodes {
        migrations: 2,
        leaves: [Leaves::APart, Leaves::Nothing],
        planted: Planted::Nothing,
    }));
}

#[test]
fn a_disk_that_leaves_without_its_image_fetches_that_wherever_it_is() {
    for leaves in [Leaves::ItsImage, Leaves::ItsImageAndAPart] {
        for back in [Leaves::ItsImage, Leaves::Nothing] {
            holds_in_all_states(check(TwoNodes {
                migrations: 2,
                leaves: [leaves, back],
                planted: Planted::Nothing,
            }));
        }
    }
}

/// Two owners, caused by a record put back, are told apart at any moment.
#[test]
fn of_two_owners_one_is_surpassed() {
    let found = check(TwoNodes {
        migrations: 1,
        leaves: [Leaves::Nothing; 2],
        planted: Planted::PutBack,
    });
    assert!(found.discovery("at most one owner").is_some());
    assert!(found.discovery("of two owners one is surpassed").is_none());
}

#[test]
fn a_debt_beside_an_image_that_is_said_to_be_paid_too_early_is_found() {
    is_found(
        (Leaves::ItsImageAndAPart, Planted::RepaidEarly),
        "what a node lacks is kept for it",
    );
}

#[test]
fn a_disk_that_leaves_without_its_image_as_if_that_were_whole_is_found() {
    is_found(
        (Leaves::ItsImage, Planted::ImageForgotten),
        "an owner that has not what is in its image fetches it",
    );
}

#[test]
fn a_debt_that_is_forgotten_is_found() {
    is_found(
        (Leaves::APart, Planted::DebtForgotten),
        "what a node lacks is kept for it",
    );
}

#[test]
fn serving_on_after_an_acceptance_that_was_not_stored_is_found() {
    is_found(
        (Leaves::Nothing, Planted::AcceptedNotStored),
        "every doubt can be resolved",
    );
}

#[test]
fn an_acceptance_of_what_was_not_flushed_is_found() {
    is_found(
        (Leaves::Nothing, Planted::NotFlushed),
        "whoever owns the disk has flushed it",
    );
}

#[test]
fn committing_before_the_relinquishment_is_stored_is_found() {
    is_found(
        (Leaves::Nothing, Planted::RelinquishedNotStored),
        "at most one owner",
    );
}
