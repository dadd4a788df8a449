//! A small driver with planes that fail at each step, in each way, at either end. Each move comes to the end that its
//! step demands, and the subject runs there.

use godwit_move::{
    Act, Answer, Arrival, Course, Decider, Ending, Kind, Order, Outcome, Plane, Progress, Refusal,
    Started, Step, Subject, Word,
};

const SUBJECTS: [Subject; 4] = [
    Subject::Disk,
    Subject::Machine,
    Subject::Process,
    Subject::Container,
];

/// The way in which a plane fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Failure {
    /// The step is refused.
    Refused,
    /// The step is done, and no answer comes.
    Silent,
    /// The source's node dies in the middle of the step.
    SourceDies,
    /// The destination's node dies before the step.
    DestinationDies,
}

const FAILURES: [Failure; 4] = [
    Failure::Refused,
    Failure::Silent,
    Failure::SourceDies,
    Failure::DestinationDies,
];

/// Both ends of a move, and the place of the subject.
struct Driver {
    subject: Subject,
    course: Course,
    arrival: Option<Arrival>,
    here: bool,
    image: bool,
    there: bool,
    given: bool,
    taken: Vec<Step>,
}

fn why() -> Refusal {
    Refusal::new(Kind::Refused, "it failed")
}

impl Driver {
    fn new(subject: Subject, left_out: &[Step]) -> Self {
        Self {
            subject,
            course: Course::new(subject, left_out.iter().copied()),
            arrival: None,
            here: true,
            image: false,
            there: false,
            given: false,
            taken: Vec::new(),
        }
    }

    /// Lets the destination take an order. Returns true if the subject runs there.
    fn tell(&mut self, order: Order) -> bool {
        let decider = self.subject.decider();
        let Some(arrival) = &mut self.arrival else {
            return false;
        };
        let mut act = arrival.ordered(order, decider);
        loop {
            act = match act {
                Act::Start => {
                    self.there = true;
                    arrival.started(Started::Runs, decider)
                }
                Act::Look => arrival.looked(self.there, decider),
                Act::Clear => {
                    self.there = false;
                    arrival.cleared()
                }
                Act::Say(answer) => return answer == Answer::Here,
                Act::Forget | Act::Nothing => return false,
            };
        }
    }

    fn carry_out(&mut self, step: Step) -> Outcome {
        let decided = match (step, self.subject.decider()) {
            (Step::Decide, Decider::Destination) => Some(self.tell(Order::Run)),
            (Step::Settle, Decider::Destination) => Some(self.tell(Order::Settle)),
            (Step::Resume, Decider::Source) => Some(self.tell(Order::Word(Word::Given))),
            (Step::Decide, Decider::Source) => {
                self.given = true;
                Some(true)
            }
            (Step::Settle, Decider::Source) => Some(self.given),
            _ => None,
        };
        match step {
            Step::Copy(_) => {
                self.arrival.get_or_insert(Arrival::Coming);
            }
            Step::Send(_) => self.arrival = Some(Arrival::Coming),
            Step::Freeze(Plane::Image) => (self.here, self.image) = (false, true),
            Step::TakeBack(Plane::Image) => (self.here, self.image) = (self.image, false),
            _ => {}
        }
        match decided {
            Some(false) => Outcome::Failed(why()),
            _ => Outcome::Done,
        }
    }

    /// Takes one step, which fails in this way.
    fn fail(&mut self, failure: Failure) {
        let step = self.course.step();
        match failure {
            Failure::Refused => self.course.happened(Outcome::Failed(why())),
            Failure::Silent => {
                self.carry_out(step);
                // The node looks for the subject after a failure at the source.
                let died = step.needs_subject_here() && !self.here;
                let outcome = if died {
                    Outcome::Died
                } else {
                    Outcome::Unknown
                };
                self.course.happened(outcome(why()));
            }
            Failure::SourceDies => {
                self.carry_out(step);
                self.course.recover(self.here);
            }
            Failure::DestinationDies => {
                let decider = self.subject.decider();
                let act = self.arrival.map(|arrival| arrival.recover(decider));
                if act == Some(Act::Forget) {
                    self.arrival = None;
                }
                self.step();
            }
        }
    }

    fn step(&mut self) {
        let step = self.course.step();
        self.taken.push(step);
        let outcome = self.carry_out(step);
        self.course.happened(outcome);
    }

    fn run(&mut self) -> Ending {
        for _ in 0..100 {
            if let Some(ending) = self.course.ending() {
                if self.subject.decider() == Decider::Source {
                    // The destination asks until it knows.
                    self.tell(Order::Word(self.course.word()));
                }
                return ending;
            }
            self.step();
        }
        panic!("{:?} does not end: {:?}", self.subject, self.taken);
    }

    fn runs_where_it_is_said_to(&self, ending: &Ending) {
        match ending {
            Ending::Moved { .. } => assert!(self.there, "{:?}", self.course),
            Ending::Stayed { .. } => assert!(self.here && !self.there, "{:?}", self.course),
            Ending::Gone { .. } => panic!("it is lost: {:?}", self.course),
        }
    }
}

#[test]
fn a_move_without_failures_takes_its_steps() {
    for subject in SUBJECTS {
        let mut driver = Driver::new(subject, &[]);
        assert_eq!(driver.run(), Ending::Moved { lost: None });
        assert_eq!(driver.taken, subject.steps());
        assert_eq!(driver.course.word(), Word::Given);
    }
}

#[test]
fn steps_are_left_out() {
    let left_out = [Step::Copy(Plane::Memory), Step::Pull(Plane::Memory)];
    for subject in SUBJECTS {
        let mut driver = Driver::new(subject, &left_out);
        driver.run();
        let expected = subject.steps().iter().copied();
        let expected: Vec<Step> = expected.filter(|step| !left_out.contains(step)).collect();
        assert_eq!(driver.taken, expected);
        assert_eq!(
            driver.course.progress(Plane::Memory) >= Progress::Sending,
            subject == Subject::Machine
        );
    }
}

#[test]
fn planes_that_fail_at_each_step_lead_to_a_true_end() {
    for subject in SUBJECTS {
        for at in 0..subject.steps().len() {
            for failure in FAILURES {
                let mut driver = Driver::new(subject, &[]);
                for _ in 0..at {
                    driver.step();
                }
                driver.fail(failure);
                let ending = driver.run();
                driver.runs_where_it_is_said_to(&ending);
            }
        }
    }
}

#[test]
fn planes_that_fail_on_the_way_back_lose_no_subject() {
    for subject in SUBJECTS {
        let decides = subject
            .steps()
            .iter()
            .position(|step| *step == Step::Decide);
        for failure in [Failure::Silent, Failure::SourceDies] {
            for at in 0..5 {
                let mut driver = Driver::new(subject, &[]);
                for _ in 0..decides.unwrap() {
                    driver.step();
                }
                assert!(
                    driver
                        .course
                        .cancel(Refusal::new(Kind::Cancelled, "cancelled"))
                );
                assert_eq!(driver.course.word(), Word::Kept);
                for _ in 0..at {
                    driver.step();
                }
                let restores = driver.course.step() == Step::TakeBack(Plane::Image);
                if driver.course.step() != Step::End && !(restores && failure == Failure::Silent) {
                    driver.fail(failure);
                }
                let ending = driver.run();
                assert!(
                    matches!(&ending, Ending::Stayed { why, .. } if why.kind == Kind::Cancelled)
                );
                driver.runs_where_it_is_said_to(&ending);
            }
        }
    }
}

#[test]
fn a_step_is_tried_again_and_not_for_ever() {
    let mut driver = Driver::new(Subject::Process, &[]);
    while driver.course.step() != Step::Resume {
        driver.step();
    }
    for _ in 1..godwit_move::MAX_TRIES {
        driver.course.happened(Outcome::Unknown(why()));
        assert_eq!(driver.course.step(), Step::Resume);
    }
    driver.course.happened(Outcome::Unknown(why()));
    let lost = Some(String::from("it failed"));
    assert_eq!(driver.run(), Ending::Moved { lost });
}

#[test]
fn only_a_machine_that_may_run_is_given_its_memory() {
    let at_resume = || {
        let mut driver = Driver::new(Subject::Machine, &[]);
        while driver.course.step() != Step::Resume {
            driver.step();
        }
        driver.course
    };
    let mut refused = at_resume();
    refused.happened(Outcome::Failed(why()));
    let lost = Some(String::from("it failed"));
    assert_eq!(refused.ending(), Some(Ending::Moved { lost }));
    let mut silent = at_resume();
    for _ in 0..godwit_move::MAX_TRIES {
        silent.happened(Outcome::Unknown(why()));
    }
    assert_eq!(silent.step(), Step::Pull(Plane::Memory));
}

#[test]
fn in_doubt_the_subject_stands_still() {
    for subject in SUBJECTS {
        let mut driver = Driver::new(subject, &[]);
        while driver.course.step() != Step::Decide {
            driver.step();
        }
        for _ in 0..1000 {
            driver.course.happened(Outcome::Unknown(why()));
            assert_eq!(driver.course.step(), Step::Settle);
            assert_eq!(driver.course.word(), Word::Undecided);
            assert!(!driver.course.clone().cancel(why()));
        }
        driver.course.happened(Outcome::Failed(why()));
        assert!(matches!(driver.course.step(), Step::TakeBack(_)));
    }
}

#[test]
fn a_stored_course_goes_on_where_it_was() {
    let mut driver = Driver::new(Subject::Container, &[Step::Copy(Plane::Memory)]);
    while driver.course.step() != Step::Send(Plane::Image) {
        driver.step();
    }
    let stored = serde_json::to_vec(&driver.course).unwrap();
    let mut found: Course = serde_json::from_slice(&stored).unwrap();
    assert_eq!(found, driver.course);
    found.recover(false);
    assert_eq!(found.step(), Step::TakeBack(Plane::Image));
    let Some(Ending::Gone { why }) = ({
        found.happened(Outcome::Failed(why()));
        found.happened(Outcome::Done);
        found.ending()
    }) else {
        panic!("{found:?}");
    };
    let text = "the node ended while the process was moved; the process was not restored where it was either: it failed";
    assert_eq!(why.what, text);
}
