//! Explores every order of events of a move: steps that fail, succeed without an answer or are reported falsely; deaths
//! of both nodes and of the subject; messages lost, repeated and reordered; a cancel at any time.

mod world;

use godwit_move::{Act, Answer, Decider, Order, Plane, Started, Step, Subject};
use stateright::{Checker, Model, Property};

use world::{How, Left, Planted, World};

struct Move {
    subject: Subject,
    /// The steps that the course does without.
    left_out: Vec<Step>,
    /// True if the source stores the decision alone, and no step.
    decision_alone: bool,
    faults: u8,
    planted: Planted,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Event {
    Write,
    Step(How),
    NotStored,
    Cancel,
    Kill,
    SourceDies,
    SourceRestarts,
    TimeOut,
    Hear(Answer),
    TakeOrder(Order),
    Act(Started),
    DestinationDies { started: bool },
    DestinationRestarts,
    DestinationAsks,
}

const HOWS: [How; 7] = [
    How::Done,
    How::Refused,
    How::Misreported,
    How::Lost,
    How::Unheard,
    How::DiesBefore,
    How::DiesAfter,
];

impl Move {
    fn of_source(&self, world: &World, events: &mut Vec<Event>) {
        let faulty = world.left.faults > 0;
        if !world.source_lives {
            events.push(Event::SourceRestarts);
            return;
        }
        events.extend(world.link.answers.iter().copied().map(Event::Hear));
        if world.finished {
            return;
        }
        let step = world.course.step();
        let falsely = |how: &How| match how {
            How::Done => true,
            // The end that decides reports the decision truly, and a restore at the source its outcome.
            How::Misreported => !matches!(
                step,
                Step::Decide | Step::Settle | Step::TakeBack(Plane::Image) | Step::Pull(_)
            ),
            // A refused pull would be a rest that is gone already, and a subject that refuses to go on has ended.
            How::Refused => !matches!(step, Step::Settle | Step::Pull(_) | Step::ResumeHere),
            // The host itself always knows the outcome.
            How::Lost | How::Unheard => {
                !matches!(step, Step::Freeze(_) | Step::Settle | Step::TakeBack(_))
            }
            How::DiesBefore | How::DiesAfter => true,
        };
        let of_order = |how: &How| matches!(how, How::Done | How::DiesBefore);
        let hows = HOWS.into_iter().filter(|how| {
            (faulty || *how == How::Done)
                && falsely(how)
                && (world.order().is_none() || of_order(how))
                && (step != Step::End || *how == How::Done)
        });
        events.extend(hows.map(Event::Step));
        if faulty {
            events.push(Event::SourceDies);
            // The source stores and cancels between steps.
            let order = world.order();
            if !order.is_some_and(|order| world.link.orders.contains(&order)) {
                events.extend([Event::NotStored, Event::Cancel]);
            }
            if world.is_mortal() {
                events.push(Event::Kill);
            }
            if world.order().is_some() {
                events.push(Event::TimeOut);
            }
        }
    }

    fn of_destination(&self, world: &World, events: &mut Vec<Event>) {
        let faulty = world.left.faults > 0;
        if !world.destination_lives {
            events.push(Event::DestinationRestarts);
            return;
        }
        if world.act == Act::Nothing {
            events.extend(world.link.orders.iter().copied().map(Event::TakeOrder));
            if world.may_ask() {
                events.push(Event::DestinationAsks);
            }
        } else {
            events.push(Event::Act(Started::Runs));
        }
        if faulty {
            events.push(Event::DestinationDies { started: false });
            if world.act == Act::Start {
                events.push(Event::Act(Started::Nothing));
                events.push(Event::Act(Started::Rest));
                events.push(Event::DestinationDies { started: true });
            }
        }
    }
}

impl Model for Move {
    type State = World;
    type Action = Event;

    fn init_states(&self) -> Vec<World> {
        let left = Left {
            faults: self.faults,
            writes: 2,
        };
        let (left_out, alone) = (&self.left_out, self.decision_alone);
        vec![World::new(self.subject, left_out, alone, left)]
    }

    fn actions(&self, world: &World, events: &mut Vec<Event>) {
        self.of_source(world, events);
        self.of_destination(world, events);
        if world.left.writes > 0 && world.can_write() {
            events.push(Event::Write);
        }
    }

    fn next_state(&self, last: &World, event: Event) -> Option<World> {
        let (mut world, planted) = (last.clone(), self.planted);
        let happens = matches!(
            event,
            Event::Write
                | Event::Step(How::Done)
                | Event::Act(Started::Runs)
                | Event::SourceRestarts
                | Event::DestinationRestarts
                | Event::DestinationAsks
                | Event::Hear(_)
                | Event::TakeOrder(_)
        );
        world.left.faults -= u8::from(!happens);
        match event {
            Event::Write => world.write(),
            Event::Step(how) => world.step(how, planted),
            Event::NotStored => world.refuse_to_store(planted),
            Event::Cancel => world.cancel(),
            Event::Kill => world.kill(),
            Event::SourceDies => world.source_lives = false,
            Event::SourceRestarts => world.restart_source(),
            Event::TimeOut => world.time_out(planted),
            Event::Hear(answer) => world.hear(answer),
            Event::TakeOrder(order) => world.take_order(order, planted),
            Event::Act(outcome) => world.act(outcome, planted),
            Event::DestinationDies { started } => world.kill_destination(started),
            Event::DestinationRestarts => world.restart_destination(),
            Event::DestinationAsks => world.look_again(),
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(TWO, |_: &Move, world: &World| world.running() <= 1),
            Property::always(LOST, |_: &Move, world: &World| world.keeps_writes()),
            Property::always(CANCELLED, |_: &Move, world: &World| world.cancel_holds()),
            Property::always(RECOVERS, |of: &Move, world: &World| {
                world.resolves(of.planted)
            }),
        ]
    }
}

const TWO: &str = "the subject runs at one place at most";
const LOST: &str = "no acknowledged state is lost";
const CANCELLED: &str = "a cancelled move leaves the subject at the source";
const RECOVERS: &str = "once both ends and the link live, the subject runs, and the ending is true";

fn check(of: Move) -> impl Checker<Move> {
    of.checker().threads(2).spawn_bfs().join()
}

/// Leaves out no step, or all steps that a course may leave out.
fn courses(subject: Subject) -> [Vec<Step>; 2] {
    let steps = subject.steps().iter().copied();
    let may_go = steps.filter(|step| matches!(step, Step::Copy(_) | Step::Pull(_)));
    [Vec::new(), may_go.collect()]
}

#[test]
fn every_order_of_faults_ends_well() {
    let mut broken = Vec::new();
    for (subject, decision_alone) in [
        (Subject::Disk, false),
        (Subject::Machine, false),
        (Subject::Machine, true),
        (Subject::Process, false),
    ] {
        for left_out in courses(subject) {
            let checked = check(Move {
                subject,
                left_out,
                decision_alone,
                faults: 2,
                planted: Planted::Nothing,
            });
            println!("{subject:?}: {} states", checked.unique_state_count());
            let found = checked.discoveries().into_iter();
            broken.extend(found.map(|(property, path)| (subject, property, path.into_actions())));
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn a_container_moves_like_a_process() {
    assert_eq!(Subject::Container.steps(), Subject::Process.steps());
    assert_eq!(Subject::Container.decider(), Decider::Destination);
}

fn is_found(subject: Subject, planted: Planted, property: &'static str) {
    is_found_in(subject, false, planted, property);
}

fn is_found_in(subject: Subject, decision_alone: bool, planted: Planted, property: &'static str) {
    let found = check(Move {
        subject,
        left_out: Vec::new(),
        decision_alone,
        faults: 2,
        planted,
    });
    assert!(found.discovery(property).is_some(), "{planted:?}");
}

#[test]
fn doubt_taken_for_a_refusal_is_found() {
    is_found(Subject::Process, Planted::DoubtIsNo, TWO);
}

#[test]
fn doubt_that_is_given_up_is_found() {
    is_found(Subject::Process, Planted::DoubtGivesUp, RECOVERS);
}

#[test]
fn a_start_before_it_is_stored_is_found() {
    is_found(Subject::Process, Planted::StartNotStored, TWO);
}

#[test]
fn a_rest_that_is_not_cleared_is_found() {
    is_found(Subject::Process, Planted::RestNotCleared, TWO);
}

#[test]
fn a_handover_told_before_it_is_stored_is_found() {
    is_found(Subject::Machine, Planted::GivenNotStored, TWO);
    is_found_in(Subject::Machine, true, Planted::GivenNotStored, TWO);
}

#[test]
fn a_rest_released_too_early_is_found() {
    is_found(Subject::Disk, Planted::RestReleased, LOST);
}
