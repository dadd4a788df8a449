//! Links: the queues of each connection, and the sharing of the link.

use std::collections::VecDeque;

use godwit_core::wire::{Message, TrafficClass};

use crate::disk::Data;
use crate::plan::LinkPlan;

/// Bytes of a turn: the link carries frames of several connections in turns.
const TURN: u64 = 16 << 10;

#[derive(Debug)]
pub(in crate::world) struct Frame {
    pub(in crate::world) message: Message,
    pub(in crate::world) data: Data,
    pub(in crate::world) bytes: u64,
    /// Position in the order in which copies were sent, to detect overtaking.
    pub(in crate::world) number: u64,
}

/// One direction of a connection.
#[derive(Debug, Default)]
pub(in crate::world) struct Pipe {
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
    stalled_until: u64,
    /// Bytes sent and not yet arrived.
    pub(in crate::world) unacknowledged: u64,
    /// Bytes arrived since the last sample.
    pub(in crate::world) delivered: u64,
}

impl Pipe {
    pub(in crate::world) fn frames(&self) -> usize {
        self.queued.len() + self.socket.len() + self.flying.len()
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

/// The connections that two nodes opened for one purpose: control, sync, copy, then pull.
#[derive(Debug)]
pub(in crate::world) struct Session {
    pub(in crate::world) alive: bool,
    /// True for each node that knows of the end.
    pub(in crate::world) noticed: [bool; 2],
    /// Pipes by connection and sending node.
    pub(in crate::world) connections: Vec<[Pipe; 2]>,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    session: usize,
    connection: usize,
    bytes: u64,
}

/// One direction of the link.
#[derive(Debug, Default)]
pub(in crate::world) struct Direction {
    turn: Option<Turn>,
    /// First place to look for the next turn.
    next: usize,
    /// Bytes since the last sample.
    pub(in crate::world) carried: u64,
    /// Bytes since the run's start.
    pub(in crate::world) total: u64,
    /// Divisor of the bandwidth, and the time until which the divisor applies.
    pub(in crate::world) slow: (u64, u64),
    /// Per cent of the bandwidth taken by other traffic, and the time until which the percentage applies.
    pub(in crate::world) traffic: (u64, u64),
}

#[derive(Debug)]
pub(in crate::world) struct Network {
    pub(in crate::world) plan: LinkPlan,
    pub(in crate::world) sessions: Vec<Session>,
    /// Live sessions.
    live: Vec<usize>,
    pub(in crate::world) directions: [Direction; 2],
}

/// A frame that has left the sender.
pub(in crate::world) struct Departure {
    pub(in crate::world) session: usize,
    pub(in crate::world) connection: usize,
}

impl Network {
    pub(in crate::world) fn new(plan: LinkPlan) -> Self {
        Self {
            plan,
            sessions: Vec::new(),
            live: Vec::new(),
            directions: Default::default(),
        }
    }

    pub(in crate::world) fn open(&mut self) -> usize {
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
    pub(in crate::world) fn youngest(&self) -> Option<usize> {
        self.live.last().copied()
    }

    pub(in crate::world) fn live(&self) -> Vec<usize> {
        self.live.clone()
    }

    pub(in crate::world) fn pipe(
        &mut self,
        session: usize,
        connection: usize,
        from: usize,
    ) -> &mut Pipe {
        &mut self.sessions[session].connections[connection][from]
    }

    /// Returns the bytes per second available to the migration from this node.
    pub(in crate::world) fn bandwidth(&self, from: usize, now: u64) -> u64 {
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

    pub(in crate::world) fn enqueue(
        &mut self,
        session: usize,
        connection: usize,
        from: usize,
        frame: Frame,
    ) {
        let limit = self.plan.socket;
        let pipe = self.pipe(session, connection, from);
        pipe.unacknowledged += frame.bytes;
        pipe.queued.push_back(frame);
        pipe.fill(limit);
    }

    /// Starts the link's next turn from this node, if the link is idle and a frame waits. Returns the duration of the
    /// turn.
    pub(in crate::world) fn take_turn(&mut self, from: usize, now: u64) -> Option<u64> {
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
            self.directions[from].turn = Some(Turn {
                session,
                connection,
                bytes,
            });
            self.directions[from].next = place + 1;
            return Some(bytes * 1_000_000_000 / self.bandwidth(from, now));
        }
        None
    }

    /// Ends the link's turn from this node. Returns the connection if a frame has left.
    pub(in crate::world) fn end_turn(&mut self, from: usize) -> Option<Departure> {
        let limit = self.plan.socket;
        let turn = self.directions[from].turn.take()?;
        self.directions[from].carried += turn.bytes;
        self.directions[from].total += turn.bytes;
        let pipe = self.pipe(turn.session, turn.connection, from);
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
        Some(Departure {
            session: turn.session,
            connection: turn.connection,
        })
    }

    /// Returns the arrival time of the youngest frame in flight, which alone would arrive at `at`: frames of one
    /// connection stay in order.
    pub(in crate::world) fn arrival(&mut self, departure: &Departure, from: usize, at: u64) -> u64 {
        let pipe = self.pipe(departure.session, departure.connection, from);
        pipe.last_arrival = at.max(pipe.last_arrival + 1);
        pipe.last_arrival
    }

    /// Marks the next frame in flight as arrived.
    pub(in crate::world) fn arrived(&mut self, session: usize, connection: usize, from: usize) {
        let pipe = self.pipe(session, connection, from);
        if pipe.arrived < pipe.flying.len() {
            let bytes = pipe.flying[pipe.arrived].bytes;
            pipe.arrived += 1;
            pipe.delivered += bytes;
            pipe.unacknowledged -= bytes;
        }
    }

    /// Returns the next arrived frame.
    pub(in crate::world) fn peek(
        &mut self,
        session: usize,
        connection: usize,
        from: usize,
    ) -> Option<Message> {
        let pipe = self.pipe(session, connection, from);
        (pipe.arrived > 0).then(|| pipe.flying.front().map(|frame| frame.message))?
    }

    pub(in crate::world) fn take(
        &mut self,
        session: usize,
        connection: usize,
        from: usize,
    ) -> Option<Frame> {
        let pipe = self.pipe(session, connection, from);
        pipe.arrived -= 1;
        pipe.flying.pop_front()
    }

    /// Stalls the connection: no frame from this node is taken before `until`.
    pub(in crate::world) fn stall(
        &mut self,
        session: usize,
        connection: usize,
        from: usize,
        until: u64,
    ) {
        let pipe = self.pipe(session, connection, from);
        pipe.stalled_until = pipe.stalled_until.max(until);
    }

    pub(in crate::world) fn stalled_until(
        &mut self,
        session: usize,
        connection: usize,
        from: usize,
    ) -> u64 {
        self.pipe(session, connection, from).stalled_until
    }

    /// Drops the unsent frames on a class's connections; returns their number.
    pub(in crate::world) fn discard_unsent(
        &mut self,
        session: usize,
        from: usize,
        class: TrafficClass,
    ) -> u64 {
        let mut dropped = 0;
        for connection in connections(class, self.plan.copy_connections) {
            let pipe = self.pipe(session, connection, from);
            for frame in pipe.queued.drain(..) {
                pipe.unacknowledged -= frame.bytes;
                dropped += 1;
            }
        }
        dropped
    }

    /// Ends a session: no more frames leave a sender. With `deliver`, frames in flight arrive until the receiver
    /// notices. Returns the number of lost frames.
    pub(in crate::world) fn end(&mut self, session: usize, deliver: bool) -> u64 {
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
            if direction.turn.is_some_and(|turn| turn.session == session) {
                direction.next = 0;
            }
        }
        lost
    }

    /// Closes a session in order: frames already sent on the control connection still go out. Returns their number.
    pub(in crate::world) fn flush_control(&mut self, session: usize, from: usize) -> u64 {
        let pipe = self.pipe(session, 0, from);
        let mut moved = 0;
        while let Some(frame) = pipe.socket.pop_front().or_else(|| pipe.queued.pop_front()) {
            pipe.flying.push_back(frame);
            moved += 1;
        }
        moved
    }

    /// Drops all frames to a node that has noticed the end of the session.
    pub(in crate::world) fn forget(&mut self, session: usize, node: usize) {
        let session = &mut self.sessions[session];
        session.noticed[node] = true;
        for connection in &mut session.connections {
            connection[1 - node].drop_flying();
        }
    }
}

/// Returns the connections of a class.
pub(in crate::world) fn connections(
    class: TrafficClass,
    copy_connections: usize,
) -> std::ops::Range<usize> {
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
pub(in crate::world) fn class(connection: usize, copy_connections: usize) -> TrafficClass {
    match connection {
        0 => TrafficClass::Control,
        1 => TrafficClass::Sync,
        other if other < 2 + copy_connections => TrafficClass::Copy,
        _ => TrafficClass::Pull,
    }
}
