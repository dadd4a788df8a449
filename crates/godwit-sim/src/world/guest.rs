//! The guest: requests, and the allowed answers.

use std::rc::Rc;

use godwit_core::request::{Operation, Origin, Request, RequestError};
use godwit_core::units::{Extent, Lba};

use super::node::{BLOCK, Holder, Node};
use super::{MICROSECOND, MILLISECOND, World, name};
use crate::disk::Data;
use crate::history::WriteNumber;
use crate::plan::{GuestPlan, Places, SteadyLoad, Workload};
use crate::random::Random;
use crate::run::coverage::Reached;

/// Tags reserved for frames and requests of the other node.
const RESERVED: usize = 3;

/// A request without an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outstanding {
    pub(super) node: usize,
    pub(super) operation: Operation,
    pub(super) start: u64,
    /// Number of the write, for a write.
    write: Option<WriteNumber>,
    /// Start and end of the local disk operation.
    pub(super) disk_started: Option<u64>,
    pub(super) disk_ended: Option<u64>,
}

impl Outstanding {
    /// Returns the extent of a write.
    fn writes(&self) -> Option<Extent> {
        self.write.and_then(|_| self.operation.extent())
    }
}

#[derive(Debug)]
pub(super) struct Guest {
    random: Random,
    pub(super) places: Vec<Option<Outstanding>>,
    /// Target node of the guest's requests.
    pub(super) attached: usize,
    /// True while the guest waits for answers before leaving for the other node.
    moving: bool,
    /// True for each node with a connection from the guest.
    pub(super) present: [bool; 2],
    /// Writes whose answers the guest will never see, kept until the next attachment.
    pub(super) left: Vec<WriteNumber>,
    /// True once an owner knows of more than one writing party.
    pub(super) shares: bool,
    asked: u64,
    cursor: u64,
    /// End of the guest's current pause.
    silent_until: u64,
    /// Bytes read and written, and bytes written.
    pub(super) had: u64,
    pub(super) written: u64,
    /// Latencies of a steady guest's requests.
    pub(super) waits: Vec<u64>,
    /// Time at which a guest with its own pace is due to send the request of each place.
    due: Vec<u64>,
}

impl Guest {
    pub(super) fn new(seed: u64, depth: usize) -> Self {
        Self {
            random: Random::stream(seed, 6),
            places: vec![None; depth],
            attached: 0,
            moving: false,
            present: [false; 2],
            left: Vec::new(),
            shares: false,
            asked: 0,
            cursor: 0,
            silent_until: 0,
            had: 0,
            written: 0,
            waits: Vec::new(),
            due: vec![0; depth],
        }
    }

    pub(super) fn disk_started(&mut self, place: usize, now: u64) {
        if let Some(request) = &mut self.places[place] {
            request.disk_started = Some(now);
            request.disk_ended = None;
        }
    }

    pub(super) fn disk_ended(&mut self, place: usize, now: u64) {
        if let Some(request) = &mut self.places[place] {
            request.disk_ended = Some(now);
        }
    }

    /// Returns true if a request has not reached its node's disk. A forwarded request may wait for an already lost
    /// connection, and others for this request.
    pub(super) fn is_stuck(&self) -> bool {
        self.outstanding().any(|asked| asked.disk_started.is_none())
    }

    fn draw_steadily(&mut self, load: SteadyLoad) -> Operation {
        let random = &mut self.random;
        let at = match load.places {
            Places::Within(of) => random.below(of / BLOCK),
            Places::InOrder(of) => {
                self.cursor += 1;
                (self.cursor - 1) % (of / BLOCK)
            }
            Places::Skewed(of) => random.skewed(of / BLOCK),
        };
        match Extent::new(Lba(at * BLOCK), BLOCK as u32) {
            Some(extent) if random.below(100) < load.reads => Operation::Read(extent),
            Some(extent) => Operation::Write { extent, fua: false },
            None => Operation::Flush,
        }
    }

    /// Returns the time until the next request of a place, `think` after the last answer, or after the last request was
    /// due: late answers do not slow down a guest with its own pace.
    fn until_next(&mut self, place: usize, think: u64, load: Option<SteadyLoad>, now: u64) -> u64 {
        if load.is_none_or(|load| !load.own_pace) {
            return think;
        }
        self.due[place] += think;
        self.due[place].saturating_sub(now).max(1)
    }

    pub(super) fn outstanding(&self) -> impl Iterator<Item = &Outstanding> {
        self.places.iter().flatten()
    }
}

impl World {
    pub(super) fn start_guest(&mut self) {
        for place in 0..self.guest.places.len() {
            self.schedule(place as u64 + 1, move |world| world.ask(place));
        }
        self.reached(match self.plan.guest.workload {
            Workload::Uniform => Reached::Uniform,
            Workload::Zipf => Reached::Zipf,
            Workload::Sequential => Reached::Sequential,
            Workload::Hot => Reached::Hot,
            Workload::Mixed => Reached::Mixed,
        });
    }

    /// Sends the next request from a free place in the guest's queue.
    pub(super) fn ask(&mut self, place: usize) {
        if self.settling || self.guest.asked >= self.plan.requests {
            return;
        }
        let node = match self.ready() {
            Ok(node) => node,
            Err(wait) => return self.schedule(wait, move |world| world.ask(place)),
        };
        if self.plan.guest.steady.is_none() && self.guest.random.permille(4) {
            self.guest.silent_until = self.now + self.plan.guest.pause;
        }
        let operation = self.draw_operation();
        self.guest.asked += 1;
        let (write, data) = self.begin_write(&operation);
        self.count_request(&operation);
        let Some(tag) = self.nodes[node].buffers.take(Holder::Client(place), data) else {
            return;
        };
        self.guest.places[place] = Some(Outstanding {
            node,
            operation,
            start: self.now,
            write,
            disk_started: None,
            disk_ended: None,
        });
        self.mark(u64::from(tag.0));
        self.note(|| match write {
            Some(number) => format!("{}  request {tag:?} #{number} {operation:?}", name(node)),
            None => format!("{}  request {tag:?} {operation:?}", name(node)),
        });
        let request = Request {
            tag,
            origin: Origin::Client,
            operation,
        };
        self.with(node, |c, now| c.handle_request(now, request));
    }

    /// Returns the node for the guest's next request, with the guest attached.
    ///
    /// # Errors
    /// The time to wait.
    fn ready(&mut self) -> Result<usize, u64> {
        if self.now < self.guest.silent_until {
            return Err(self.guest.silent_until - self.now);
        }
        if self.is_stopped() {
            return Err(100 * MICROSECOND);
        }
        if self.guest.moving {
            if self.guest.outstanding().next().is_some() {
                return Err(100 * MICROSECOND);
            }
            self.guest.moving = false;
            let node = self.guest.attached;
            if std::mem::take(&mut self.guest.present[node]) {
                self.with(node, |c, now| c.handle_client_left(now, []));
            }
            self.guest.attached = 1 - node;
        }
        if self.protection.is_some() {
            self.guest.attached = self.machine();
        } else if !self.nodes[self.guest.attached].is_up() {
            self.guest.attached = 1 - self.guest.attached;
        }
        let mut node = self.guest.attached;
        let takes_requests = |it: &Node| it.is_up() && it.buffers.free_tags() >= RESERVED;
        if !takes_requests(&self.nodes[node]) {
            return Err(300 * MICROSECOND);
        }
        let GuestPlan {
            deserts, strays, ..
        } = self.plan.guest;
        if deserts > 0
            && self.nodes[1 - node].is_up()
            && self.guest.outstanding().next().is_some()
            && self.guest.random.permille(deserts)
        {
            self.desert();
            return Err(MICROSECOND);
        }
        if strays > 0 && takes_requests(&self.nodes[1 - node]) && self.guest.random.permille(strays)
        {
            self.reached(Reached::Strayed);
            node = 1 - node;
        }
        if !self.guest.present[node] {
            self.attach(node);
        }
        Ok(node)
    }

    /// Records the start of a write. Returns its number and its data.
    fn begin_write(&mut self, operation: &Operation) -> (Option<WriteNumber>, Data) {
        let (true, Some(extent)) = (operation.is_write(), operation.extent()) else {
            return (None, None);
        };
        let now = self.now;
        let oldest = self.guest.outstanding().map(|asked| asked.start).min();
        let zeroes = matches!(operation, Operation::WriteZeroes { .. });
        let number = self
            .history
            .started(extent, zeroes, now, oldest.unwrap_or(now));
        let data = (!zeroes).then(|| vec![number; extent.sectors() as usize].into());
        (Some(number), data)
    }

    fn draw_operation(&mut self) -> Operation {
        if let Some(steady) = self.plan.guest.steady {
            return self.guest.draw_steadily(steady);
        }
        let plan = &self.plan.guest;
        let sectors = self.plan.sectors;
        let guest = &mut self.guest;
        let random = &mut guest.random;
        let longest = if random.permille(15) {
            400
        } else {
            plan.longest
        };
        let length = 1 + random.below(longest);
        let start = match plan.workload {
            Workload::Uniform | Workload::Mixed => random.below(sectors),
            Workload::Zipf => random.skewed(sectors),
            Workload::Sequential => {
                let at = guest.cursor;
                guest.cursor = (at + length) % sectors;
                at
            }
            Workload::Hot if random.permille(850) => 100 + random.below(48),
            Workload::Hot => random.below(sectors),
        };
        let length = length.min(sectors - start) as u32;
        let Some(extent) = Extent::new(Lba(start), length) else {
            return Operation::Flush;
        };
        let special = if plan.workload == Workload::Mixed {
            600
        } else {
            120
        };
        if random.below(100) < plan.reads {
            return Operation::Read(extent);
        }
        if plan.workload == Workload::Hot
            && random.permille(500)
            && let Some(extent) = guest.places.iter().flatten().find_map(Outstanding::writes)
        {
            let fua = random.below(3) == 0;
            return Operation::Write { extent, fua };
        }
        let special = random.permille(special);
        let unmap = random.below(2) == 0;
        match random.below(4) {
            0 if special => Operation::Flush,
            1 if special => Operation::WriteZeroes {
                extent,
                fua: false,
                unmap,
            },
            2 if special => Operation::WriteZeroes {
                extent,
                fua: random.below(2) == 0,
                unmap,
            },
            _ => Operation::Write {
                extent,
                fua: special,
            },
        }
    }

    fn count_request(&mut self, operation: &Operation) {
        self.reached(match operation {
            Operation::Read(_) => Reached::Read,
            Operation::Write { fua: true, .. } => Reached::FuaWrite,
            Operation::Write { .. } => Reached::Write,
            Operation::WriteZeroes { unmap: true, .. } => Reached::Discard,
            Operation::WriteZeroes { .. } => Reached::WriteZeroes,
            Operation::Flush => Reached::Flush,
        });
        if let (Some(extent), Some(chunk)) = (operation.extent(), self.chunk_sectors())
            && extent.start().0 / chunk != (extent.end().0 - 1) / chunk
        {
            self.reached(Reached::AcrossChunks);
        }
    }

    /// Takes an answer to the guest.
    pub(super) fn answered(
        &mut self,
        node: usize,
        place: usize,
        result: Result<(), RequestError>,
        data: Data,
    ) {
        let think = self.plan.guest.think.max(2);
        let think = self.guest.random.exponential(think);
        let wait = self
            .guest
            .until_next(place, think, self.plan.guest.steady, self.now);
        self.schedule(wait, move |world| world.ask(place));
        let Some(asked) = self.guest.places[place].take() else {
            return self.fail("a request is answered once", || {
                format!("{} answers place {place}", name(node))
            });
        };
        let now = self.now;
        match (result, asked.operation) {
            (Ok(()), Operation::Read(extent)) => self.check_read(extent, data, &asked),
            (Ok(()), Operation::Flush) => self.history.flushed(asked.start),
            (Ok(()), Operation::Write { fua, .. } | Operation::WriteZeroes { fua, .. }) => {
                if let Some(write) = asked.write {
                    self.history.acknowledged(write, fua, now);
                }
                if asked.disk_started.is_none() && self.nodes[node].serves() {
                    self.reached(Reached::Combined);
                }
            }
            (Err(RequestError::NotServing), _) => self.guest.moving = node == self.guest.attached,
            (Err(error), _) if self.is_expected(error) => {
                self.reached(match error {
                    RequestError::Uncertain => Reached::Uncertain,
                    _ => Reached::Failed,
                });
                if let Some(write) = asked.write {
                    self.history.given_up(write, now);
                }
            }
            (Err(error), operation) => {
                self.fail(
                    "the guest sees no error that its disk has not reported",
                    || format!("{operation:?}: {error}"),
                );
            }
        }
        if result.is_ok() {
            let bytes = asked.operation.extent().map_or(0, |extent| extent.bytes());
            self.guest.had += bytes;
            if asked.write.is_some() {
                self.guest.written += bytes;
            }
            if self.plan.guest.steady.is_some() {
                self.guest.waits.push(now - asked.start);
            }
            self.check_promise(&asked);
        }
    }

    fn check_read(&mut self, extent: Extent, data: Data, asked: &Outstanding) {
        let data = data.unwrap_or_else(|| Rc::from([]));
        if data.len() != extent.sectors() as usize {
            return self.fail("a read brings the data that was asked for", || {
                format!("{} sectors of {extent}", data.len())
            });
        }
        for (sector, value) in (extent.start().0..).zip(data.iter()) {
            self.check_sector(
                "a read sees the last acknowledged write",
                sector,
                *value,
                asked.start,
            );
        }
    }

    /// Checks that a sector read from `start` until now may hold the value.
    pub(super) fn check_sector(
        &mut self,
        claim: &'static str,
        sector: u64,
        value: u32,
        start: u64,
    ) {
        let now = self.now;
        if !self.history.read(sector, value, start, now) {
            let writes = self.history.describe(sector);
            self.fail(claim, || {
                format!("sector {sector} reads #{value} at {start}..{now}; writes:{writes}")
            });
        }
    }

    /// Drops a node's clients, which die with the node. At an owner, their writes have taken effect by now or never
    /// will.
    pub(super) fn lose_clients(&mut self, node: usize, owner: bool) {
        self.guest.present[node] = false;
        let abandoned = self.leave(node, MILLISECOND);
        if owner {
            for write in abandoned {
                self.history.given_up(write, self.now);
            }
        } else {
            self.guest.left.extend(abandoned);
        }
    }

    /// Abandons the guest's requests at a node; their places are free after `delay`. Returns the abandoned writes.
    pub(super) fn leave(&mut self, node: usize, delay: u64) -> Vec<WriteNumber> {
        let mut writes = Vec::new();
        for place in 0..self.guest.places.len() {
            if let Some(asked) = self.guest.places[place].take_if(|asked| asked.node == node) {
                writes.extend(asked.write);
                self.schedule(delay, move |world| world.ask(place));
            }
        }
        writes
    }

    /// Moves the client to the serving node.
    pub(super) fn follow(&mut self) {
        if self.nodes[1 - self.guest.attached].serves() {
            self.guest.moving = true;
        }
    }
}
