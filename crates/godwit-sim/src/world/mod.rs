//! Two hosts in virtual time around the real controllers.

mod agenda;
mod body;
mod checks;
mod course;
mod disks;
mod faults;
mod guest;
mod images;
pub(crate) mod measuring;
mod node;
mod operator;
mod protection;
mod wires;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;

use godwit_core::Limits;
use godwit_core::authority::AuthorityRecord;

use self::agenda::Agenda;
use self::checks::authority::Epochs;
use self::course::Course;
use self::guest::Guest;
use self::measuring::Thought;
use self::node::Node;
use self::protection::Protection;
use self::wires::network::Network;
use crate::bug::{BodyBug, Bug};
use crate::history::History;
use crate::plan::{MigrationPlan, Plan};
use crate::random::Random;
use crate::run::coverage::{Coverage, Reached};

pub(crate) const LIMITS: Limits = Limits {
    requests: 32,
    window_chunks: 8,
    delayed_chunks: 4,
    delayed_ranges: 16,
    hot_places: 4,
    area_sectors: 64,
    active_areas: 2,
};

/// Number of steps above which the run of a seed counts as endless.
pub(crate) const MOST_STEPS: u64 = 2_000_000;

/// Most calls in a row for a controller to complete due work.
const MOST_RESTLESS: u32 = 20;

const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000_000;

/// A violated invariant.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The invariant, always in the same words.
    pub claim: &'static str,
    /// The state that violates the invariant.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "violates: {}\n  {}", self.claim, self.detail)
    }
}

/// The outcome of a run.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) violation: Option<Violation>,
    pub(crate) coverage: Coverage,
    /// Hash of all events in the run.
    pub(crate) fingerprint: u64,
}

/// The last events of a traced run. The trace outlives a run that panics.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    lines: Rc<RefCell<VecDeque<String>>>,
    most: usize,
}

impl Trace {
    /// Keeps the last `most` lines.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            lines: Rc::default(),
            most,
        }
    }

    fn push(&self, line: String) {
        let mut lines = self.lines.borrow_mut();
        if lines.len() == self.most {
            lines.pop_front();
        }
        lines.push_back(line);
    }

    pub(crate) fn take(&self) -> Vec<String> {
        self.lines.take().into()
    }
}

/// The random numbers of each part of a run.
struct Streams {
    disk: Random,
    link: Random,
    store: Random,
    fault: Random,
    delta: Random,
    image: Random,
}

impl Streams {
    fn new(seed: u64) -> Self {
        let stream = |part| Random::stream(seed, part);
        Self {
            disk: stream(2),
            link: stream(3),
            store: stream(4),
            fault: stream(5),
            delta: stream(9),
            image: stream(10),
        }
    }
}

pub(crate) struct World {
    now: u64,
    plan: Plan,
    nodes: [Node; 2],
    network: Network,
    guest: Guest,
    history: History,
    epochs: Epochs,
    course: Course,
    /// Occurrences of each fault's moment.
    moments: Vec<u32>,
    settling: bool,
    agenda: Agenda,
    random: Streams,
    /// Number of session names given to forwarders.
    forward_sessions: u64,
    steps: u64,
    protection: Option<Protection>,
    /// Review state of a policy chosen by the node.
    thought: Thought,
    /// Consecutive times of a controller being due again at once.
    restless: u32,
    outcome: Outcome,
    trace: Option<Trace>,
    bug: Option<Bug>,
}

impl World {
    pub(crate) fn new(plan: Plan, trace: Option<Trace>, bug: Option<Bug>) -> Self {
        let node = |index: usize, record| Node::new(&plan, index, record);
        let mut world = Self {
            now: 1,
            nodes: [
                node(0, AuthorityRecord::created()),
                node(1, AuthorityRecord::vacant()),
            ],
            network: Network::new(plan.link),
            guest: Guest::new(plan.seed, plan.guest.depth),
            history: History::new(plan.sectors),
            epochs: Epochs::default(),
            course: Course::default(),
            moments: vec![0; plan.faults.len()],
            settling: false,
            agenda: Agenda::default(),
            random: Streams::new(plan.seed),
            forward_sessions: 0,
            steps: 0,
            protection: plan
                .protection
                .as_ref()
                .map(|protection| Protection::new(plan.seed, protection)),
            thought: Thought::default(),
            restless: 0,
            outcome: Outcome::default(),
            trace,
            bug,
            plan,
        };
        if world.plan.image.is_some() {
            world.create_from_image();
        }
        for node in 0..2 {
            world.start_controller(node);
        }
        world
    }

    /// Runs to the end, or to the first violation.
    pub(crate) fn run(mut self) -> Outcome {
        self.start_guest();
        self.start_faults();
        self.schedule(1, Self::operate);
        self.schedule(1, Self::sample);
        self.start_protection();
        self.run_until(self.plan.load);
        if self.holds() {
            self.settle();
        }
        self.outcome
    }

    /// Runs until this time, or to the first violation.
    fn run_until(&mut self, end: u64) {
        while self.holds() && self.step(end) {}
    }

    fn schedule(&mut self, delay: u64, event: impl FnOnce(&mut Self) + 'static) {
        self.agenda.add(self.now + delay.max(1), Box::new(event));
    }

    /// Schedules an event of the node's process; void once the process has ended.
    fn schedule_own(&mut self, node: usize, delay: u64, event: impl FnOnce(&mut Self) + 'static) {
        let incarnation = self.nodes[node].incarnation;
        self.schedule(delay, move |world| {
            if world.nodes[node].incarnation == incarnation {
                event(world);
            }
        });
    }

    /// Advances to the next event, or to a deadline of a controller. Returns false if there is none before
    /// `until`.
    fn step(&mut self, until: u64) -> bool {
        self.steps += 1;
        let most = self.plan.most_steps;
        if self.steps > most {
            self.fail("a run ends", || format!("{most} steps are not enough"));
            return false;
        }
        let next = self.agenda.next();
        let deadline = (0..2)
            .filter_map(|node| Some((self.nodes[node].deadline?.max(self.now + 1), node)))
            .filter(|(at, _)| next.is_none_or(|next| *at < next))
            .min();
        let at = deadline.map(|(at, _)| at).or(next);
        let Some(at) = at.filter(|at| *at <= until) else {
            self.now = until;
            return false;
        };
        self.now = at;
        if let Some((_, node)) = deadline {
            self.wake(node);
        } else if let Some(event) = self.agenda.take() {
            event(self);
        }
        true
    }

    /// Lets a controller whose deadline has come work.
    fn wake(&mut self, node: usize) {
        self.mark(0x7133 + node as u64);
        self.with(node, |c, now| c.handle_timer(now));
        let due = self.nodes[node].deadline;
        let restless = due.is_some_and(|next| next <= self.now);
        self.restless = if restless { self.restless + 1 } else { 0 };
        if self.restless > MOST_RESTLESS {
            let claim = "a controller whose timer was handled waits for something";
            self.fail(claim, || {
                let name = name(node);
                format!("{name} is due at once {MOST_RESTLESS} times in a row")
            });
        }
    }

    fn has_bug(&self, bug: BodyBug) -> bool {
        self.bug.is_some_and(|planted| planted.is(bug))
    }

    /// Returns the plan of the current or the last migration.
    fn planned(&self) -> Option<&MigrationPlan> {
        Some(&self.plan.migrations[self.course.number()?])
    }

    /// Returns true while no invariant is violated.
    const fn holds(&self) -> bool {
        self.outcome.violation.is_none()
    }

    /// Records a violated invariant; the run ends.
    fn fail(&mut self, claim: &'static str, detail: impl FnOnce() -> String) {
        if self.holds() {
            let detail = detail();
            self.note(|| format!("VIOLATED: {claim}: {detail}"));
            self.outcome.violation = Some(Violation { claim, detail });
        }
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &self.trace {
            let (whole, part) = (self.now / MILLISECOND, self.now % MILLISECOND);
            trace.push(format!("{whole:>5}.{part:06} ms  {}", line()));
        }
    }

    /// Mixes a number into the run's fingerprint.
    fn mark(&mut self, number: u64) {
        self.outcome.fingerprint = (self.outcome.fingerprint.rotate_left(5) ^ number ^ self.now)
            .wrapping_mul(0x517C_C1B7_2722_0A95);
    }

    fn reached(&mut self, state: Reached) {
        self.count(state, 1);
    }

    fn count(&mut self, state: Reached, times: u64) {
        self.outcome.coverage.add(state, times);
    }
}

fn name(node: usize) -> char {
    if node == 0 { 'a' } else { 'b' }
}
