//! A run: a guest that reads and writes at random, migrations back and forth, and faults.

use std::collections::HashMap;
use std::time::Duration;

use godwit_core::MigrationOptions;
use godwit_core::authority::Ownership;
use godwit_core::event::{AbortReason, Event};
use godwit_core::request::{Operation, RequestError, RequestTag};
use godwit_core::units::{Extent, Lba, MigrationId};

use super::history::{History, Value};
use super::world::{Answer, SECTORS, World};

/// Which faults a run provokes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Faults {
    pub(crate) cancels: bool,
    pub(crate) cuts: bool,
    pub(crate) crashes: bool,
    pub(crate) disk_errors: bool,
}

impl Faults {
    pub(crate) const NONE: Self = Self {
        cancels: false,
        cuts: false,
        crashes: false,
        disk_errors: false,
    };
}

/// How often migrations ended, and how.
pub(crate) struct Outcome {
    pub(crate) moved: u32,
    pub(crate) aborted: u32,
}

struct Outstanding {
    operation: Operation,
    start: u64,
}

pub(crate) struct Scenario {
    seed: u64,
    world: World,
    faults: Faults,
    history: History,
    /// The node that the guest is attached to.
    attached: usize,
    outstanding: HashMap<(usize, u32, RequestTag), Outstanding>,
    next_value: Value,
    next_migration: u8,
    down_until: [Option<u64>; 2],
    events_seen: [usize; 2],
    outcome: Outcome,
}

/// Nanoseconds of virtual time under load.
const LOAD_ENDS: u64 = 80_000_000;

impl Scenario {
    pub(crate) fn new(seed: u64, faults: Faults) -> Self {
        Self {
            seed,
            world: World::new(seed),
            faults,
            history: History::new(),
            attached: 0,
            outstanding: HashMap::new(),
            next_value: 1,
            next_migration: 1,
            down_until: [None; 2],
            events_seen: [0; 2],
            outcome: Outcome {
                moved: 0,
                aborted: 0,
            },
        }
    }

    pub(crate) fn run(mut self) -> Outcome {
        while self.world.now < LOAD_ENDS {
            let until = self.world.now + self.world.random.between(5_000, 60_000);
            while self.world.step(until) {
                self.look();
            }
            self.look();
            self.guest();
            self.operator();
            self.provoke();
        }
        self.settle();
        self.outcome
    }

    /// Everything heals; then exactly one node serves and holds every acknowledged write.
    fn settle(&mut self) {
        let deadline = self.world.now + 2_500_000_000;
        while self.world.now < deadline {
            for node in 0..2 {
                if let Some(until) = &mut self.down_until[node] {
                    *until = 0;
                }
                self.world.nodes[node].disk_failure = None;
            }
            let until = self.world.now + 20_000_000;
            while self.world.step(until) {
                self.look();
            }
            self.look();
        }
        let stuck: Vec<_> = self.outstanding.values().map(|o| o.operation).collect();
        assert!(
            stuck.is_empty(),
            "seed {}: never answered: {stuck:?}; nodes: {:?}",
            self.seed,
            self.world.nodes.each_ref().map(|node| (
                node.record,
                node.migration,
                node.forward,
                node.controller.as_ref().map(|c| (
                    c.serves(),
                    c.requests_in_flight(),
                    c.progress()
                )),
                node.events.last(),
            ))
        );
        let owners: Vec<_> = (0..2)
            .filter(|node| self.world.nodes[*node].serves())
            .collect();
        assert_eq!(owners.len(), 1, "seed {}: owners {owners:?}", self.seed);
        let now = self.world.now;
        for sector in 0..SECTORS {
            let value = self.world.nodes[owners[0]].disk[sector as usize];
            self.check(sector, value, now, now);
        }
    }

    fn check(&self, sector: u64, value: Value, start: u64, end: u64) {
        assert!(
            self.history.allows(sector, value, start, end),
            "seed {}: sector {sector} reads {value} at {start}..{end}; writes: {}",
            self.seed,
            self.history.describe(sector)
        );
    }

    /// Takes in what has happened: answers, events, restarts, connections to make again.
    fn look(&mut self) {
        for answer in std::mem::take(&mut self.world.answers) {
            let Answer {
                node,
                incarnation,
                tag,
                result,
                at,
            } = answer;
            let Some(asked) = self.outstanding.remove(&(node, incarnation, tag)) else {
                continue;
            };
            let Some(extent) = asked.operation.extent() else {
                continue;
            };
            let sectors = extent.start().0..extent.end().0;
            match result {
                Ok(data) if !asked.operation.is_write() => {
                    for (sector, value) in sectors.zip(data) {
                        self.check(sector, value, asked.start, at);
                    }
                }
                Ok(_) => self.history.acknowledged(sectors, asked.start, at),
                Err(RequestError::NotServing) => self.attached = 1 - node,
                Err(RequestError::Io | RequestError::NoSpace) if self.faults.disk_errors => {}
                Err(error) => panic!("seed {}: {:?} failed: {error}", self.seed, asked.operation),
            }
        }
        for node in 0..2 {
            let seen = self.events_seen[node];
            let new = self.world.nodes[node]
                .events
                .get(seen..)
                .unwrap_or_default()
                .to_vec();
            self.events_seen[node] = seen + new.len();
            for event in new {
                match event {
                    Event::MigrationCompleted { .. } => self.outcome.moved += 1,
                    Event::MigrationAborted { .. } => self.outcome.aborted += 1,
                    Event::NeedPeer { .. } => self.resolve(node),
                    _ => {}
                }
            }
            if self.down_until[node].is_some_and(|until| until <= self.world.now) {
                self.down_until[node] = None;
                self.world.restart(node);
            }
            self.forward_again(node);
        }
    }

    /// What a node's resolver does: dials the other node of an undecided migration.
    fn resolve(&mut self, node: usize) {
        if self.world.nodes[1 - node].controller.is_none() {
            return;
        }
        for each in 0..2 {
            if let Some(old) = self.world.nodes[each].migration {
                self.world.cut(old);
            }
        }
        let session = self.world.open_session();
        for each in [node, 1 - node] {
            self.world.nodes[each].migration = Some(session);
            self.world
                .with(each, |controller, now| controller.handle_control_up(now));
        }
    }

    /// What a node does when the connection to the owner is lost and clients are left.
    fn forward_again(&mut self, node: usize) {
        let needs = self.world.nodes[node]
            .controller
            .as_ref()
            .is_some_and(|controller| {
                matches!(
                    controller.record().ownership,
                    Ownership::Vacant | Ownership::Departed { .. }
                ) && controller.requests_in_flight() > 0
            });
        let owner_up = self.world.nodes[1 - node].serves();
        if needs && owner_up && self.world.nodes[node].forward.is_none() {
            let session = self.world.open_session();
            self.world.sessions[session].forwarding = true;
            self.world.nodes[node].forward = Some(session);
            self.world
                .with(node, |controller, now| controller.handle_forward_up(now));
        }
    }

    fn guest(&mut self) {
        if self.world.nodes[self.attached].controller.is_none() {
            self.attached = 1 - self.attached;
        }
        if self.outstanding.len() >= 12 {
            return;
        }
        let random = &mut self.world.random;
        let hot = random.below(3) == 0;
        let start = if hot {
            random.below(64)
        } else {
            random.below(SECTORS)
        };
        let longest = if random.below(20) == 0 { 700 } else { 24 };
        let sectors = 1 + random.below(longest);
        let sectors = sectors.min(SECTORS - start) as u32;
        let Some(extent) = Extent::new(Lba(start), sectors) else {
            return;
        };
        let kind = random.below(10);
        let fua = random.below(8) == 0;
        let unmap = random.below(2) == 0;
        let (operation, value) = match kind {
            0..=4 => (Operation::Write { extent, fua }, self.next_value),
            5 => (Operation::WriteZeroes { extent, fua, unmap }, 0),
            6 => (Operation::Flush, 0),
            _ => (Operation::Read(extent), 0),
        };
        self.next_value += 1;
        let start = self.world.now;
        let data = if matches!(operation, Operation::Write { .. }) {
            vec![value; sectors as usize]
        } else {
            Vec::new()
        };
        if operation.is_write() {
            self.history
                .started(extent.start().0..extent.end().0, value, start);
        }
        let node = self.attached;
        let incarnation = self.world.nodes[node].incarnation;
        if let Some(tag) = self.world.submit(node, operation, data) {
            self.outstanding
                .insert((node, incarnation, tag), Outstanding { operation, start });
        }
        self.world.now += 1;
        self.look();
    }

    fn operator(&mut self) {
        let Some(source) = (0..2).find(|node| self.world.nodes[*node].serves()) else {
            return;
        };
        let other = 1 - source;
        if self.world.nodes[source].migration.is_some()
            || self.world.nodes[other].migration.is_some()
            || self.world.nodes[other].controller.is_none()
            || self.world.random.below(60) != 0
        {
            return;
        }
        let random = &mut self.world.random;
        let options = MigrationOptions {
            chunk_sectors: 8 << random.below(5),
            window_chunks: 1 + random.below(4) as u16,
            busy_window_chunks: 1,
            max_bandwidth: (random.below(3) == 0).then(|| random.between(50_000_000, 500_000_000)),
            verify: random.below(2) == 0,
            peer_timeout: Duration::from_millis(50),
            ..MigrationOptions::new(MigrationId([self.next_migration; 16]))
        };
        self.next_migration = self.next_migration.wrapping_add(1);
        let session = self.world.open_session();
        self.world.nodes[source].migration = Some(session);
        self.world.nodes[other].migration = Some(session);
        let accepted = self.world.with(other, |controller, now| {
            controller
                .start_destination(now, options.migration, options.peer_timeout)
                .is_ok()
        });
        let started = accepted == Some(true)
            && self.world.with(source, |controller, now| {
                controller.start_source(now, options).is_ok()
            }) == Some(true);
        if !started {
            self.world.cut(session);
        }
    }

    fn provoke(&mut self) {
        let node = self.world.random.below(2) as usize;
        if self.faults.cancels && self.world.random.below(500) == 0 {
            self.world.with(node, |controller, now| {
                controller.cancel(now, AbortReason::Cancelled)
            });
        }
        if self.faults.cuts
            && self.world.random.below(300) == 0
            && let Some(session) = self
                .world
                .sessions
                .iter()
                .rposition(|session| session.alive)
        {
            self.world.cut(session);
        }
        if self.faults.crashes
            && self.world.random.below(400) == 0
            && self.world.nodes[node].controller.is_some()
        {
            self.world.crash(node);
            self.outstanding.retain(|(at, ..), _| *at != node);
            self.down_until[node] = Some(self.world.now + self.world.random.between(1, 20_000_000));
        }
        if self.faults.disk_errors && self.world.random.below(600) == 0 {
            let error =
                [RequestError::Io, RequestError::NoSpace][self.world.random.below(2) as usize];
            self.world.nodes[node].disk_failure = Some((self.world.now, error));
        }
        self.world.slow_link =
            self.world.random.below(200) < if self.world.slow_link { 190 } else { 2 };
    }
}
