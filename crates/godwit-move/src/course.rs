//! The source's end: the order of the steps, and the fate of the subject after a failure or a death.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::message::Word;
use crate::refusal::{Kind, Refusal};
use crate::subject::{Plane, Progress, Step, Subject};

/// Most attempts at a repeatable step with an unknown outcome.
pub const MAX_TRIES: u32 = 20;

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Success. For [`Step::Decide`] and [`Step::Settle`]: the subject belongs to the destination.
    Done,
    /// Failure. For [`Step::Decide`] and [`Step::Settle`]: the subject does not belong to the destination, and never
    /// will by this move.
    Failed(Refusal),
    /// No answer: the step may be done now or later.
    Unknown(Refusal),
    /// The subject at the source has ended by itself.
    Died(Refusal),
}

/// The ending of a move.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// The subject runs at the destination.
    Moved {
        /// The parts that do not work, and the reasons; absent if all work.
        lost: Option<String>,
    },
    /// The subject runs at the source.
    Stayed {
        /// The reason why the subject did not move.
        why: Refusal,
        /// The parts that do not work, and the reasons; absent if all work.
        lost: Option<String>,
    },
    /// The subject runs nowhere.
    Gone {
        /// The reasons why the subject neither moved nor goes on at the source.
        why: Refusal,
    },
}

/// The place of the subject, as far as decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Place {
    Here,
    There,
    Nowhere,
}

/// The course of one move, as the source's node keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Course {
    subject: Subject,
    step: Step,
    /// The steps that this move does without.
    left_out: BTreeSet<Step>,
    /// The furthest point of each plane.
    planes: BTreeMap<Plane, Progress>,
    place: Place,
    /// The reason for the way back.
    why: Option<Refusal>,
    /// The parts that do not work any more.
    lost: Option<String>,
    /// True if a node that died had begun the present [`Step::TakeBack`].
    interrupted: bool,
    tries: u32,
}

impl Course {
    /// Returns a new course without these steps: [`Step::Copy`] of planes that are not copied ahead, [`Step::Pull`] of
    /// planes that are whole at the destination by then.
    pub fn new(subject: Subject, left_out: impl IntoIterator<Item = Step>) -> Self {
        Self {
            subject,
            step: Step::Prepare,
            left_out: left_out.into_iter().collect(),
            planes: BTreeMap::new(),
            place: Place::Here,
            why: None,
            lost: None,
            interrupted: false,
            tries: 0,
        }
    }

    /// Returns the course of a move of which a node that died has stored the decision alone: `given` is true if the
    /// source gave the subject away, `lives` if the subject exists at the source. Only where the source decides.
    pub fn found(
        subject: Subject,
        left_out: impl IntoIterator<Item = Step>,
        given: bool,
        lives: bool,
    ) -> Self {
        let mut course = Self::new(subject, left_out);
        // Each plane may have come as far as a plane can before the decision.
        let steps = subject
            .steps()
            .split_inclusive(|step| *step == Step::Decide);
        steps.take(1).flatten().for_each(|step| course.go(*step));
        match (given, lives) {
            (true, _) => course.done(),
            (false, true) => course.turn_back(course.interrupted()),
            (false, false) => course.lose(course.interrupted_and_ended()),
        }
        course
    }

    /// Returns the current step.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Returns the furthest point that the plane has reached. The destination may have lost a copy since.
    pub fn progress(&self, plane: Plane) -> Progress {
        self.planes.get(&plane).copied().unwrap_or_default()
    }

    /// Returns true if a node that died had begun the present [`Step::TakeBack`]: the step may be done in part.
    pub fn was_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Returns the word of the stored course, for a destination that asks a source that decides.
    pub fn word(&self) -> Word {
        match (self.place, self.step) {
            (Place::There, _) => Word::Given,
            (_, Step::TakeBack(_) | Step::ResumeHere | Step::LetGo | Step::End) => Word::Kept,
            _ => Word::Undecided,
        }
    }

    /// Returns the ending of a finished move.
    pub fn ending(&self) -> Option<Ending> {
        let why = || {
            let unknown = || Refusal::new(Kind::Refused, "the reason is not known");
            self.why.clone().unwrap_or_else(unknown)
        };
        let lost = self.lost.clone();
        (self.step == Step::End).then(|| match self.place {
            Place::There => Ending::Moved { lost },
            Place::Here => Ending::Stayed { why: why(), lost },
            Place::Nowhere => Ending::Gone { why: why() },
        })
    }

    /// Cancels the move if no point of no return has passed, and lets the subject go on at the source. Returns true if
    /// the move was cancelled.
    pub fn cancel(&mut self, why: Refusal) -> bool {
        let can = self.step.cancellable();
        if can {
            self.turn_back(why);
        }
        can
    }

    /// Reacts to a failure to store the course: after a death, the node would continue from the stored course. Cancels
    /// the move if possible. Returns true if the current step may be carried out nevertheless; otherwise the course must
    /// be stored first.
    pub fn unstored(&mut self, why: &str) -> bool {
        self.cancel(Refusal::new(Kind::NotStored, why));
        // Repeating these steps is harmless, and nobody must wait for a disk that is full.
        matches!(self.step, Step::ResumeHere | Step::LetGo)
    }

    /// Continues after the death of the source's node, from the course stored before [`Course::step`] began. `lives` is
    /// true if the subject exists at the source.
    pub fn recover(&mut self, lives: bool) {
        match self.step {
            Step::Prepare if lives => self.back(Step::End, self.interrupted()),
            Step::Copy(_) | Step::Stop | Step::Drain | Step::Freeze(_) | Step::Send(_) if lives => {
                // The image of a subject that still runs is never used.
                let progress = |plane| match plane {
                    Plane::Image => Progress::Untouched,
                    plane => self.progress(plane),
                };
                let first = self.subject.way_back(progress);
                self.back(first, self.interrupted());
            }
            Step::Freeze(_) | Step::Send(_)
                if self.progress(Plane::Image) >= Progress::Freezing =>
            {
                self.back(Step::TakeBack(Plane::Image), self.interrupted());
            }
            // The subject may have been restored from the image already.
            Step::TakeBack(Plane::Image) if lives => self.go(self.next()),
            Step::TakeBack(Plane::Image) => {}
            Step::Decide => self.go(Step::Settle),
            step if step.needs_subject_here() && !lives => {
                self.lose(self.interrupted_and_ended());
            }
            Step::Send(_) => self.lose(self.interrupted_and_ended()),
            Step::TakeBack(_) => self.interrupted = true,
            Step::Prepare
            | Step::Copy(_)
            | Step::Stop
            | Step::Drain
            | Step::Freeze(_)
            | Step::Settle
            | Step::TakeUp(_)
            | Step::Resume
            | Step::Pull(_)
            | Step::ResumeHere
            | Step::LetGo
            | Step::End => {}
        }
    }

    fn interrupted(&self) -> Refusal {
        let noun = self.subject.noun();
        let text = format!("the node ended while the {noun} was moved");
        Refusal::new(Kind::Interrupted, text)
    }

    fn interrupted_and_ended(&self) -> Refusal {
        let Refusal { kind, what, .. } = self.interrupted();
        let text = format!("{what}, and the {} has ended", self.subject.noun());
        Refusal::new(kind, text)
    }

    /// Records the outcome of the step and goes to the next step.
    pub fn happened(&mut self, outcome: Outcome) {
        self.tries += 1;
        match outcome {
            Outcome::Done => self.done(),
            Outcome::Failed(why) => self.failed(why),
            Outcome::Unknown(why) => self.unknown(why),
            Outcome::Died(why) => self.died(why),
        }
    }

    fn done(&mut self) {
        match self.step {
            Step::Copy(plane) => self.reach(plane, Progress::Copied),
            Step::Freeze(plane) => self.reach(plane, Progress::Frozen),
            Step::Send(plane) => self.reach(plane, Progress::Sent),
            Step::Decide | Step::Settle => self.place = Place::There,
            _ => {}
        }
        self.go(self.next());
    }

    fn failed(&mut self, why: Refusal) {
        match self.step {
            Step::Copy(_) if self.subject.moves_without_copies() => self.go(self.next()),
            Step::Prepare
            | Step::Copy(_)
            | Step::Stop
            | Step::Drain
            | Step::Freeze(_)
            | Step::Send(_)
            | Step::Decide
            | Step::Settle => self.turn_back(why),
            Step::TakeUp(_) => {
                // The subject has run at the destination, so the state at the source is outdated.
                self.lacks(why);
                self.go(Step::LetGo);
            }
            Step::TakeBack(Plane::Image) => {
                let noun = self.subject.noun();
                let what = format!(
                    "the {noun} was not restored where it was either: {}",
                    why.what
                );
                self.lose(Refusal { what, ..why });
            }
            Step::TakeBack(plane) => {
                self.lacks(why);
                self.go(self.subject.after_take_back(plane, false));
            }
            Step::Resume => {
                // Memory has no use for a subject that does not run.
                self.left_out.insert(Step::Pull(Plane::Memory));
                self.lacks(why);
                self.go(self.next());
            }
            Step::Pull(_) | Step::ResumeHere | Step::LetGo => {
                self.lacks(why);
                self.go(self.next());
            }
            Step::End => {}
        }
    }

    fn unknown(&mut self, why: Refusal) {
        match self.step {
            // The subject is started only on request, and the request was sent.
            Step::Decide => self.go(Step::Settle),
            // In doubt the subject stands still. The rest of a plane is kept until the destination has it.
            Step::Settle | Step::Pull(_) => {}
            step if step.repeatable() && self.tries < MAX_TRIES => {}
            // The subject may run, and need the rest of its memory.
            Step::Resume => {
                self.lacks(why);
                self.go(self.next());
            }
            _ => self.failed(why),
        }
    }

    fn died(&mut self, why: Refusal) {
        match self.step {
            Step::Decide
            | Step::Settle
            | Step::TakeUp(_)
            | Step::Resume
            | Step::Pull(_)
            | Step::LetGo
            | Step::End => {}
            // A dump ends the subject last, so the image may be complete even if the dump was reported as failed.
            Step::Freeze(Plane::Image) => self.back(Step::TakeBack(Plane::Image), why),
            Step::Prepare
            | Step::Copy(_)
            | Step::Stop
            | Step::Drain
            | Step::Freeze(_)
            | Step::Send(_)
            | Step::TakeBack(_)
            | Step::ResumeHere => self.lose(why),
        }
    }

    /// Returns the step after the present one is done.
    fn next(&self) -> Step {
        let present = match self.step {
            Step::TakeBack(plane) => return self.subject.after_take_back(plane, true),
            Step::ResumeHere | Step::LetGo | Step::End => return Step::End,
            Step::Settle => Step::Decide,
            step => step,
        };
        let mut steps = self.subject.steps().iter();
        let _earlier = steps.find(|step| **step == present);
        let next = steps.find(|step| !self.left_out.contains(step));
        next.copied().unwrap_or(Step::End)
    }

    fn reach(&mut self, plane: Plane, progress: Progress) {
        let reached = self.planes.entry(plane).or_default();
        *reached = progress.max(*reached);
    }

    fn go(&mut self, step: Step) {
        match step {
            Step::Copy(plane) => self.reach(plane, Progress::Copying),
            Step::Freeze(plane) => self.reach(plane, Progress::Freezing),
            Step::Send(plane) => self.reach(plane, Progress::Sending),
            _ => {}
        }
        self.step = step;
        self.interrupted = false;
        self.tries = 0;
    }

    fn back(&mut self, step: Step, why: Refusal) {
        self.why = Some(why);
        self.go(step);
    }

    /// Takes the way back from a step that was not done or does not matter.
    fn turn_back(&mut self, why: Refusal) {
        let first = match self.step {
            // Nothing was changed, so there is nothing to undo.
            Step::Prepare => Step::End,
            _ => self.subject.way_back(|plane| self.progress(plane)),
        };
        self.back(first, why);
    }

    fn lacks(&mut self, why: Refusal) {
        self.lost = Some(match self.lost.take() {
            Some(lost) => format!("{lost}; {}", why.what),
            None => why.what,
        });
    }

    fn lose(&mut self, why: Refusal) {
        self.place = Place::Nowhere;
        let next = match self.step {
            Step::Prepare => Step::End,
            _ => Step::LetGo,
        };
        let why = why.after(self.why.take());
        self.back(next, why);
    }
}
