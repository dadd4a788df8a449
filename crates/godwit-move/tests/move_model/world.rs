//! The state of both nodes, of the link and of the subject, and the effect of each step.

use std::collections::BTreeSet;

use godwit_move::{
    Act, Answer, Arrival, Course, Decider, Ending, Kind, Order, Outcome, Plane, Refusal, Started,
    Step, Subject, Word,
};

/// A defect of a node, to prove that the model finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    Nothing,
    /// The source takes a missing answer to [`Order::Run`] for a refusal.
    DoubtIsNo,
    /// The source gives up asking for the decision.
    DoubtGivesUp,
    /// The destination starts the subject before storing that it does.
    StartNotStored,
    /// The destination leaves what a failed start has left.
    RestNotCleared,
    /// The source tells the destination that it gave the subject away before storing that.
    GivenNotStored,
    /// The source releases the rest of the memory before the destination has it.
    RestReleased,
}

/// The subject where it exists.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Guest {
    /// Number of the subject's acknowledged changes.
    writes: u8,
    /// True while the subject exists and does not run.
    still: bool,
    /// True if only a part of the subject runs, which acknowledges nothing.
    part: bool,
}

impl Guest {
    fn of(writes: u8) -> Self {
        Self {
            writes,
            still: false,
            part: false,
        }
    }
}

/// The faults that may still happen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Left {
    pub(crate) faults: u8,
    pub(crate) writes: u8,
}

/// How a step of the source goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum How {
    Done,
    /// The step is not done.
    Refused,
    /// The step is done and reported as failed.
    Misreported,
    /// The step is not done, and no answer comes.
    Lost,
    /// The step is done, and no answer comes.
    Unheard,
    /// The node dies once it has stored the step.
    DiesBefore,
    /// The node dies after the step.
    DiesAfter,
}

/// Messages stay on the link for ever once sent: delivery at any time, again, or never, covers loss, repetition and
/// reordering.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Link {
    pub(crate) orders: BTreeSet<Order>,
    pub(crate) answers: BTreeSet<Answer>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    subject: Subject,
    pub(crate) course: Course,
    stored: Course,
    /// True if the source stores the decision alone, and no step.
    decision_alone: bool,
    pub(crate) source_lives: bool,
    pub(crate) source: Option<Guest>,
    image: Option<u8>,
    /// True once the source has stored that it gave the subject away.
    given: bool,
    /// True if a part of the state follows the subject.
    pulls: bool,
    /// True while this part is only at the source.
    owed: bool,
    /// True once the source's node has released all of the move.
    pub(crate) finished: bool,
    /// The state at the destination: complete, except for an owed part.
    sent: Option<u8>,
    arrival: Option<Arrival>,
    stored_arrival: Option<Arrival>,
    pub(crate) act: Act,
    pub(crate) destination_lives: bool,
    pub(crate) there: Option<Guest>,
    pub(crate) link: Link,
    acknowledged: u8,
    /// True if the subject was killed, or could not be restored.
    ended: bool,
    cancelled: bool,
    pub(crate) left: Left,
}

fn why() -> Refusal {
    Refusal::new(Kind::Refused, "as the model wants it")
}

impl World {
    pub(crate) fn new(
        subject: Subject,
        left_out: &[Step],
        decision_alone: bool,
        left: Left,
    ) -> Self {
        let course = Course::new(subject, left_out.iter().copied());
        Self {
            subject,
            stored: course.clone(),
            course,
            decision_alone,
            source_lives: true,
            source: Some(Guest::of(0)),
            image: None,
            given: false,
            pulls: matches!(subject.decider(), Decider::Source) && left_out.is_empty(),
            owed: false,
            finished: false,
            sent: None,
            arrival: None,
            stored_arrival: None,
            act: Act::Nothing,
            destination_lives: true,
            there: None,
            link: Link::default(),
            acknowledged: 0,
            ended: false,
            cancelled: false,
            left,
        }
    }

    fn decider(&self) -> Decider {
        self.subject.decider()
    }

    /// Returns the order by which the source carries out the present step, if the step is up to the destination.
    pub(crate) fn order(&self) -> Option<Order> {
        match (self.course.step(), self.decider()) {
            (Step::Decide, Decider::Destination) => Some(Order::Run),
            (Step::Settle, Decider::Destination) => Some(Order::Settle),
            (Step::Resume, Decider::Source) => Some(Order::Word(Word::Given)),
            _ => None,
        }
    }

    fn guests(&mut self) -> impl Iterator<Item = &mut Guest> {
        let all = self.source.iter_mut().chain(self.there.iter_mut());
        all.filter(|guest| !guest.still)
    }

    pub(crate) fn write(&mut self) {
        self.left.writes -= 1;
        self.acknowledged += 1;
        let whole = self.guests().filter(|guest| !guest.part);
        whole.for_each(|guest| guest.writes += 1);
    }

    /// Returns the number of places where the subject runs.
    pub(crate) fn running(&self) -> usize {
        self.clone().guests().count()
    }

    /// Returns true if the subject has its acknowledged changes wherever it runs.
    pub(crate) fn keeps_writes(&self) -> bool {
        let lost = self.owed && self.finished;
        let known = self.acknowledged;
        let knows = |guest: &mut Guest| guest.part || guest.writes == known;
        self.clone().guests().all(knows) && !lost
    }

    /// Returns true if the whole subject runs.
    pub(crate) fn can_write(&self) -> bool {
        self.clone().guests().any(|guest| !guest.part)
    }

    pub(crate) fn cancel_holds(&self) -> bool {
        !self.cancelled || self.there.is_none()
    }

    /// Carries out a local step. Returns false if the step fails.
    fn carry_out(&mut self, step: Step, planted: Planted) -> bool {
        if step.needs_subject_here() && self.source.is_none() {
            return false;
        }
        match step {
            Step::Stop if self.decider() == Decider::Source => self.still(true),
            Step::ResumeHere => self.still(false),
            Step::Freeze(Plane::Image) => self.image = self.source.take().map(|guest| guest.writes),
            Step::Drain | Step::Send(_) => {
                let still = self.source.iter().find(|guest| guest.still);
                let state = self.image.or(still.map(|guest| guest.writes));
                if state.is_none() {
                    return step == Step::Drain;
                }
                self.sent = state;
                self.arrival.get_or_insert(Arrival::Coming);
                self.stored_arrival = self.arrival;
            }
            Step::Decide => {
                let sent = self.sent.is_some();
                self.given = sent && planted != Planted::GivenNotStored;
                self.owed = self.pulls;
                return sent;
            }
            Step::Settle => return self.given,
            Step::Pull(_) => self.owed = planted == Planted::RestReleased,
            Step::TakeBack(Plane::Image) if self.source.is_none() => {
                self.source = self.image.map(Guest::of);
                return self.source.is_some();
            }
            _ => {}
        }
        true
    }

    fn still(&mut self, still: bool) {
        if let Some(guest) = &mut self.source {
            guest.still = still;
        }
    }

    /// Takes a step of the source, after storing it.
    pub(crate) fn step(&mut self, how: How, planted: Planted) {
        let step = self.course.step();
        let gives = planted == Planted::GivenNotStored && step == Step::Resume;
        if !gives {
            self.stored = self.course.clone();
        }
        if step == Step::End {
            return self.finish();
        }
        if how == How::DiesBefore {
            self.source_lives = false;
            return;
        }
        if let Some(order) = self.order() {
            self.link.orders.insert(order);
            return;
        }
        let outcome = match how {
            How::Refused => Outcome::Failed(why()),
            How::Lost => Outcome::Unknown(why()),
            How::Done | How::Misreported | How::Unheard | How::DiesBefore | How::DiesAfter => {
                match (self.carry_out(step, planted), how) {
                    (true, How::Misreported) => Outcome::Failed(why()),
                    (true, How::Unheard) => Outcome::Unknown(why()),
                    (true, _) => Outcome::Done,
                    (false, _) => Outcome::Failed(why()),
                }
            }
        };
        self.ended |= step == Step::TakeBack(Plane::Image) && outcome != Outcome::Done;
        if how == How::DiesAfter {
            self.source_lives = false;
            return;
        }
        self.report(outcome);
    }

    fn report(&mut self, outcome: Outcome) {
        let fails = matches!(outcome, Outcome::Failed(_) | Outcome::Unknown(_));
        let died = self.course.step().needs_subject_here() && self.source.is_none();
        self.course.happened(if fails && died {
            Outcome::Died(why())
        } else {
            outcome
        });
    }

    fn finish(&mut self) {
        self.finished = true;
        self.link.orders.insert(Order::Over);
        if matches!(self.course.ending(), Some(Ending::Moved { .. })) {
            self.source = None;
        }
    }

    /// The store refuses the present step.
    pub(crate) fn refuse_to_store(&mut self, planted: Planted) {
        if self.course.unstored("full") {
            let done = self.carry_out(self.course.step(), planted);
            self.report(match done {
                true => Outcome::Done,
                false => Outcome::Failed(why()),
            });
        }
    }

    pub(crate) fn cancel(&mut self) {
        self.cancelled = self
            .course
            .cancel(Refusal::new(Kind::Cancelled, "cancelled"));
    }

    pub(crate) fn kill(&mut self) {
        (self.source, self.ended) = (None, true);
    }

    /// Returns true if the subject can be killed during the move with nothing but itself lost: a source that gave it
    /// away keeps no more than its memory.
    pub(crate) fn is_mortal(&self) -> bool {
        let under_way = !matches!(self.course.step(), Step::Prepare | Step::End);
        self.source.is_some() && !self.given && under_way
    }

    pub(crate) fn restart_source(&mut self) {
        self.source_lives = true;
        let lives = self.source.is_some();
        if self.decision_alone && !self.finished {
            let pull = self.subject.steps().last().copied();
            let left_out = pull.filter(|_| !self.pulls);
            self.course = Course::found(self.subject, left_out, self.given, lives);
            return;
        }
        self.course = self.stored.clone();
        if !self.finished {
            self.course.recover(lives);
        }
    }

    /// Returns the word of what the source has stored.
    fn word(&self) -> Word {
        match (self.given, self.finished) {
            _ if !self.decision_alone => self.stored.word(),
            (true, _) => Word::Given,
            (false, true) => Word::Kept,
            (false, false) => Word::Undecided,
        }
    }

    /// The source waits no longer for an answer.
    pub(crate) fn time_out(&mut self, planted: Planted) {
        match (planted, self.course.step()) {
            (Planted::DoubtIsNo, Step::Decide) => self.report(Outcome::Failed(why())),
            (Planted::DoubtGivesUp, Step::Settle) => {
                self.course = Course::new(self.subject, []);
                self.course.cancel(why());
            }
            _ => self.report(Outcome::Unknown(why())),
        }
    }

    pub(crate) fn hear(&mut self, answer: Answer) {
        let waits = self.order();
        match (answer, waits) {
            (Answer::Ask, _) => {
                self.link.orders.insert(Order::Word(self.word()));
            }
            (Answer::Here, Some(_)) => self.report(Outcome::Done),
            (Answer::NotHere, Some(Order::Run | Order::Settle)) => {
                self.report(Outcome::Failed(why()));
            }
            (Answer::Here | Answer::NotHere, _) => {}
        }
    }

    pub(crate) fn take_order(&mut self, order: Order, planted: Planted) {
        let decider = self.decider();
        let Some(arrival) = &mut self.arrival else {
            if decider == Decider::Destination && order != Order::Over {
                self.link.answers.insert(Answer::NotHere);
            }
            return;
        };
        self.act = arrival.ordered(order, decider);
        if planted != Planted::StartNotStored || self.act != Act::Start {
            self.stored_arrival = self.arrival;
        }
    }

    /// Carries out the destination's act. `outcome` is the outcome of a start.
    pub(crate) fn act(&mut self, outcome: Started, planted: Planted) {
        let decider = self.decider();
        let Some(arrival) = &mut self.arrival else {
            self.act = Act::Nothing;
            return;
        };
        let next = match self.act {
            Act::Nothing => Act::Nothing,
            Act::Start => {
                if outcome != Started::Nothing {
                    let part = outcome == Started::Rest && decider == Decider::Destination;
                    let guest = self.sent.map(Guest::of);
                    self.there = guest.map(|guest| Guest { part, ..guest });
                }
                let next = arrival.started(outcome, decider);
                self.stored_arrival = self.arrival;
                next
            }
            Act::Look => arrival.looked(self.there.is_some(), decider),
            Act::Clear => {
                if planted != Planted::RestNotCleared {
                    self.there = None;
                }
                arrival.cleared()
            }
            Act::Say(answer) => {
                self.link.answers.insert(answer);
                Act::Nothing
            }
            Act::Forget => {
                (self.arrival, self.sent) = (None, None);
                Act::Nothing
            }
        };
        self.stored_arrival = self.arrival;
        self.act = next;
    }

    /// The destination's node dies. `started` is true if a start under way succeeds before.
    pub(crate) fn kill_destination(&mut self, started: bool) {
        if started && self.act == Act::Start {
            self.there = self.sent.map(Guest::of);
        }
        (self.destination_lives, self.act) = (false, Act::Nothing);
    }

    pub(crate) fn restart_destination(&mut self) {
        self.destination_lives = true;
        self.arrival = self.stored_arrival;
        self.look_again();
    }

    /// The destination is reminded of an undecided arrival: by a restart, a lost connection or a clock.
    pub(crate) fn look_again(&mut self) {
        if let Some(arrival) = self.arrival {
            self.act = arrival.recover(self.decider());
        }
    }

    /// Returns true if the destination may ask a source that decides.
    pub(crate) fn may_ask(&self) -> bool {
        let open = matches!(self.arrival, Some(Arrival::Coming | Arrival::Starting));
        self.decider() == Decider::Source && open && self.act == Act::Nothing
    }

    /// Returns true if the move comes to a true end once the nodes and the link live and no step fails.
    pub(crate) fn resolves(&self, planted: Planted) -> bool {
        let mut world = self.clone();
        if !world.source_lives {
            world.restart_source();
        }
        if !world.destination_lives {
            world.restart_destination();
        }
        for _ in 0..80 {
            world.link = Link::default();
            if !world.finished {
                world.step(How::Done, planted);
            }
            if world.may_ask() {
                world.look_again();
            }
            world.talk(planted);
            if world.finished && world.is_true_end() {
                return true;
            }
        }
        false
    }

    /// Lets both ends tell each other all that they have to say.
    fn talk(&mut self, planted: Planted) {
        while self.act != Act::Nothing
            || !(self.link.orders.is_empty() && self.link.answers.is_empty())
        {
            while self.act != Act::Nothing {
                self.act(Started::Runs, planted);
            }
            if let Some(order) = self.link.orders.pop_first() {
                self.take_order(order, planted);
            } else if let Some(answer) = self.link.answers.pop_first() {
                self.hear(answer);
            }
        }
    }

    /// Returns true if the ending is true, and the subject runs unless it was ended.
    fn is_true_end(&self) -> bool {
        let runs = |guest: &Option<Guest>| guest.as_ref().is_some_and(|guest| !guest.still);
        let one = self.running() == 1 && self.keeps_writes();
        match self.course.ending() {
            Some(Ending::Moved { .. }) => one && runs(&self.there),
            Some(Ending::Stayed { .. }) => one && runs(&self.source),
            Some(Ending::Gone { .. }) => self.running() == 0 && self.ended,
            None => false,
        }
    }
}
