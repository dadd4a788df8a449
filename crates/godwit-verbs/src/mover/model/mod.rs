//! A model of a move: a process, a partner and two nodes. Any step can fail, succeed without an answer, succeed by
//! half, or coincide with the death of a node or of the process. The model tries every order of up to three such
//! faults. The process never runs at two places, and the move's ending is always true.

mod world;

use godwit_move::{Course, Ending, Kind, Outcome, Plane, Refusal, Step, Subject};

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
        Step::Freeze(_) | Step::TakeBack(Plane::Image | Plane::Objects)
    )
}

fn refusal(what: &str) -> Refusal {
    Refusal::new(Kind::Refused, what)
}

fn failed(why: String) -> Outcome {
    Outcome::Failed(refusal(&why))
}

fn silence() -> Outcome {
    Outcome::Unknown(Refusal::new(Kind::Unreachable, "silence"))
}

/// The store refuses the step. Returns true if the step is carried out nevertheless.
fn refuse_to_store(world: &mut World, moving: &mut Course, fault: Fault) -> bool {
    let goes_on = moving.unstored("it cannot be stored");
    if fault != Fault::NotStoredAndDies {
        return goes_on;
    }
    if goes_on {
        let _unheard = world.carry_out(moving, false);
    }
    (*moving, world.told) = world.stored.clone();
    moving.recover(world.source.is_some());
    false
}

/// Carries out the step with this fault. Returns `None` if the source's node dies.
fn carry_out(world: &mut World, moving: &Course, fault: Fault) -> Option<Outcome> {
    let step = moving.step();
    let decides = matches!(step, Step::Decide | Step::Settle);
    match fault {
        Fault::DiesBefore => return None,
        Fault::DiesAfter => {
            let told = world.told;
            let _unheard = world.carry_out(moving, false);
            // The source's node had not stored the answer.
            world.told = told;
            return None;
        }
        Fault::PartnerLetGo => {
            // The partner's prepared queue pairs are destroyed too.
            world.resume_partner();
            world.partner_goes_on();
        }
        Fault::Killed => world.source = None,
        Fault::DestinationDies if step == Step::TakeUp(Plane::Objects) => {
            if world.recreated.is_none() {
                let _unheard = world.recreate(false, false);
                // The node stored that it asked the process, but not the process's answer.
                world.recreated = None;
            }
            world.held = false;
            return Some(silence());
        }
        Fault::Refused if decides && world.settle() => return Some(Outcome::Done),
        Fault::Refused => return Some(failed("refused".to_owned())),
        Fault::Lost | Fault::DestinationDies if !local(step) => return Some(silence()),
        Fault::Unheard if !local(step) => {
            let _unheard = world.carry_out(moving, false);
            return Some(silence());
        }
        // Reports of the destination about a restore, and of the source about a restore there, are true.
        Fault::Misreported if !decides && step != Step::TakeBack(Plane::Image) => {
            let _unheard = world.carry_out(moving, false);
            return Some(failed("it failed after it was done".to_owned()));
        }
        _ => {}
    }
    let done = world.carry_out(moving, fault == Fault::Half);
    Some(done.map_or_else(failed, |()| Outcome::Done))
}

fn try_step(world: &mut World, moving: &mut Course, fault: Fault) {
    world.touched |= moving.step() != Step::Prepare;
    if !matches!(fault, Fault::NotStored | Fault::NotStoredAndDies) {
        world.stored = (moving.clone(), world.told);
    } else if !refuse_to_store(world, moving, fault) {
        return;
    }
    let step = moving.step();
    world.tried_back |= step == Step::TakeBack(Plane::Image);
    if fault == Fault::DestinationDies && step != Step::TakeUp(Plane::Objects) {
        // A holder ends with its node.
        world.held = false;
        world.forget_memory();
    }
    let Some(mut outcome) = carry_out(world, moving, fault) else {
        world.held = false;
        world.forget_memory();
        moving.recover(world.source.is_some());
        return;
    };
    // After a failure at the source, the model checks whether the process has ended.
    if step.needs_subject_here()
        && world.source.is_none()
        && matches!(outcome, Outcome::Failed(_) | Outcome::Unknown(_))
    {
        outcome = Outcome::Died(Refusal::new(Kind::Ended, "the process has ended"));
    }
    moving.happened(outcome);
}

fn explore(
    world: &World,
    moving: &Course,
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

const MEMORY: Step = Step::Copy(Plane::Memory);
const OBJECTS: Step = Step::Copy(Plane::Objects);

/// Returns the course of a process's move without these steps.
fn without(left_out: &[Step]) -> Course {
    Course::new(Subject::Process, left_out.iter().copied())
}

#[test]
fn the_process_runs_at_one_place_and_what_is_said_of_it_is_true() {
    for left_out in [[MEMORY, OBJECTS].as_slice(), &[MEMORY], &[]] {
        let mut ends = 0;
        explore(
            &World::new(),
            &without(left_out),
            3,
            &mut Vec::new(),
            &mut ends,
        );
        assert!(ends > 10_000, "{ends} ends");
    }
}

#[test]
fn a_move_without_faults_takes_the_steps_in_order() {
    let all = Subject::Process.steps().iter().copied();
    for left_out in [[MEMORY, OBJECTS].as_slice(), &[MEMORY], &[OBJECTS], &[]] {
        let expected: Vec<Step> = all
            .clone()
            .filter(|step| !left_out.contains(step))
            .collect();
        let (mut world, mut moving, mut steps) = (World::new(), without(left_out), Vec::new());
        while moving.step() != Step::End {
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
        let (mut world, mut moving) = (World::new(), without(&[]));
        for fault in [Fault::None, fault, fault] {
            try_step(&mut world, &mut moving, fault);
        }
        assert_eq!(moving.step(), Step::Stop);
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
    let (mut world, mut moving) = (World::new(), without(&[]));
    loop {
        let (mut there, mut cancelled) = (world.clone(), moving.clone());
        let could = cancelled.cancel(Refusal::new(Kind::Cancelled, "cancelled"));
        assert_eq!(could, moving.step().cancellable());
        while cancelled.step() != Step::End {
            try_step(&mut there, &mut cancelled, Fault::None);
        }
        let stayed = Ending::Stayed {
            why: Refusal::new(Kind::Cancelled, "cancelled"),
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
