//! Checks every order of the steps of a move and of crashes, within bounds. The guest of a segment never runs twice,
//! and never without its memory or its disks. The worlds include VMs with and without disks, and memory partly in
//! QEMU's own memory. The model can fail: each planted break is found.

mod ownership;

use ownership::properties::{DISKS, ENDS, KEPT, ONCE, OWNER, WHOLE};
use ownership::{Broken, Move};
use stateright::{Checker, Model};

fn check(broken: Broken, has_disks: bool) -> impl Checker<Move> {
    Move { broken, has_disks }.checker().spawn_bfs().join()
}

#[test]
fn a_guest_never_runs_twice_on_one_memory() {
    for has_disks in [true, false] {
        let checker = check(Broken::Nothing, has_disks);
        println!(
            "disks: {has_disks}, {} states",
            checker.unique_state_count()
        );
        assert!(
            checker.unique_state_count() > 5000,
            "the bounds allow too little"
        );
        checker.assert_properties();
    }
}

/// Each break with the violated property, and true for a VM with disks.
const PLANTED: [(Broken, &str, bool); 15] = [
    (Broken::OffersWhatIsHalfMoved, WHOLE, false),
    (Broken::ForgetsWhatMoved, WHOLE, false),
    (Broken::MovesWhileOffered, WHOLE, false),
    (Broken::GivesWhatStillRuns, ONCE, false),
    (Broken::TitleFirst, ONCE, false),
    (Broken::TitleFirst, OWNER, true),
    (Broken::DisksFirst, DISKS, true),
    (Broken::TakesBackWhatIsGiven, ONCE, false),
    (Broken::TakesBackWhatIsGiven, DISKS, true),
    (Broken::GivesUpSilently, ENDS, true),
    (Broken::RunsWhenLoaded, ONCE, false),
    (Broken::RunsWithDisksAlone, OWNER, true),
    (Broken::RunsWithMemoryAlone, DISKS, true),
    (Broken::LeavesBeforeItIsDecided, KEPT, false),
    (Broken::RecoversWhatIsGiven, ONCE, false),
];

#[test]
fn each_broken_step_is_noticed() {
    for (broken, property, has_disks) in PLANTED {
        let found = check(broken, has_disks).discoveries();
        assert!(
            found.contains_key(property),
            "{broken:?}, disks: {has_disks}: '{property}' still holds; these do not: {:?}",
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
