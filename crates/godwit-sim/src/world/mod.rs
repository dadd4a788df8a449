//! Two hosts in virtual time around the real controllers.

mod body;
mod checks;
mod deltas;
mod disks;
mod faults;
mod guest;
mod images;
pub(crate) mod measuring;
mod node;
mod operator;
mod wires;

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;

use godwit_core::action::PullSlot;
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::Phase;
use godwit_core::units::{Extent, Lba};
use godwit_core::{Controller, Limits};

use self::checks::authority::Epochs;
use self::checks::promise::Promise;
use self::guest::Guest;
use self::measuring::Thought;
use self::node::Node;
use self::wires::network::Network;
use crate::history::History;
use crate::plan::Plan;
use crate::random::Random;
use crate::run::coverage::{Coverage, Reached};

pub(crate) const LIMITS: Limits = Limits {
    requests: 32,
    window_chunks: 8,
    delayed_chunks: 4,
    delayed_ranges: 16,
    hot_places: 4,
};

/// Number of steps above which the run of a seed counts as endless.
pub(crate) const MOST_STEPS: u64 = 2_000_000;

/// Most calls in a row for a controller to complete due work.
const MOST_RESTLESS: u32 = 20;

const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000_000;

/// A scheduled event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Occurrence {
    DiskDone {
        node: usize,
        incarnation: u32,
        index: usize,
    },
    Stored {
        node: usize,
        incarnation: u32,
    },
    /// The link has carried a part of a frame from this node.
    Carried {
        from: usize,
    },
    /// A frame from this node arrives.
    Arrived {
        from: usize,
        session: usize,
        connection: usize,
    },
    /// Frames blocked at the receiver are retried.
    Unblocked {
        from: usize,
        session: usize,
        connection: usize,
    },
    /// A node notices that a session has ended.
    Lost {
        session: usize,
        node: usize,
    },
    /// A node notices that the guest has hung up.
    HangUpSeen {
        node: usize,
        incarnation: u32,
    },
    /// The sharing state is stored.
    SharingStored {
        node: usize,
        incarnation: u32,
    },
    /// A disk's missing blocks are stored.
    MissingStored {
        node: usize,
        incarnation: u32,
    },
    /// A place in the guest's queue is free.
    Guest {
        place: usize,
    },
    /// The client moves to the owner.
    Follow,
    Migrate,
    /// The guest's host orders the switchover of the migration of this number.
    SwitchOver(usize),
    /// The operator changes the migration of this number.
    Change(usize),
    Fault(usize),
    Restart(usize),
    /// A node looks for the other node of an undecided migration.
    Dial(usize),
    /// A node whose clients stayed looks for the owner.
    Reconnect(usize),
    /// A node that owes data looks for the owner.
    ConnectPull(usize),
    /// A disk was compared with its image.
    Compared {
        node: usize,
        incarnation: u32,
    },
    /// Data of an image arrives.
    ImageAnswers {
        node: usize,
        incarnation: u32,
        connection: u32,
        slot: u16,
        start: u64,
        sectors: u32,
    },
    /// The connection to the image ends.
    ImageHangsUp {
        node: usize,
        incarnation: u32,
        connection: u32,
    },
    /// A resolver's session may have done its work.
    HangUp(usize),
    Sample,
    /// A node reviews its own choice of the policy.
    Think,
}

/// A violated invariant.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    /// The invariant, always in the same words.
    pub(crate) claim: &'static str,
    pub(crate) detail: String,
}

/// The outcome of a run.
#[derive(Debug)]
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

/// A function applied to each new controller, to plant a bug.
pub(crate) type Prepare = std::sync::Arc<dyn Fn(&mut Controller) + Send + Sync>;

pub(crate) struct World {
    now: u64,
    plan: Plan,
    nodes: [Node; 2],
    network: Network,
    guest: Guest,
    history: History,
    epochs: Epochs,
    promise: Option<Promise>,
    /// Source of the current or the last migration.
    source: usize,
    phase: Option<Phase>,
    paused: bool,
    /// True if the migration leaves an image behind.
    on_image: bool,
    next_migration: usize,
    migration_ended: u64,
    last_move: u64,
    /// Number of the guest's writes to each chunk of 64 KiB since the migration began.
    write_counts: Vec<u8>,
    /// Occurrences of each fault's moment.
    moments: Vec<u32>,
    settling: bool,
    queue: BinaryHeap<Reverse<(u64, u64, Occurrence)>>,
    sequence: u64,
    /// Number of session names given to forwarders.
    forward_sessions: u64,
    steps: u64,
    /// Review state of a policy chosen by the node.
    thought: Thought,
    /// Consecutive times of a controller being due again at once.
    restless: u32,
    fingerprint: u64,
    coverage: Coverage,
    violation: Option<Violation>,
    trace: Option<Trace>,
    prepare: Option<Prepare>,
    disk_random: Random,
    link_random: Random,
    store_random: Random,
    fault_random: Random,
    delta_random: Random,
    image_random: Random,
}

impl World {
    pub(crate) fn new(plan: Plan, trace: Option<Trace>, prepare: Option<Prepare>) -> Self {
        let seed = plan.seed;
        let node = |index: usize, record| Node::new(&plan, index, record);
        let mut world = Self {
            now: 1,
            nodes: [
                node(0, AuthorityRecord::created()),
                node(1, AuthorityRecord::vacant()),
            ],
            network: Network::new(plan.link),
            guest: Guest::new(seed, plan.guest.depth),
            history: History::new(plan.sectors),
            epochs: Epochs::default(),
            promise: None,
            source: 0,
            phase: None,
            paused: false,
            on_image: false,
            next_migration: 0,
            migration_ended: 0,
            last_move: 0,
            write_counts: Vec::new(),
            moments: vec![0; plan.faults.len()],
            settling: false,
            queue: BinaryHeap::new(),
            sequence: 0,
            forward_sessions: 0,
            steps: 0,
            thought: Thought::default(),
            restless: 0,
            fingerprint: 0,
            coverage: Coverage::new(),
            violation: None,
            trace,
            prepare,
            disk_random: Random::stream(seed, 2),
            link_random: Random::stream(seed, 3),
            store_random: Random::stream(seed, 4),
            fault_random: Random::stream(seed, 5),
            delta_random: Random::stream(seed, 9),
            image_random: Random::stream(seed, 10),
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
        self.schedule(1, Occurrence::Migrate);
        self.schedule(1, Occurrence::Sample);
        while self.violation.is_none() && self.step(self.plan.load) {}
        if self.violation.is_none() {
            self.settle();
        }
        Outcome {
            violation: self.violation,
            coverage: self.coverage,
            fingerprint: self.fingerprint,
        }
    }

    fn schedule(&mut self, delay: u64, occurrence: Occurrence) {
        self.sequence += 1;
        let at = self.now + delay.max(1);
        self.queue.push(Reverse((at, self.sequence, occurrence)));
    }

    /// Advances to the next event: an occurrence, or a deadline of a controller. Returns false if there is none before
    /// `until`.
    fn step(&mut self, until: u64) -> bool {
        self.steps += 1;
        let most = self.plan.most_steps;
        if self.steps > most {
            self.fail("a run ends", || format!("{most} steps are not enough"));
            return false;
        }
        let next = self.queue.peek().map(|Reverse((at, ..))| *at);
        let deadline = (0..2)
            .filter_map(|node| Some((self.nodes[node].deadline?.max(self.now + 1), node)))
            .min();
        if let Some((at, node)) = deadline
            && next.is_none_or(|next| at < next)
        {
            if at > until {
                self.now = until;
                return false;
            }
            self.now = at;
            self.mark(0x7133 + node as u64);
            self.with(node, |controller, now| controller.handle_timer(now));
            self.restless = match self.nodes[node].deadline {
                Some(next) if next <= at => self.restless + 1,
                _ => 0,
            };
            if self.restless > MOST_RESTLESS {
                self.fail(
                    "a controller whose timer was handled waits for something",
                    || {
                        format!(
                            "{} is due at once {MOST_RESTLESS} times in a row",
                            name(node)
                        )
                    },
                );
            }
            return true;
        }
        if next.is_none_or(|next| next > until) {
            self.now = until;
            return false;
        }
        if let Some(Reverse((at, _, occurrence))) = self.queue.pop() {
            self.now = at;
            self.happen(occurrence);
        }
        true
    }

    fn happen(&mut self, occurrence: Occurrence) {
        match occurrence {
            Occurrence::DiskDone {
                node,
                incarnation,
                index,
            } => {
                if self.nodes[node].incarnation == incarnation {
                    self.disk_done(node, index);
                }
            }
            Occurrence::Stored { node, incarnation } => {
                if self.nodes[node].incarnation == incarnation {
                    self.stored(node);
                }
            }
            Occurrence::Carried { from } => self.carried(from),
            Occurrence::Arrived {
                from,
                session,
                connection,
            } => {
                self.network.arrived(session, connection, from);
                self.receive(from, session, connection);
            }
            Occurrence::Unblocked {
                from,
                session,
                connection,
            } => self.receive(from, session, connection),
            Occurrence::Lost { session, node } => self.notice_loss(session, node),
            Occurrence::HangUpSeen { node, incarnation } => {
                if self.nodes[node].incarnation == incarnation {
                    self.look_for_hang_ups(node);
                }
            }
            Occurrence::SharingStored { node, incarnation } => {
                if self.nodes[node].incarnation == incarnation {
                    self.sharing_stored(node);
                }
            }
            Occurrence::MissingStored { node, incarnation } => {
                if self.nodes[node].incarnation == incarnation {
                    self.missing_stored(node);
                }
            }
            Occurrence::Guest { place } => self.ask(place),
            Occurrence::Follow => self.follow(),
            Occurrence::Migrate => self.operate(),
            Occurrence::SwitchOver(number) => self.switch_over(number),
            Occurrence::Change(number) => self.change(number),
            Occurrence::Fault(index) => self.fault(index),
            Occurrence::Restart(node) => self.restart(node),
            Occurrence::Dial(node) => self.dial(node),
            Occurrence::Reconnect(node) => self.reconnect(node),
            Occurrence::ConnectPull(node) => self.connect_pull(node),
            Occurrence::Compared { node, incarnation } => self.compared(node, incarnation),
            Occurrence::ImageAnswers {
                node,
                incarnation,
                connection,
                slot,
                start,
                sectors,
            } => {
                if let Some(extent) = Extent::new(Lba(start), sectors) {
                    let from = (node, incarnation, connection);
                    self.image_answers(from, PullSlot(slot), extent);
                }
            }
            Occurrence::ImageHangsUp {
                node,
                incarnation,
                connection,
            } => self.image_hangs_up(node, incarnation, connection),
            Occurrence::HangUp(session) => self.hang_up(session),
            Occurrence::Sample => self.sample(),
            Occurrence::Think => self.think(),
        }
    }

    /// Records a violated invariant; the run ends.
    fn fail(&mut self, claim: &'static str, detail: impl FnOnce() -> String) {
        if self.violation.is_none() {
            let detail = detail();
            self.note(|| format!("VIOLATED: {claim}: {detail}"));
            self.violation = Some(Violation { claim, detail });
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
        self.fingerprint = (self.fingerprint.rotate_left(5) ^ number ^ self.now)
            .wrapping_mul(0x517C_C1B7_2722_0A95);
    }

    fn reached(&mut self, state: Reached) {
        self.coverage.count(state);
    }
}

fn name(node: usize) -> char {
    if node == 0 { 'a' } else { 'b' }
}
