//! Checks every order of the steps of two nodes that allocate segments of one device, with crashes between any two
//! steps, within bounds. No two segments share memory or a name, no guest finds another guest's data, and a dead node's
//! claims are free once the node is back. The model can fail: each planted break is found.

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

/// VMs of the same name or of different names, on a device with room for both or for one.
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

/// Each break with the violated property, and the world of the violation.
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
        // Stops at the first violation.
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
