//! Two controllers in virtual time: disks, links, stores and clients around them, with faults.

use std::collections::{BTreeMap, HashMap};

use godwit_core::action::{Action, ChunkSlot, Content, Digest, DiskOperation, DiskTag, Inspect};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::Event;
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::{Extent, Sectors, Time};
use godwit_core::wire::{HEADER_SIZE, Header, Message, PayloadBuffer, TrafficClass};
use godwit_core::{Controller, Limits};

use super::history::Value;
use super::random::Random;

pub(crate) const SECTORS: u64 = 2048;
pub(crate) const LIMITS: Limits = Limits {
    requests: 64,
    window_chunks: 4,
    delayed_chunks: 2,
    delayed_ranges: 8,
};

/// What will happen.
#[derive(Debug)]
pub(crate) enum Occurrence {
    DiskDone {
        node: usize,
        incarnation: u32,
        tag: DiskTag,
        operation: DiskOperation,
        data: Vec<Value>,
    },
    Frame {
        session: usize,
        to: usize,
        class: TrafficClass,
        message: Message,
        data: Vec<Value>,
    },
    Stored {
        node: usize,
        incarnation: u32,
        record: AuthorityRecord,
    },
}

/// A set of connections between the nodes.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) alive: bool,
    /// Set once a side treats the sync connection as its forwarding connection.
    pub(crate) forwarding: bool,
    last_delivery: HashMap<(usize, u8), u64>,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) controller: Option<Controller>,
    pub(crate) incarnation: u32,
    pub(crate) disk: Vec<Value>,
    pub(crate) record: AuthorityRecord,
    free_tags: Vec<RequestTag>,
    buffers: HashMap<RequestTag, Vec<Value>>,
    chunk_buffers: HashMap<ChunkSlot, Vec<Value>>,
    /// Requests that the peer forwarded: where to answer.
    forwarded: HashMap<RequestTag, (usize, RequestTag)>,
    /// Session of the migration that this node takes part in, and of its forwarding connection.
    pub(crate) migration: Option<usize>,
    pub(crate) forward: Option<usize>,
    pub(crate) events: Vec<Event>,
    pub(crate) disk_failure: Option<(u64, RequestError)>,
}

/// A client's request was answered: at which node (and which life of it), how, and when.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) node: usize,
    pub(crate) incarnation: u32,
    pub(crate) tag: RequestTag,
    pub(crate) result: Result<Vec<Value>, RequestError>,
    pub(crate) at: u64,
}

pub(crate) struct World {
    pub(crate) now: u64,
    pub(crate) random: Random,
    pub(crate) nodes: [Node; 2],
    pub(crate) sessions: Vec<Session>,
    queue: BTreeMap<u64, Occurrence>,
    /// Answers to clients, in the order in which they left.
    pub(crate) answers: Vec<Answer>,
    pub(crate) slow_link: bool,
}

impl Node {
    fn new(record: AuthorityRecord) -> Self {
        Self {
            controller: Some(Controller::new(LIMITS, Sectors(SECTORS), record)),
            incarnation: 0,
            disk: vec![0; SECTORS as usize],
            record,
            free_tags: (0..LIMITS.requests).rev().map(RequestTag).collect(),
            buffers: HashMap::new(),
            chunk_buffers: HashMap::new(),
            forwarded: HashMap::new(),
            migration: None,
            forward: None,
            events: Vec::new(),
            disk_failure: None,
        }
    }

    pub(crate) fn serves(&self) -> bool {
        self.controller.as_ref().is_some_and(Controller::serves)
    }
}

fn range(extent: Extent) -> std::ops::Range<usize> {
    extent.start().0 as usize..extent.end().0 as usize
}

fn digest(data: &[Value]) -> Digest {
    let mut digest = [0u8; 32];
    for (at, value) in data.iter().enumerate() {
        for (byte, part) in digest.iter_mut().zip(value.to_le_bytes().iter().cycle()) {
            *byte = byte
                .wrapping_mul(31)
                .wrapping_add(*part)
                .wrapping_add(at as u8);
        }
    }
    digest
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            now: 1,
            random: Random::new(seed),
            nodes: [
                Node::new(AuthorityRecord::created()),
                Node::new(AuthorityRecord::vacant()),
            ],
            sessions: Vec::new(),
            queue: BTreeMap::new(),
            answers: Vec::new(),
            slow_link: false,
        }
    }

    pub(crate) fn time(&self) -> Time {
        Time(self.now)
    }

    fn schedule(&mut self, delay: u64, occurrence: Occurrence) -> u64 {
        let mut at = self.now + delay.max(1);
        while self.queue.contains_key(&at) {
            at += 1;
        }
        self.queue.insert(at, occurrence);
        at
    }

    /// Calls into a node's controller and carries out what it asks for.
    pub(crate) fn with<T>(
        &mut self,
        node: usize,
        call: impl FnOnce(&mut Controller, Time) -> T,
    ) -> Option<T> {
        let now = self.time();
        let result = call(self.nodes[node].controller.as_mut()?, now);
        while let Some(action) = self.nodes[node]
            .controller
            .as_mut()
            .and_then(Controller::poll_action)
        {
            self.carry_out(node, action);
        }
        Some(result)
    }

    fn carry_out(&mut self, node: usize, action: Action) {
        let incarnation = self.nodes[node].incarnation;
        match action {
            Action::Disk { tag, operation } => {
                let data = match (&operation, tag) {
                    (
                        DiskOperation::Write { .. },
                        DiskTag::Request(tag) | DiskTag::Replica(tag),
                    ) => self.nodes[node].buffers[&tag].clone(),
                    _ => Vec::new(),
                };
                let delay = self.random.between(1_000, 300_000);
                self.schedule(
                    delay,
                    Occurrence::DiskDone {
                        node,
                        incarnation,
                        tag,
                        operation,
                        data,
                    },
                );
            }
            Action::Send { class, message } => {
                let session = match message {
                    Message::Forward { .. } => self.nodes[node].forward,
                    _ => self.nodes[node].migration,
                };
                let data = match message.payload() {
                    Some(PayloadBuffer::Request(tag)) => self.nodes[node].buffers[&tag].clone(),
                    Some(PayloadBuffer::Chunk(slot)) => {
                        self.nodes[node].chunk_buffers[&slot].clone()
                    }
                    None => Vec::new(),
                };
                if let Some(session) = session {
                    self.transmit(session, node, class, message, data);
                }
            }
            Action::Complete { tag, result } => self.complete(node, tag, result),
            Action::ReleaseReplica { tag } => self.free_tag(node, tag),
            // A frame leaves at once here.
            Action::DiscardUnsent { .. } => {}
            Action::Persist { record } => {
                self.check_equal_at_switchover(node, record);
                let delay = self.random.between(100_000, 5_000_000);
                self.schedule(
                    delay,
                    Occurrence::Stored {
                        node,
                        incarnation,
                        record,
                    },
                );
            }
            Action::Notify(event) => self.notified(node, event),
        }
    }

    /// The images must be byte-identical when the source gives the disk away.
    fn check_equal_at_switchover(&self, node: usize, record: AuthorityRecord) {
        if matches!(record.ownership, Ownership::Relinquished { .. }) {
            for (sector, (ours, theirs)) in self.nodes[node]
                .disk
                .iter()
                .zip(&self.nodes[1 - node].disk)
                .enumerate()
            {
                assert_eq!(ours, theirs, "sector {sector} differs at switchover");
            }
        }
    }

    fn notified(&mut self, node: usize, event: Event) {
        match event {
            Event::MigrationCompleted { .. } => {
                let session = self.nodes[node].migration.take();
                self.nodes[node].forward = session.filter(|s| self.sessions[*s].alive);
                if let Some(session) = session {
                    self.sessions[session].forwarding = true;
                    if self.nodes[1 - node].migration == Some(session) {
                        self.nodes[1 - node].migration = None;
                    }
                }
            }
            Event::MigrationAborted { .. } | Event::ReceiveAborted { .. } => {
                if let Some(session) = self.nodes[node].migration.take() {
                    self.cut(session);
                }
            }
            Event::OwnerMoved => self.nodes[node].forward = None,
            _ => {}
        }
        self.nodes[node].events.push(event);
    }

    fn complete(&mut self, node: usize, tag: RequestTag, result: Result<(), RequestError>) {
        let data = self.nodes[node]
            .buffers
            .get(&tag)
            .cloned()
            .unwrap_or_default();
        if let Some((session, theirs)) = self.nodes[node].forwarded.remove(&tag) {
            let length = if result.is_ok() {
                data.len() as u32 * 512
            } else {
                0
            };
            let message = Message::ForwardReply {
                tag: theirs,
                length,
                result,
            };
            self.transmit(session, node, TrafficClass::Sync, message, data);
        } else {
            let (incarnation, now) = (self.nodes[node].incarnation, self.now);
            let result = result.map(|()| data);
            self.answers.push(Answer {
                node,
                incarnation,
                tag,
                result,
                at: now,
            });
        }
        self.free_tag(node, tag);
    }

    fn free_tag(&mut self, node: usize, tag: RequestTag) {
        self.nodes[node].buffers.remove(&tag);
        assert!(
            !self.nodes[node].free_tags.contains(&tag),
            "{tag:?} is released twice"
        );
        self.nodes[node].free_tags.push(tag);
    }

    /// Sends a frame through the codec; frames of one class on one session stay in order.
    fn transmit(
        &mut self,
        session: usize,
        from: usize,
        class: TrafficClass,
        message: Message,
        data: Vec<Value>,
    ) {
        if !self.sessions[session].alive {
            return;
        }
        let (header, inline, length) = message.encode();
        let bytes: [u8; HEADER_SIZE] = header.encode();
        let decoded = Header::decode(&bytes).expect("a frame that was encoded decodes");
        let decoded = Message::decode(&decoded, &inline[..length]).expect("so does its body");
        assert_eq!(decoded, message);
        assert!(decoded.belongs_on(class));
        let slow = if self.slow_link { 20 } else { 1 };
        let delay = self.random.between(1_000, 100_000 * slow);
        let key = (from, class.code());
        let earliest = self.sessions[session]
            .last_delivery
            .get(&key)
            .copied()
            .unwrap_or(0);
        let delay = (self.now + delay).max(earliest + 1) - self.now;
        let to = 1 - from;
        let at = self.schedule(
            delay,
            Occurrence::Frame {
                session,
                to,
                class,
                message: decoded,
                data,
            },
        );
        self.sessions[session].last_delivery.insert(key, at);
    }

    /// A client's request; `None` when the node is down or out of tags.
    pub(crate) fn submit(
        &mut self,
        node: usize,
        operation: Operation,
        data: Vec<Value>,
    ) -> Option<RequestTag> {
        self.nodes[node].controller.as_ref()?;
        if self.nodes[node].free_tags.len() < 24 {
            return None;
        }
        let tag = self.nodes[node].free_tags.pop()?;
        self.nodes[node].buffers.insert(tag, data);
        self.with(node, |controller, now| {
            controller.handle_request(
                now,
                Request {
                    tag,
                    origin: Origin::Client,
                    operation,
                },
            );
        });
        Some(tag)
    }

    pub(crate) fn open_session(&mut self) -> usize {
        self.sessions.push(Session {
            alive: true,
            forwarding: false,
            last_delivery: HashMap::new(),
        });
        self.sessions.len() - 1
    }

    /// Loses every connection of a session; both ends notice.
    pub(crate) fn cut(&mut self, session: usize) {
        if !std::mem::replace(&mut self.sessions[session].alive, false) {
            return;
        }
        for node in 0..2 {
            if self.nodes[node].forward == Some(session) {
                self.nodes[node].forward = None;
                self.with(node, |controller, now| controller.handle_forward_lost(now));
            }
            if self.nodes[node].migration == Some(session) {
                let mut classes = [
                    TrafficClass::Control,
                    TrafficClass::Sync,
                    TrafficClass::Copy,
                ];
                let first = self.random.below(3) as usize;
                classes.swap(0, first);
                for class in classes {
                    self.with(node, |controller, now| {
                        controller.handle_connection_lost(now, class)
                    });
                }
                if self.nodes[node].migration == Some(session) {
                    self.nodes[node].migration = None;
                }
            }
        }
    }

    /// Kills a node's process. Disk operations under way may or may not have happened.
    pub(crate) fn crash(&mut self, node: usize) {
        self.nodes[node].controller = None;
        self.nodes[node].incarnation += 1;
        let pending: Vec<u64> = self
            .queue
            .iter()
            .filter(|(_, occurrence)| matches!(occurrence,
                Occurrence::DiskDone { node: n, .. } | Occurrence::Stored { node: n, .. } if *n == node))
            .map(|(at, _)| *at)
            .collect();
        for at in pending {
            let Some(occurrence) = self.queue.remove(&at) else {
                continue;
            };
            if self.random.below(2) == 0 {
                continue;
            }
            match occurrence {
                Occurrence::DiskDone {
                    operation, data, ..
                } => {
                    apply(&mut self.nodes[node].disk, &operation, &data);
                }
                Occurrence::Stored { record, .. } => self.nodes[node].record = record,
                _ => {}
            }
        }
        for session in 0..self.sessions.len() {
            self.cut(session);
        }
        self.nodes[node].migration = None;
        self.nodes[node].forward = None;
    }

    pub(crate) fn restart(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        it.controller = Some(Controller::new(LIMITS, Sectors(SECTORS), it.record));
        it.free_tags = (0..LIMITS.requests).rev().map(RequestTag).collect();
        it.buffers.clear();
        it.chunk_buffers.clear();
        it.forwarded.clear();
    }

    /// Lets the next thing happen: an occurrence, or a deadline of a controller. False when there
    /// is nothing before `until`.
    pub(crate) fn step(&mut self, until: u64) -> bool {
        let next = self.queue.keys().next().copied();
        let deadline = (0..2)
            .filter_map(|node| {
                let at = self.nodes[node].controller.as_ref()?.next_deadline()?;
                Some((at.0.max(self.now + 1), node))
            })
            .min();
        if let Some((at, node)) = deadline
            && next.is_none_or(|next| at < next)
        {
            if at > until {
                self.now = until;
                return false;
            }
            self.now = at;
            self.with(node, |controller, now| controller.handle_timer(now));
            return true;
        }
        let Some(at) = next.filter(|at| *at <= until) else {
            self.now = until;
            return false;
        };
        self.now = at;
        if let Some(occurrence) = self.queue.remove(&at) {
            self.happen(occurrence);
        }
        true
    }

    fn happen(&mut self, occurrence: Occurrence) {
        match occurrence {
            Occurrence::DiskDone {
                node,
                incarnation,
                tag,
                operation,
                data,
            } => {
                if self.nodes[node].incarnation == incarnation {
                    let result = self.disk_done(node, tag, &operation, &data);
                    self.with(node, |controller, now| {
                        controller.handle_disk_done(now, tag, result)
                    });
                }
            }
            Occurrence::Frame {
                session,
                to,
                class,
                message,
                data,
            } => {
                if self.sessions[session].alive && self.nodes[to].controller.is_some() {
                    self.deliver(session, to, class, message, data);
                }
            }
            Occurrence::Stored {
                node,
                incarnation,
                record,
            } => {
                if self.nodes[node].incarnation == incarnation {
                    self.nodes[node].record = record;
                    self.with(node, |controller, now| controller.handle_persisted(now));
                }
            }
        }
    }

    fn disk_done(
        &mut self,
        node: usize,
        tag: DiskTag,
        operation: &DiskOperation,
        data: &[Value],
    ) -> Result<Content, RequestError> {
        if let Some((after, error)) = self.nodes[node].disk_failure
            && self.now >= after
            && !matches!(operation, DiskOperation::Flush)
        {
            self.nodes[node].disk_failure = None;
            return Err(error);
        }
        apply(&mut self.nodes[node].disk, operation, data);
        let DiskOperation::Read { extent, inspect } = *operation else {
            return Ok(Content::Data);
        };
        let read = self.nodes[node].disk[range(extent)].to_vec();
        let content = match inspect {
            Inspect::Nothing => Content::Data,
            Inspect::Zeroes if read.iter().all(|value| *value == 0) => Content::Zeroes,
            Inspect::Zeroes => Content::Data,
            Inspect::Digest => Content::Digest(digest(&read)),
        };
        match tag {
            DiskTag::Request(tag) | DiskTag::Replica(tag) => {
                self.nodes[node].buffers.insert(tag, read);
            }
            DiskTag::Chunk(slot) => {
                self.nodes[node].chunk_buffers.insert(slot, read);
            }
            DiskTag::Barrier => {}
        }
        Ok(content)
    }

    fn deliver(
        &mut self,
        session: usize,
        to: usize,
        class: TrafficClass,
        message: Message,
        data: Vec<Value>,
    ) {
        match message {
            Message::Forward {
                tag: theirs,
                operation,
            } => {
                let tag = self.nodes[to]
                    .free_tags
                    .pop()
                    .expect("the peer's requests are bounded");
                self.nodes[to].buffers.insert(tag, data);
                self.nodes[to].forwarded.insert(tag, (session, theirs));
                self.with(to, |controller, now| {
                    controller.handle_request(
                        now,
                        Request {
                            tag,
                            origin: Origin::Peer,
                            operation,
                        },
                    );
                });
            }
            Message::ForwardReply { tag, result, .. } => {
                if self.nodes[to]
                    .controller
                    .as_ref()
                    .and_then(|c| c.forward_reply_length(tag))
                    .is_some()
                {
                    if result.is_ok() && !data.is_empty() {
                        self.nodes[to].buffers.insert(tag, data);
                    }
                    self.with(to, |c, now| c.handle_message(now, class, message, None));
                }
            }
            Message::Copy { .. }
            | Message::DoubleWrite { .. }
            | Message::DelayedWrite { .. }
            | Message::Verify { .. } => {
                let tag = self.nodes[to]
                    .free_tags
                    .pop()
                    .expect("the source's frames are bounded");
                self.nodes[to].buffers.insert(tag, data);
                self.with(to, |c, now| {
                    c.handle_message(now, class, message, Some(tag))
                });
            }
            _ => {
                if self.nodes[to].migration == Some(session) {
                    self.with(to, |c, now| c.handle_message(now, class, message, None));
                }
            }
        }
    }
}

fn apply(disk: &mut [Value], operation: &DiskOperation, data: &[Value]) {
    match *operation {
        DiskOperation::Write { extent, .. } => disk[range(extent)].copy_from_slice(data),
        DiskOperation::WriteZeroes { extent, .. } => disk[range(extent)].fill(0),
        DiskOperation::Read { .. } | DiskOperation::Flush => {}
    }
}
