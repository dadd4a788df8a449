//! A model of a move: a process, a partner and two nodes. Any step can fail, succeed without an answer, succeed by
//! half, or coincide with the death of a node or of the process. The model tries every order of up to three such
//! faults. The process never runs at two places, and the move's ending is always true.

mod world;

use super::{Ahead, Ending, Happened, Move, Step};
use world::World;

/// A fault during a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The step is refused.
    Refused,
    /// The step is not done, and no answer comes.
    Lost,
    /// The step is done, and no answer comes.
    Unheard,
    /// The half of the partner or of the destination is done, then the step fails.
    Half,
    /// The source's node dies before the step.
    DiesBefore,
    /// The source's node dies after the step.
    DiesAfter,
    /// The process at the source is killed.
    Killed,
    /// The step is done and reported as failed.
    Misreported,
    /// The step cannot be stored at first.
    NotStored,
    /// The step cannot be stored, and the source's node dies.
    NotStoredAndDies,
    /// The partner is released before the step, because no news of the move arrived.
    PartnerLetGo,
    /// The destination's node dies without having stored the answers of the step.
    DestinationDies,
}

const FAULTS: [Fault; 13] = [
    Fault::None,
    Fault::Refused,
    Fault::Lost,
    Fault::Unheard,
    Fault::Half,
    Fault::DiesBefore,
    Fault::DiesAfter,
    Fault::Killed,
    Fault::Misreported,
    Fault::NotStored,
    Fault::NotStoredAndDies,
    Fault::PartnerLetGo,
    Fault::DestinationDies,
];

/// Returns true if only the source's host takes part in the step, so that the outcome is always known.
fn local(step: Step) -> bool {
    matches!(
        step,
        Step::Release | Step::Dump | Step::BringBack | Step::RecreateHere
    )
}

fn try_step(world: &mut World, moving: &mut Move, fault: Fault) {
    world.touched |= moving.step() != Step::Wait;
    if matches!(fault, Fault::NotStored | Fault::NotStoredAndDies) {
        let goes_on = moving.unstored("it cannot be stored");
        if fault == Fault::NotStoredAndDies {
            if goes_on {
                let _unheard = world.carry_out(moving, false);
            }
            (*moving, world.told) = world.stored.clone();
            moving.recover(world.source.is_some());
            return;
        }
        if !goes_on {
            return;
        }
    } else {
        world.stored = (moving.clone(), world.told);
    }
    let step = moving.step();
    world.tried_back |= step == Step::BringBack;
    if fault == Fault::DestinationDies && step != Step::Recreate {
        // A holder ends with its node.
        world.held = false;
        world.forget_memory();
    }
    let mut happened = match fault {
        Fault::PartnerLetGo => {
            // The partner's prepared queue pairs are destroyed too.
            world.resume_partner();
            world.partner_goes_on();
            world
                .carry_out(moving, false)
                .map_or_else(Happened::Failed, |()| Happened::Done)
        }
        Fault::DestinationDies if step == Step::Recreate => {
            if world.recreated.is_none() {
                let _unheard = world.recreate(false, false);
                // The node stored that it asked the process, but not the process's answer.
                world.recreated = None;
            }
            world.held = false;
            Happened::Unknown("silence".to_owned())
        }
        Fault::DiesBefore => {
            world.held = false;
            world.forget_memory();
            moving.recover(world.source.is_some());
            return;
        }
        Fault::DiesAfter => {
            let told = world.told;
            let _unheard = world.carry_out(moving, false);
            // The source's node had not stored the answer.
            world.told = told;
            world.held = false;
            world.forget_memory();
            moving.recover(world.source.is_some());
            return;
        }
        Fault::Killed => {
            world.source = None;
            world
                .carry_out(moving, false)
                .map_or_else(Happened::Failed, |()| Happened::Done)
        }
        Fault::None | Fault::NotStored | Fault::NotStoredAndDies => world
            .carry_out(moving, false)
            .map_or_else(Happened::Failed, |()| Happened::Done),
        Fault::Half => world
            .carry_out(moving, true)
            .map_or_else(Happened::Failed, |()| Happened::Done),
        Fault::Refused if matches!(step, Step::Restore | Step::Settle) => {
            if world.settle() {
                Happened::Done
            } else {
                Happened::Failed("refused".to_owned())
            }
        }
        Fault::Refused => Happened::Failed("refused".to_owned()),
        // Reports of the destination about a restore, and of the source about a restore there, are true.
        Fault::Misreported if matches!(step, Step::Restore | Step::Settle | Step::BringBack) => {
            world
                .carry_out(moving, false)
                .map_or_else(Happened::Failed, |()| Happened::Done)
        }
        Fault::Misreported => {
            let _unheard = world.carry_out(moving, false);
            Happened::Failed("it failed after it was done".to_owned())
        }
        Fault::Lost | Fault::Unheard | Fault::DestinationDies if local(step) => world
            .carry_out(moving, false)
            .map_or_else(Happened::Failed, |()| Happened::Done),
        Fault::Lost | Fault::DestinationDies => Happened::Unknown("silence".to_owned()),
        Fault::Unheard => {
            let _unheard = world.carry_out(moving, false);
            Happened::Unknown("silence".to_owned())
        }
    };
    // After a failure at the source, the model checks whether the process has ended.
    let at_source = step.needs_process_here();
    if at_source
        && world.source.is_none()
        && matches!(happened, Happened::Failed(_) | Happened::Unknown(_))
    {
        happened = Happened::Died("the process has ended".to_owned());
    }
    moving.happened(happened);
}

fn explore(
    world: &World,
    moving: &Move,
    faults: usize,
    path: &mut Vec<(Step, Fault)>,
    ends: &mut u64,
) {
    assert!(path.len() < 200, "it does not end: {path:?}");
    if let Some(ending) = moving.ending() {
        *ends += 1;
        let judged = std::panic::catch_unwind(|| world.judge(&ending));
        assert!(judged.is_ok(), "{ending:?} after {path:?}");
        return;
    }
    for fault in FAULTS {
        if fault != Fault::None && faults == 0 {
            continue;
        }
        let (mut next, mut after) = (world.clone(), moving.clone());
        path.push((moving.step(), fault));
        try_step(&mut next, &mut after, fault);
        next.partner_goes_on();
        next.runs_at_one_place_at_most();
        let left = if fault == Fault::None {
            faults
        } else {
            faults - 1
        };
        explore(&next, &after, left, path, ends);
        path.pop();
    }
}

const NOTHING: Ahead = Ahead {
    memory: false,
    objects: false,
};
const MEMORY: Ahead = Ahead {
    memory: true,
    ..NOTHING
};
const OBJECTS: Ahead = Ahead {
    objects: true,
    ..NOTHING
};
const ALL: Ahead = Ahead {
    memory: true,
    objects: true,
};

#[test]
fn the_process_runs_at_one_place_and_what_is_said_of_it_is_true() {
    for moving in [NOTHING, OBJECTS, ALL].map(Move::with) {
        let mut ends = 0;
        explore(&World::new(), &moving, 3, &mut Vec::new(), &mut ends);
        assert!(ends > 10_000, "{ends} ends");
    }
}

#[test]
fn a_move_without_faults_takes_the_steps_in_order() {
    use Step::*;
    let all = [
        Wait, PreCopy, PreSetup, Suspend, Drain, Release, Dump, Send, Restore, Recreate, Connect,
        Resume,
    ];
    for ahead in [NOTHING, OBJECTS, MEMORY, ALL] {
        let left_out = |step| match step {
            PreCopy => !ahead.memory,
            PreSetup => !ahead.objects,
            _ => false,
        };
        let expected: Vec<Step> = all.into_iter().filter(|step| !left_out(*step)).collect();
        let (mut world, mut moving, mut steps) = (World::new(), Move::with(ahead), Vec::new());
        while moving.step() != End {
            steps.push(moving.step());
            try_step(&mut world, &mut moving, Fault::None);
        }
        assert_eq!(steps, expected);
        assert_eq!(moving.ending(), Some(Ending::Moved { lost: None }));
    }
}

#[test]
fn a_move_goes_on_without_what_was_not_made_ahead() {
    for fault in [Fault::Refused, Fault::Lost, Fault::Unheard, Fault::Half] {
        let (mut world, mut moving) = (World::new(), Move::with(ALL));
        for fault in [Fault::None, fault, fault] {
            try_step(&mut world, &mut moving, fault);
        }
        assert_eq!(moving.step(), Step::Suspend);
        while moving.step() != Step::End {
            try_step(&mut world, &mut moving, Fault::None);
        }
        assert_eq!(moving.ending(), Some(Ending::Moved { lost: None }));
        world.judge(&Ending::Moved { lost: None });
        assert!(!world.held && !world.prepared, "{fault:?}: {world:?}");
        assert!(!world.image_needs_memory, "{fault:?}: {world:?}");
    }
}

#[test]
fn a_move_is_cancelled_until_the_destination_was_told_to_restore() {
    let (mut world, mut moving) = (World::new(), Move::with(ALL));
    loop {
        let (mut there, mut cancelled) = (world.clone(), moving.clone());
        let could = cancelled.cancel("cancelled");
        assert_eq!(could, moving.step().cancellable());
        while cancelled.step() != Step::End {
            try_step(&mut there, &mut cancelled, Fault::None);
        }
        let stayed = Ending::Stayed {
            why: "cancelled".to_owned(),
            lost: None,
        };
        let ending = cancelled.ending().unwrap();
        assert_eq!(ending == stayed, could, "{ending:?}");
        there.judge(&ending);
        if moving.step() == Step::End {
            return;
        }
        try_step(&mut world, &mut moving, Fault::None);
    }
}

#[test]
fn in_doubt_the_process_stays_in_its_image() {
    let mut moving = Move::default();
    for _ in 0..6 {
        moving.happened(Happened::Done);
    }
    assert_eq!(moving.step(), Step::Restore);
    for _ in 0..1000 {
        moving.happened(Happened::Unknown("silence".to_owned()));
        assert_eq!(moving.step(), Step::Settle);
    }
    moving.happened(Happened::Failed("it does not run there".to_owned()));
    assert_eq!(moving.step(), Step::BringBack);
}
