//! The checkpoints of a protected machine: captures, the parts on their way, the packets held back, and clients that
//! remember what they were told.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::Duration;

use godwit_protect::checkpoints::{Checkpoint, Checkpoints, Gathering, Step};
use godwit_protect::{Primary, PrimaryState};

use super::Role;
use crate::bug::BodyBug;
use crate::history::WriteNumber;
use crate::plan::CheckpointPlan;
use crate::random::Random;
use crate::run::coverage::Reached;
use crate::world::{MICROSECOND, World, name};

/// A machine's memory. The guest stands still at the capture, so a place in the order of its writes is all that the guest
/// knows of its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    /// The last packet that the machine had sent.
    packet: u64,
    /// The first write after the capture.
    writes: WriteNumber,
    at: u64,
}

/// The checkpoints of a primary.
#[derive(Debug)]
struct Source {
    node: usize,
    /// The connections to the backup.
    session: usize,
    checkpoints: Checkpoints,
    last: Checkpoint,
    /// The last checkpoint that the backup has.
    whole: Checkpoint,
    /// Packets that wait for the checkpoint of their epoch.
    held: VecDeque<(Checkpoint, u64)>,
    /// True while the guest is being stopped for a capture: its requests are answered, and it begins no others.
    stops: bool,
    /// Arrival of the last memory.
    arrival: u64,
}

impl Source {
    /// Takes the packets of all epochs up to this one.
    fn release(&mut self, through: Checkpoint) -> Vec<u64> {
        let end = self.held.partition_point(|(epoch, _)| *epoch <= through);
        self.held.drain(..end).map(|(_, packet)| packet).collect()
    }
}

/// The checkpoints of a backup.
#[derive(Debug)]
struct Standby {
    node: usize,
    session: usize,
    gathering: Gathering,
    /// The memory of the last whole checkpoint, and those of later ones.
    memories: VecDeque<(Checkpoint, Memory)>,
    severed: bool,
}

/// The checkpoints of a run's machine.
#[derive(Debug)]
pub(super) struct Checkpointing {
    plan: CheckpointPlan,
    source: Option<Source>,
    standby: Option<Standby>,
    /// Number of packets that the machine has sent.
    sent: u64,
    /// The last packet that a client has seen.
    told: u64,
    /// Packets that takeovers have undone.
    undone: Vec<RangeInclusive<u64>>,
    random: Random,
}

impl Checkpointing {
    pub(super) const fn new(plan: CheckpointPlan, random: Random) -> Self {
        Self {
            plan,
            source: None,
            standby: None,
            sent: 0,
            told: 0,
            undone: Vec::new(),
            random,
        }
    }

    /// Returns the time that a memory or an acknowledgement is on its way.
    fn delay(&mut self) -> u64 {
        self.random.magnitude(10 * MICROSECOND, self.plan.delay)
    }

    fn source(&mut self, session: usize) -> Option<&mut Source> {
        self.source.as_mut().filter(|it| it.session == session)
    }

    fn standby(&mut self, session: usize) -> Option<&mut Standby> {
        let standby = self.standby.as_mut();
        standby.filter(|it| it.session == session && !it.severed)
    }
}

impl World {
    fn checkpointing(&mut self) -> Option<&mut Checkpointing> {
        self.protection.as_mut()?.checkpoints.as_mut()
    }

    fn source(&self) -> Option<&Source> {
        self.protection
            .as_ref()?
            .checkpoints
            .as_ref()?
            .source
            .as_ref()
    }

    /// Returns true if the machine goes on from checkpoints.
    pub(super) fn is_checkpointed(&self) -> bool {
        self.protection
            .as_ref()
            .is_some_and(|it| it.checkpoints.is_some())
    }

    const fn since_start(&self) -> Duration {
        Duration::from_nanos(self.now)
    }

    /// Starts the checkpoints of a machine whose disk is followed.
    pub(super) fn start_checkpoints(&mut self, node: usize) {
        let Some(session) = self.nodes[node].sessions.migration else {
            return;
        };
        let (now, arrival) = (self.since_start(), self.now);
        if let Some(it) = self.checkpointing() {
            it.source = Some(Source {
                node,
                session,
                checkpoints: Checkpoints::new(Duration::from_nanos(it.plan.interval), now),
                last: Checkpoint(0),
                whole: Checkpoint(0),
                held: VecDeque::new(),
                stops: false,
                arrival,
            });
        }
        self.checkpoint(session);
    }

    /// Awaits the checkpoints of a disk that follows here.
    pub(super) fn await_checkpoints(&mut self, node: usize) {
        let session = self.nodes[node].sessions.migration;
        if let (Some(it), Some(session)) = (self.checkpointing(), session) {
            it.standby = Some(Standby {
                node,
                session,
                gathering: Gathering::new(1),
                memories: VecDeque::new(),
                severed: false,
            });
        }
    }

    /// Forgets the checkpoints of a node whose process starts.
    pub(super) fn forget_checkpoints(&mut self, node: usize) {
        if let Some(it) = self.checkpointing() {
            it.source.take_if(|source| source.node == node);
            it.standby.take_if(|standby| standby.node == node);
        }
    }

    /// Ends the machine at a primary: its held packets never leave.
    pub(super) fn drop_packets(&mut self, node: usize) {
        if self.has_bug(BodyBug::ReleaseEnded) {
            return self.end_checkpoints(node);
        }
        if let Some(it) = self.checkpointing() {
            it.source.take_if(|source| source.node == node);
        }
    }

    /// Ends the checkpoints of a primary that goes on alone: all packets leave.
    pub(super) fn end_checkpoints(&mut self, node: usize) {
        let Some(it) = self.checkpointing() else {
            return;
        };
        if let Some(mut source) = it.source.take_if(|source| source.node == node) {
            self.tell(source.release(Checkpoint(u64::MAX)));
            self.history.keep_from(WriteNumber::MAX);
        }
    }

    pub(super) fn sever_checkpoints(&mut self, node: usize) {
        let it = self.checkpointing().and_then(|it| it.standby.as_mut());
        if let Some(standby) = it.filter(|standby| standby.node == node) {
            standby.severed = true;
        }
    }

    /// Returns true while the guest stands still for a capture.
    pub(crate) fn is_stopped(&self) -> bool {
        let stops = self.source().filter(|source| source.stops);
        stops.is_some_and(|source| source.node == self.machine())
    }

    /// Returns true if nobody hears of the machine at a node: its packets wait for acknowledgements.
    pub(crate) fn is_unheard(&self, node: usize) -> bool {
        let holds = self.source().filter(|source| source.last > Checkpoint(0));
        holds.is_some_and(|source| source.node == node)
    }

    /// Takes the next step of a primary.
    fn checkpoint(&mut self, session: usize) {
        let now = self.since_start();
        let Some(source) = self.checkpointing().and_then(|it| it.source(session)) else {
            return;
        };
        let node = source.node;
        match source.checkpoints.step(now) {
            Step::Capture(_) => {
                source.stops = true;
                self.capture(session);
            }
            Step::Wait(wait) => {
                let wait = wait.as_nanos() as u64;
                self.schedule_own(node, wait, move |world| world.checkpoint(session));
            }
            Step::AwaitAcknowledgement => {}
        }
    }

    /// Captures the guest once all its requests are answered.
    fn capture(&mut self, session: usize) {
        if self.guest.outstanding().next().is_some() || !self.is_stopped() {
            return;
        }
        let (time, at, writes) = (self.since_start(), self.now, self.history.next());
        let Some(it) = self.checkpointing() else {
            return;
        };
        let (delay, packet) = (it.delay(), it.sent);
        let Some(source) = it.source(session) else {
            return;
        };
        source.stops = false;
        let (node, number) = (source.node, source.checkpoints.captured(time));
        let whole = source.whole.0;
        source.last = number;
        source.arrival = (source.arrival + 1).max(at + delay);
        let delay = source.arrival - at;
        if number == Checkpoint(1) {
            self.history.keep_from(writes);
        }
        self.note(|| format!("{}  captures checkpoint {number}", name(node)));
        if self.has_bug(BodyBug::ReleaseUnacknowledged) {
            self.release(session, number);
        }
        self.with(node, |c, now| c.mark_checkpoint(now, number.0, whole));
        let memory = Memory { packet, writes, at };
        self.schedule(delay, move |world| {
            world.memory_came(session, 1 - node, number, memory);
        });
        self.checkpoint(session);
    }

    /// Returns true if a frame of the memory's connection still arrives. After the end of the connection, frames on their
    /// way may arrive until the node notices.
    fn arrives(&self, session: usize, node: usize) -> bool {
        let it = &self.network.sessions[session];
        !it.noticed[node] && (it.alive || session.is_multiple_of(2))
    }

    fn memory_came(&mut self, session: usize, node: usize, number: Checkpoint, memory: Memory) {
        if !self.arrives(session, node) {
            return;
        }
        let standby = self.checkpointing().and_then(|it| it.standby(session));
        let Some(standby) = standby else {
            return;
        };
        if let Ok(whole) = standby.gathering.memory_came(number) {
            standby.memories.push_back((number, memory));
            self.whole(node, session, whole);
        }
    }

    /// Notes that the disk is here up to a checkpoint.
    pub(super) fn disk_marked(&mut self, node: usize, number: u64) {
        let Some(session) = self.nodes[node].sessions.migration else {
            return;
        };
        let Some(standby) = self.checkpointing().and_then(|it| it.standby(session)) else {
            return;
        };
        match standby.gathering.disk_came(0, Checkpoint(number)) {
            Ok(whole) => self.whole(node, session, whole),
            Err(error) => self.fail("marks come in order", || error.to_string()),
        }
    }

    /// Applies and acknowledges a checkpoint that became whole.
    fn whole(&mut self, node: usize, session: usize, whole: Option<Checkpoint>) {
        let (Some(number), Some(it)) = (whole, self.checkpointing()) else {
            return;
        };
        let delay = it.delay();
        let Some(standby) = it.standby(session) else {
            return;
        };
        while standby.memories.front().is_some_and(|it| it.0 < number) {
            standby.memories.pop_front();
        }
        if let Some((_, memory)) = standby.memories.front() {
            let writes = memory.writes;
            self.history.keep_from(writes);
        }
        if self.with(node, |c, now| c.apply_checkpoints(now, number.0)) != Some(true) {
            return;
        }
        self.reached(Reached::CheckpointWhole);
        self.with_backup(node, |backup| {
            backup.in_sync();
            Vec::new()
        });
        self.schedule(delay, move |world| {
            world.acknowledged(session, 1 - node, number);
        });
    }

    fn acknowledged(&mut self, session: usize, node: usize, number: Checkpoint) {
        let now = self.since_start();
        if !self.arrives(session, node) || !self.hopes(node) {
            return;
        }
        let Some(source) = self.checkpointing().and_then(|it| it.source(session)) else {
            return;
        };
        let waited = source.checkpoints.step(now) == Step::AwaitAcknowledgement;
        let Some(acknowledged) = source.checkpoints.acknowledged(number, now) else {
            return;
        };
        source.whole = number;
        self.release(session, acknowledged.release);
        self.with_primary(node, Primary::in_sync);
        self.check_lease(node);
        if waited {
            self.checkpoint(session);
        }
    }

    /// Returns true if a primary has not given up its backup.
    fn hopes(&self, node: usize) -> bool {
        use PrimaryState::{Alone, Paired, Pairing};
        let role = self.protection.as_ref().map(|it| &it.roles[node]);
        matches!(role, Some(Some(Role::Primary(primary)))
            if matches!(primary.state(), Alone | Pairing | Paired))
    }

    fn release(&mut self, session: usize, through: Checkpoint) {
        if let Some(source) = self.checkpointing().and_then(|it| it.source(session)) {
            let packets = source.release(through);
            if !packets.is_empty() {
                self.reached(Reached::PacketsReleased);
            }
            self.tell(packets);
        }
    }

    /// Lets packets reach the clients.
    fn tell(&mut self, packets: Vec<u64>) {
        let Some(it) = self.checkpointing() else {
            return;
        };
        it.told = packets.iter().copied().fold(it.told, u64::max);
        let undone = |packet: &&u64| it.undone.iter().any(|range| range.contains(packet));
        if let Some(packet) = packets.iter().find(undone).copied() {
            self.fail(
                "no packet leaves of a state that a takeover has undone",
                || format!("packet {packet}"),
            );
        }
    }

    /// Lets the machine send a packet, after the answer to a request.
    pub(crate) fn machine_worked(&mut self, node: usize) {
        let Some(it) = self.checkpointing() else {
            return;
        };
        it.sent += 1;
        let packet = it.sent;
        match it.source.as_mut().filter(|source| source.node == node) {
            Some(source) if source.last > Checkpoint(0) => {
                source.held.push_back((source.last.next(), packet));
            }
            _ => self.tell(vec![packet]),
        }
        if self.is_stopped()
            && let Some(session) = self.nodes[node].sessions.migration
        {
            self.schedule_own(node, 1, move |world| world.capture(session));
        }
    }

    /// Lets a machine that was taken go on from the last whole checkpoint.
    pub(super) fn return_to_checkpoint(&mut self, node: usize) {
        if !self.is_checkpointed() {
            return;
        }
        let newest = self.has_bug(BodyBug::HalfEpoch);
        let Some(it) = self.checkpointing() else {
            return;
        };
        let standby = it.standby.take_if(|standby| standby.node == node);
        let memories = standby.filter(|it| it.gathering.whole().is_some());
        let memories = memories.map(|it| it.memories).unwrap_or_default();
        let memory = match newest {
            true => memories.back(),
            false => memories.front(),
        };
        let Some((number, memory)) = memory.copied() else {
            return self.fail("a machine is taken from a whole checkpoint", || {
                name(node).to_string()
            });
        };
        if let Some(source) = it.source.as_mut().filter(|source| source.node != node) {
            // The old machine runs until its node hears of its end.
            it.sent += 1;
            source.held.push_back((source.last.next(), it.sent));
        }
        let (sent, told) = (it.sent, it.told);
        if memory.packet < sent {
            it.undone.push(memory.packet + 1..=sent);
            self.reached(Reached::WorkUndone);
        }
        self.note(|| format!("{}  goes on from checkpoint {number}", name(node)));
        if told > memory.packet {
            self.fail(
                "the machine knows of every packet that a client has seen",
                || format!("packet {told}, and checkpoint {number} is of {memory:?}"),
            );
        }
        self.history.undo_from(memory.writes, memory.at);
    }
}
