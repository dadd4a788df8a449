//! Every order of the steps of two nodes that allocate segments of one device, and of crashes between any two of them, in
//! bounds: no two segments share memory or a name, no guest finds what another one left, and what a dead node had begun is
//! free when it is back. The model can fail: each break that is planted in one of its steps is found.

mod allocation;

use std::collections::BTreeSet;

use allocation::{APART, Allocations, BOTH, Broken, CLEAN, KEPT, NOT_BOTH, TIDY};
use stateright::{Checker, CheckerBuilder, HasDiscoveries, Model};

fn check(broken: Broken, same_name: bool, size: u64) -> CheckerBuilder<Allocations> {
    let model = Allocations {
        broken,
        same_name,
        size,
    };
    model.checker()
}

/// Machines of the same name and of others, on a device that has room for both and on one that has not.
const WORLDS: [(bool, u64); 3] = [(false, 1), (false, 2), (true, 1)];

#[test]
fn two_nodes_that_allocate_at_once_never_share_memory_or_a_name() {
    for (same_name, size) in WORLDS {
        let checker = check(Broken::Nothing, same_name, size).spawn_bfs().join();
        println!(
            "same name: {same_name}, {size} of 3 units each: {} states",
            checker.unique_state_count()
        );
        assert!(
            checker.unique_state_count() > 10_000,
            "the bounds allow too little"
        );
        for property in [APART, CLEAN, KEPT, TIDY] {
            checker.assert_no_discovery(property);
        }
        let both = checker.discovery(BOTH).is_some();
        assert_eq!(both, !same_name && size == 1, "both have what they want");
        assert!(checker.discovery(NOT_BOTH).is_some());
    }
}

/// Each break with the property that says so, and in which world.
const PLANTED: [(Broken, &str, (bool, u64)); 9] = [
    (Broken::LooksFirst, APART, (false, 2)),
    (Broken::LooksFirst, APART, (true, 1)),
    (Broken::MindsOnlyWhatIsTaken, APART, (false, 2)),
    (Broken::TakesInsteadOfWaiting, APART, (false, 2)),
    (Broken::HoldsBeforeItWipes, CLEAN, (false, 2)),
    (Broken::WipesNothing, CLEAN, (false, 2)),
    (Broken::ClearsWhatIsAnothers, APART, (false, 2)),
    (Broken::ClearsNothing, TIDY, (false, 1)),
    (Broken::ClaimsWhatIsNotFree, KEPT, (false, 1)),
];

#[test]
fn each_broken_step_is_noticed() {
    for (broken, property, (same_name, size)) in PLANTED {
        // No further than to what is looked for.
        let enough = HasDiscoveries::AnyOf(BTreeSet::from([property]));
        let checker = check(broken, same_name, size).finish_when(enough);
        let found = checker.spawn_bfs().join().discoveries();
        assert!(
            found.contains_key(property),
            "{broken:?}: '{property}' still holds; these do not: {:?}",
            found.keys().collect::<Vec<_>>()
        );
    }
}

#[test]
fn no_break_is_forgotten() {
    for broken in Broken::ALL {
        assert!(
            PLANTED.iter().any(|(planted, ..)| *planted == broken),
            "{broken:?} is not tried"
        );
    }
}
