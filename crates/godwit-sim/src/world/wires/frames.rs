//! Frames in flight, and the end of connections.

use godwit_core::Limits;
use godwit_core::authority::Ownership;
use godwit_core::units::Generation;
use godwit_core::wire::{HEADER_SIZE, Header, Message, TrafficClass, double_write_id};

use crate::disk::Data;
use crate::run::coverage::Reached;
use crate::world::node::Holder;
use crate::world::wires::forwarding::is_forwarders;
use crate::world::wires::network::{Frame, Way, class, connections};
use crate::world::{MICROSECOND, MILLISECOND, World, name};

/// Returns an upper limit for the frames that wait on one connection. Every request and every slot has one frame in
/// flight in each direction, and as many given up by a pause. Double writes may be posted, and heartbeats stop without
/// answers. A disk that changes hands before the end of the copy announces missing blocks, one by one at worst.
fn most_frames(limits: &Limits, sectors: u64) -> usize {
    let slots =
        limits.requests + u32::from(limits.window_chunks) + u32::from(limits.delayed_chunks);
    sectors.div_ceil(8) as usize + 4 * slots as usize + 2 * limits.posted_writes()
}

impl World {
    pub(crate) fn send(&mut self, node: usize, class: TrafficClass, message: Message) {
        self.check_promise_is_stored(node, &message);
        self.check_counts(&message);
        self.check_posted_are_acknowledged(node, &message);
        let may_be_fetched = matches!(class, TrafficClass::Pull | TrafficClass::Image);
        if may_be_fetched && self.say_to_image(node, class, &message) {
            return;
        }
        let it = &mut self.nodes[node];
        let session = match message {
            message if is_forwarders(&message) => it.sessions.forward,
            _ if class == TrafficClass::Pull => it.sessions.pull,
            _ => it.sessions.migration,
        };
        match message {
            Message::Forward { .. } => {
                let early = matches!(it.store.record.ownership, Ownership::Relinquished { .. });
                self.reached(Reached::Forwarded);
                self.count(Reached::ForwardedEarly, u64::from(early));
            }
            Message::DoubleWrite { tag, turn, .. } => {
                it.doubles.sent(tag, double_write_id(tag, turn));
                self.reached(Reached::DoubleWritten);
            }
            Message::DelayedWrite { .. } => self.reached(Reached::DelayedSent),
            _ => {}
        }
        let data = self.nodes[node].buffers.payload(message.payload());
        if let Some(session) = session {
            self.transmit(session, node, class, message, data);
        }
    }

    fn check_posted_are_acknowledged(&mut self, node: usize, message: &Message) {
        let posted = self.nodes[node].doubles.posted();
        if matches!(message, Message::Prepare { .. }) && !posted.is_empty() {
            let detail = format!("{} waits for {posted:?}", name(node));
            let claim = "acceptance is asked for when every double write is acknowledged";
            self.fail(claim, || detail);
        }
    }

    /// Puts a frame on a connection of its class, through the codec.
    pub(crate) fn transmit(
        &mut self,
        session: usize,
        from: usize,
        class: TrafficClass,
        message: Message,
        data: Data,
    ) {
        if !self.network.sessions[session].alive {
            return;
        }
        let (header, inline, length) = message.encode();
        let bytes: [u8; HEADER_SIZE] = header.encode();
        let decoded = Header::decode(&bytes)
            .ok()
            .and_then(|header| Message::decode(&header, &inline[..length]).ok());
        if decoded != Some(message) || !message.belongs_on(class) {
            let claim = "a frame arrives as it was sent, on its class's connection";
            self.fail(claim, || format!("{message:?} on {class:?}"));
        }
        let range = connections(class, self.network.plan.copy_connections);
        let (first, end) = (range.start as u64, range.end as u64);
        let connection = self.random.link.between(first, end) as usize;
        let way = Way::new(session, connection, from);
        let frame = Frame {
            message,
            data,
            bytes: HEADER_SIZE as u64 + u64::from(header.payload_length),
            number: self.agenda.number(),
        };
        let frames = self.network.enqueue(way, frame).frames();
        if frames > most_frames(&self.plan.limits, self.plan.sectors) {
            self.fail("the frames on a connection are bounded", || {
                frames.to_string()
            });
        }
        self.take_turn(from);
    }

    pub(crate) fn take_turn(&mut self, from: usize) {
        if let Some(takes) = self.network.take_turn(from, self.now) {
            self.schedule(takes, move |world| world.carried(from));
        }
    }

    pub(crate) fn carried(&mut self, from: usize) {
        if let Some(way) = self.network.end_turn(from) {
            let plan = self.network.plan;
            let delay = plan.delay + self.random.link.exponential(plan.jitter);
            let at = self.network.pipe(way).arrival(self.now + delay);
            self.schedule(at - self.now, move |world| world.arrived(way));
        }
        self.take_turn(from);
    }

    fn arrived(&mut self, way: Way) {
        self.network.pipe(way).arrive();
        self.receive(way);
    }

    /// Hands arrived frames to the receiver of a connection, as far as there is room.
    pub(crate) fn receive(&mut self, way: Way) {
        let to = 1 - way.from;
        while let Some(message) = self.network.pipe(way).peek() {
            let stalled = self.network.pipe(way).stalled_until;
            if self.now < stalled {
                return self.schedule(stalled - self.now, move |world| world.receive(way));
            }
            let is_up = self.nodes[to].is_up();
            if is_up && is_forwarders(&message) && !self.follows(to, way.session) {
                return self.nodes[to].buffers.block(way);
            }
            let buffers = &mut self.nodes[to].buffers;
            if is_up && needs_tag(&message) && buffers.free_tags() == 0 {
                buffers.block(way);
                return self.reached(Reached::NoTag);
            }
            let Some(frame) = self.network.pipe(way).take() else {
                return;
            };
            if is_up {
                let class = class(way.connection, self.network.plan.copy_connections);
                self.deliver(way.session, to, class, frame);
            }
        }
    }

    fn deliver(&mut self, session: usize, to: usize, class: TrafficClass, frame: Frame) {
        let (message, number) = (frame.message, frame.number);
        self.mark(number);
        self.note(|| format!("{}  receive {message:?}", name(to)));
        if is_forwarders(&message) {
            return self.deliver_forwarded(session, to, frame);
        }
        let data = frame.data;
        let it = &mut self.nodes[to];
        let mut slot = None;
        match message {
            Message::Fence { .. } if it.sessions.forward == Some(session) => {
                self.look_for_hang_ups(to);
            }
            Message::ForwardReply {
                tag,
                number,
                result,
                ..
            } if it.sessions.forward == Some(session) => {
                let controller = it.controller.as_ref();
                if controller.is_none_or(|c| c.forward_reply_length(tag, number).is_none()) {
                    return;
                }
                if result.is_ok() && data.is_some() {
                    it.buffers.keep_reply(tag, data);
                }
            }
            Message::Fence { .. } | Message::ForwardReply { .. } => return,
            _ if class == TrafficClass::Pull => {
                return self.deliver_pull(session, to, message, data);
            }
            _ if it.sessions.migration != Some(session) => return,
            message if generation_of(&message).is_some() => {
                slot = it.buffers.take(Holder::Replica, data);
                if slot.is_none() {
                    return;
                }
                self.watch_generation(to, &message, number);
            }
            Message::Ack { tag: name, .. } if class == TrafficClass::Sync => {
                it.doubles.acknowledged(name);
            }
            Message::Commit { .. } => self.look_for_hang_ups(to),
            Message::NewGeneration { generation } => {
                it.seen.generation = it.seen.generation.max(generation);
            }
            _ => {}
        }
        self.with(to, |c, now| c.handle_message(now, class, message, slot));
    }

    fn watch_generation(&mut self, to: usize, message: &Message, number: u64) {
        let Some(generation) = generation_of(message) else {
            return;
        };
        let seen = &mut self.nodes[to].seen;
        let stale = generation < seen.generation;
        seen.generation = seen.generation.max(generation);
        if matches!(message, Message::Copy { .. }) {
            let overtaken = number < seen.last_copy;
            seen.last_copy = seen.last_copy.max(number);
            self.count(Reached::StaleCopy, u64::from(stale));
            self.count(Reached::Reordered, u64::from(overtaken));
        }
    }

    /// Loses every connection of a session; both ends notice later.
    pub(crate) fn cut(&mut self, session: usize, notice_within: u64) {
        if !self.network.sessions[session].alive {
            return;
        }
        self.note(|| format!("   session {session} is lost"));
        let deliver = self.random.link.below(2) == 0;
        let lost = self.network.end(session, deliver);
        self.count(Reached::LostInFlight, lost);
        for node in 0..2 {
            let delay = self.random.link.between(MICROSECOND, notice_within);
            self.schedule(delay, move |world| world.notice_loss(session, node));
        }
    }

    /// Closes a session from one node. Its pending control messages usually still arrive.
    pub(crate) fn close(&mut self, session: usize, by: usize) {
        self.network.forget(session, by);
        if !self.network.sessions[session].alive {
            return;
        }
        let orderly = self.random.link.below(4) != 0;
        let moved = if orderly {
            self.network.flush_control(session, by)
        } else {
            0
        };
        self.network.end(session, true);
        let mut at = self.network.plan.delay;
        let control = Way::new(session, 0, by);
        for _ in 0..moved {
            at += self.random.link.between(MICROSECOND, 100 * MICROSECOND);
            self.schedule(at, move |world| world.arrived(control));
        }
        at += self.random.link.between(MICROSECOND, MILLISECOND);
        let node = 1 - by;
        self.schedule(at, move |world| world.notice_loss(session, node));
    }

    /// Tells a node that a session has ended.
    pub(crate) fn notice_loss(&mut self, session: usize, node: usize) {
        if self.network.sessions[session].noticed[node] {
            return;
        }
        self.network.forget(session, node);
        self.note(|| format!("{}  notices that session {session} is lost", name(node)));
        self.stop_serving_session(node, session);
        let sessions = &mut self.nodes[node].sessions;
        if sessions.forward.take_if(|lost| *lost == session).is_some() {
            self.with(node, |c, now| c.handle_forward_lost(now));
            self.schedule_reconnect(node);
        }
        self.lose_pull(session, node);
        if self.nodes[node].sessions.migration == Some(session) {
            let mut classes = [
                TrafficClass::Control,
                TrafficClass::Sync,
                TrafficClass::Copy,
            ];
            classes.swap(0, self.random.link.below(3) as usize);
            for class in classes {
                self.with(node, |c, now| c.handle_connection_lost(now, class));
            }
            let migration = &mut self.nodes[node].sessions.migration;
            migration.take_if(|lost| *lost == session);
            self.lose_primary(node);
        }
    }
}

/// Returns the generation of a frame for the destination's disk.
const fn generation_of(message: &Message) -> Option<Generation> {
    match *message {
        Message::Copy { generation, .. }
        | Message::DoubleWrite { generation, .. }
        | Message::DelayedWrite { generation, .. }
        | Message::Verify { generation, .. }
        | Message::VerifyHole { generation, .. } => Some(generation),
        _ => None,
    }
}

fn needs_tag(message: &Message) -> bool {
    matches!(message, Message::Forward { .. }) || generation_of(message).is_some()
}
