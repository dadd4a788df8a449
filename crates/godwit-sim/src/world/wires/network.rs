//! Links: the queues of each connection, and the sharing of the link.

use std::collections::VecDeque;

use godwit_core::wire::{Message, TrafficClass};

use crate::disk::Data;
use crate::plan::LinkPlan;

/// Bytes of a turn: the link carries frames of several connections in turns.
const TURN: u64 = 16 << 10;

#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) message: Message,
    pub(crate) data: Data,
    pub(crate) bytes: u64,
    /// Position in the order in which copies were sent, to detect overtaking.
    pub(crate) number: u64,
}

/// One direction of a connection.
#[derive(Debug, Default)]
pub(crate) struct Pipe {
    /// Frames of which no byte has left the sender.
    queued: VecDeque<Frame>,
    /// Frames accepted by the socket.
    socket: VecDeque<Frame>,
    socket_bytes: u64,
    /// Bytes of the first frame in the socket that the link has carried.
    carried: u64,
    /// Frames in flight, in order.
    flying: VecDeque<Frame>,
    /// Number of arrived frames in `flying`.
    arrived: usize,
    last_arrival: u64,
    /// Time before which no frame is taken.
    pub(crate) stalled_until: u64,
    /// Bytes sent and not yet arrived.
    pub(crate) unacknowledged: u64,
    /// Bytes arrived since the last sample.
    pub(crate) delivered: u64,
}

impl Pipe {
    pub(crate) fn frames(&self) -> usize {
        self.queued.len() + self.socket.len() + self.flying.len()
    }

    /// Returns the arrival time of the youngest frame in flight, which alone would arrive at `at`: frames of one
    /// connection stay in order.
    pub(crate) fn arrival(&mut self, at: u64) -> u64 {
        self.last_arrival = at.max(self.last_arrival + 1);
        self.last_arrival
    }

    /// Marks the next frame in flight as arrived.
    pub(crate) fn arrive(&mut self) {
        if let Some(frame) = self.flying.get(self.arrived) {
            self.arrived += 1;
            self.delivered += frame.bytes;
            self.unacknowledged -= frame.bytes;
        }
    }

    /// Returns the next arrived frame's message.
    pub(crate) fn peek(&self) -> Option<Message> {
        let next = self.flying.front().filter(|_| self.arrived > 0);
        next.map(|frame| frame.message)
    }

    pub(crate) fn take(&mut self) -> Option<Frame> {
        self.arrived -= 1;
        self.flying.pop_front()
    }

    fn fill(&mut self, limit: u64) {
        while self.socket_bytes < limit {
            let Some(frame) = self.queued.pop_front() else {
                return;
            };
            self.socket_bytes += frame.bytes;
            self.socket.push_back(frame);
        }
    }

    fn drop_unsent(&mut self) {
        for frame in self.queued.drain(..).chain(self.socket.drain(..)) {
            self.unacknowledged -= frame.bytes;
        }
        (self.socket_bytes, self.carried) = (0, 0);
    }

    fn drop_flying(&mut self) -> u64 {
        let lost = self.flying.len() as u64;
        self.flying.clear();
        self.arrived = 0;
        lost
    }
}

/// One direction of a connection of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) session: usize,
    pub(crate) connection: usize,
    /// The sending node.
    pub(crate) from: usize,
}

impl Way {
    pub(crate) const fn new(session: usize, connection: usize, from: usize) -> Self {
        Self {
            session,
            connection,
            from,
        }
    }
}

/// The connections that two nodes opened for one purpose: control, sync, copy, then pull.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) alive: bool,
    /// True for each node that knows of the end.
    pub(crate) noticed: [bool; 2],
    /// Pipes by connection and sending node.
    pub(crate) connections: Vec<[Pipe; 2]>,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    way: Way,
    bytes: u64,
}

/// One direction of the link.
#[derive(Debug, Default)]
pub(crate) struct Direction {
    turn: Option<Turn>,
    /// First place to look for the next turn.
    next: usize,
    /// Bytes since the last sample.
    pub(crate) carried: u64,
    /// Bytes since the run's start.
    pub(crate) total: u64,
    /// Divisor of the bandwidth, and the time until which the divisor applies.
    pub(crate) slow: (u64, u64),
    /// Per cent of the bandwidth taken by other traffic, and the time until which the percentage applies.
    pub(crate) traffic: (u64, u64),
}

#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) plan: LinkPlan,
    pub(crate) sessions: Vec<Session>,
    /// Live sessions.
    live: Vec<usize>,
    pub(crate) directions: [Direction; 2],
}

impl Network {
    pub(crate) fn new(plan: LinkPlan) -> Self {
        Self {
            plan,
            sessions: Vec::new(),
            live: Vec::new(),
            directions: Default::default(),
        }
    }

    pub(crate) fn open(&mut self) -> usize {
        let connections = 3 + self.plan.copy_connections;
        self.sessions.push(Session {
            alive: true,
            noticed: [false; 2],
            connections: (0..connections).map(|_| Default::default()).collect(),
        });
        self.live.push(self.sessions.len() - 1);
        self.sessions.len() - 1
    }

    /// Returns the youngest live session.
    pub(crate) fn youngest(&self) -> Option<usize> {
        self.live.last().copied()
    }

    pub(crate) fn live(&self) -> Vec<usize> {
        self.live.clone()
    }

    pub(crate) fn pipe(&mut self, way: Way) -> &mut Pipe {
        &mut self.sessions[way.session].connections[way.connection][way.from]
    }

    /// Returns the bytes per second available to the migration from this node.
    pub(crate) fn bandwidth(&self, from: usize, now: u64) -> u64 {
        let direction = &self.directions[from];
        let mut bandwidth = self.plan.bandwidth;
        if now < direction.traffic.1 {
            bandwidth = bandwidth * (100 - direction.traffic.0) / 100;
        }
        if now < direction.slow.1 {
            bandwidth /= direction.slow.0;
        }
        bandwidth.max(1)
    }

    pub(crate) fn enqueue(&mut self, way: Way, frame: Frame) -> &Pipe {
        let limit = self.plan.socket;
        let pipe = self.pipe(way);
        pipe.unacknowledged += frame.bytes;
        pipe.queued.push_back(frame);
        pipe.fill(limit);
        pipe
    }

    /// Starts the link's next turn from this node, if the link is idle and a frame waits. Returns the duration of the
    /// turn.
    pub(crate) fn take_turn(&mut self, from: usize, now: u64) -> Option<u64> {
        if self.directions[from].turn.is_some() {
            return None;
        }
        let connections = 3 + self.plan.copy_connections;
        let places = self.live.len() * connections;
        let first = self.directions[from].next;
        for place in 0..places {
            let place = (first + place) % places;
            let session = self.live[place / connections];
            let connection = place % connections;
            let pipe = &self.sessions[session].connections[connection][from];
            let Some(frame) = pipe.socket.front() else {
                continue;
            };
            let bytes = (frame.bytes - pipe.carried).min(TURN);
            let way = Way::new(session, connection, from);
            self.directions[from].turn = Some(Turn { way, bytes });
            self.directions[from].next = place + 1;
            return Some(bytes * 1_000_000_000 / self.bandwidth(from, now));
        }
        None
    }

    /// Ends the link's turn from this node. Returns the way of a frame that has left.
    pub(crate) fn end_turn(&mut self, from: usize) -> Option<Way> {
        let limit = self.plan.socket;
        let turn = self.directions[from].turn.take()?;
        self.directions[from].carried += turn.bytes;
        self.directions[from].total += turn.bytes;
        let pipe = self.pipe(turn.way);
        // The session may have ended meanwhile.
        let length = pipe.socket.front()?.bytes;
        pipe.carried += turn.bytes;
        if pipe.carried < length {
            return None;
        }
        let frame = pipe.socket.pop_front()?;
        pipe.carried = 0;
        pipe.socket_bytes -= frame.bytes;
        pipe.flying.push_back(frame);
        pipe.fill(limit);
        Some(turn.way)
    }

    /// Drops the unsent frames on a class's connections; returns their number.
    pub(crate) fn discard_unsent(
        &mut self,
        session: usize,
        from: usize,
        class: TrafficClass,
    ) -> u64 {
        let mut dropped = 0;
        for connection in connections(class, self.plan.copy_connections) {
            let pipe = self.pipe(Way::new(session, connection, from));
            for frame in pipe.queued.drain(..) {
                pipe.unacknowledged -= frame.bytes;
                dropped += 1;
            }
        }
        dropped
    }

    /// Ends a session: no more frames leave a sender. With `deliver`, frames in flight arrive until the receiver
    /// notices. Returns the number of lost frames.
    pub(crate) fn end(&mut self, session: usize, deliver: bool) -> u64 {
        self.live.retain(|live| *live != session);
        let ended = &mut self.sessions[session];
        ended.alive = false;
        let mut lost = 0;
        for pipe in ended.connections.iter_mut().flatten() {
            pipe.drop_unsent();
            if !deliver {
                lost += pipe.drop_flying();
            }
        }
        for direction in &mut self.directions {
            // The rest of the turn's time passes all the same.
            if direction
                .turn
                .is_some_and(|turn| turn.way.session == session)
            {
                direction.next = 0;
            }
        }
        lost
    }

    /// Closes a session in order: frames already sent on the control connection still go out. Returns their number.
    pub(crate) fn flush_control(&mut self, session: usize, from: usize) -> u64 {
        let pipe = self.pipe(Way::new(session, 0, from));
        let mut moved = 0;
        while let Some(frame) = pipe.socket.pop_front().or_else(|| pipe.queued.pop_front()) {
            pipe.flying.push_back(frame);
            moved += 1;
        }
        moved
    }

    /// Drops all frames to a node that has noticed the end of the session.
    pub(crate) fn forget(&mut self, session: usize, node: usize) {
        let session = &mut self.sessions[session];
        session.noticed[node] = true;
        for connection in &mut session.connections {
            connection[1 - node].drop_flying();
        }
    }
}

/// Returns the connections of a class.
pub(crate) fn connections(class: TrafficClass, copy_connections: usize) -> std::ops::Range<usize> {
    match class {
        TrafficClass::Control => 0..1,
        TrafficClass::Sync => 1..2,
        TrafficClass::Copy => 2..2 + copy_connections,
        TrafficClass::Pull => 2 + copy_connections..3 + copy_connections,
        // No connection between nodes has this class.
        TrafficClass::Image => 0..0,
    }
}

/// Returns the class of a connection.
pub(crate) const fn class(connection: usize, copy_connections: usize) -> TrafficClass {
    match connection {
        0 => TrafficClass::Control,
        1 => TrafficClass::Sync,
        other if other < 2 + copy_connections => TrafficClass::Copy,
        _ => TrafficClass::Pull,
    }
}
