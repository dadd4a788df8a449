//! Frames in flight, and the end of connections.

use godwit_core::Limits;
use godwit_core::authority::Ownership;
use godwit_core::units::Generation;
use godwit_core::wire::{
    HEADER_SIZE, Header, Message, PayloadBuffer, TrafficClass, double_write_id,
};

use crate::disk::Data;
use crate::run::coverage::Reached;
use crate::world::MICROSECOND;
use crate::world::MILLISECOND;
use crate::world::Occurrence;
use crate::world::World;
use crate::world::name;
use crate::world::node::Holder;
use crate::world::wires::forwarding::is_forwarders;
use crate::world::wires::network::{Frame, class, connections};

/// Returns an upper limit for the frames that wait on one connection. Every request and every slot has one frame in
/// flight in each direction, and as many given up by a pause. Double writes may be posted, and heartbeats stop without
/// answers. A disk that changes hands before the end of the copy announces missing blocks, one by one at worst.
fn most_frames(limits: &Limits, sectors: u64) -> usize {
    let slots =
        limits.requests + u32::from(limits.window_chunks) + u32::from(limits.delayed_chunks);
    sectors.div_ceil(8) as usize + 4 * slots as usize + 2 * limits.posted_writes()
}

impl World {
    pub(in crate::world) fn send(&mut self, node: usize, class: TrafficClass, message: Message) {
        self.check_promise_is_stored(node, &message);
        self.check_counts(&message);
        self.check_posted_are_acknowledged(node, &message);
        let may_be_fetched = matches!(class, TrafficClass::Pull | TrafficClass::Image);
        if may_be_fetched && self.say_to_image(node, class, &message) {
            return;
        }
        let it = &mut self.nodes[node];
        let session = match message {
            message if is_forwarders(&message) => it.forward,
            _ if class == TrafficClass::Pull => it.pull,
            _ => it.migration,
        };
        match message {
            Message::Forward { .. } => {
                self.coverage.count(Reached::Forwarded);
                let early = matches!(it.record.ownership, Ownership::Relinquished { .. });
                self.coverage.add(Reached::ForwardedEarly, u64::from(early));
            }
            Message::DoubleWrite { tag, turn, .. } => {
                it.doubled[tag.0 as usize] = Some(double_write_id(tag, turn));
                self.coverage.count(Reached::DoubleWritten);
            }
            Message::DelayedWrite { .. } => self.coverage.count(Reached::DelayedSent),
            _ => {}
        }
        let data = match message.payload() {
            Some(PayloadBuffer::Request(tag)) => it.buffers[tag.0 as usize].clone(),
            Some(PayloadBuffer::Source(slot)) => it.source_buffers.get(&slot).cloned().flatten(),
            None => None,
        };
        if let Some(session) = session {
            self.transmit(session, node, class, message, data);
        }
    }

    fn check_posted_are_acknowledged(&mut self, node: usize, message: &Message) {
        let posted = &self.nodes[node].posted;
        if matches!(message, Message::Prepare { .. }) && !posted.is_empty() {
            let detail = format!("{} waits for {posted:?}", name(node));
            self.fail(
                "acceptance is asked for when every double write is acknowledged",
                || detail,
            );
        }
    }

    /// Puts a frame on a connection of its class, through the codec.
    pub(in crate::world) fn transmit(
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
            self.fail(
                "a frame arrives as it was sent, on its class's connection",
                || format!("{message:?} on {class:?}"),
            );
        }
        let range = connections(class, self.network.plan.copy_connections);
        let connection = self
            .link_random
            .between(range.start as u64, range.end as u64) as usize;
        self.sequence += 1;
        let frame = Frame {
            message,
            data,
            bytes: HEADER_SIZE as u64 + u64::from(header.payload_length),
            number: self.sequence,
        };
        self.network.enqueue(session, connection, from, frame);
        let frames = self.network.pipe(session, connection, from).frames();
        if frames > most_frames(&self.plan.limits, self.plan.sectors) {
            self.fail("the frames on a connection are bounded", || {
                format!("{frames}")
            });
        }
        self.take_turn(from);
    }

    pub(in crate::world) fn take_turn(&mut self, from: usize) {
        if let Some(takes) = self.network.take_turn(from, self.now) {
            self.schedule(takes, Occurrence::Carried { from });
        }
    }

    pub(in crate::world) fn carried(&mut self, from: usize) {
        if let Some(departure) = self.network.end_turn(from) {
            let plan = self.network.plan;
            let delay = plan.delay + self.link_random.exponential(plan.jitter);
            let at = self.network.arrival(&departure, from, self.now + delay);
            self.schedule(
                at - self.now,
                Occurrence::Arrived {
                    from,
                    session: departure.session,
                    connection: departure.connection,
                },
            );
        }
        self.take_turn(from);
    }

    /// Hands arrived frames to the receiver of a connection, as far as there is room.
    pub(in crate::world) fn receive(&mut self, from: usize, session: usize, connection: usize) {
        let to = 1 - from;
        while let Some(message) = self.network.peek(session, connection, from) {
            let stalled = self.network.stalled_until(session, connection, from);
            if self.now < stalled {
                self.schedule(
                    stalled - self.now,
                    Occurrence::Unblocked {
                        from,
                        session,
                        connection,
                    },
                );
                return;
            }
            let waits =
                is_forwarders(&message) && self.nodes[to].is_up() && !self.follows(to, session);
            let it = &mut self.nodes[to];
            if waits {
                if !it.blocked.contains(&(session, connection)) {
                    it.blocked.push((session, connection));
                }
                return;
            }
            if it.is_up() && needs_tag(&message) && it.free_tags.is_empty() {
                if !it.blocked.contains(&(session, connection)) {
                    it.blocked.push((session, connection));
                }
                self.reached(Reached::NoTag);
                return;
            }
            let Some(frame) = self.network.take(session, connection, from) else {
                return;
            };
            if self.nodes[to].is_up() {
                let class = class(connection, self.network.plan.copy_connections);
                self.deliver(session, to, class, frame);
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
        match message {
            Message::Fence { .. } => {
                if it.forward == Some(session) {
                    self.look_for_hang_ups(to);
                    self.with(to, |c, now| c.handle_message(now, class, message, None));
                }
            }
            Message::ForwardReply {
                tag,
                number,
                result,
                ..
            } => {
                let expected = it.forward == Some(session)
                    && it
                        .controller
                        .as_ref()
                        .is_some_and(|c| c.forward_reply_length(tag, number).is_some());
                if expected {
                    if result.is_ok() && data.is_some() {
                        it.buffers[tag.0 as usize] = data;
                    }
                    self.with(to, |c, now| c.handle_message(now, class, message, None));
                }
            }
            _ if class == TrafficClass::Pull => self.deliver_pull(session, to, message, data),
            _ if it.migration != Some(session) => {}
            Message::Copy { .. }
            | Message::DoubleWrite { .. }
            | Message::DelayedWrite { .. }
            | Message::Verify { .. }
            | Message::VerifyHole { .. } => {
                let Some(tag) = it.take_tag(Holder::Replica, data) else {
                    return;
                };
                self.watch_generation(to, &message, number);
                self.with(to, |c, now| {
                    c.handle_message(now, class, message, Some(tag))
                });
            }
            _ => {
                if let (Message::Ack { tag: id, .. }, TrafficClass::Sync) = (message, class) {
                    it.posted.retain(|posted| *posted != id);
                    for doubled in &mut it.doubled {
                        doubled.take_if(|doubled| *doubled == id);
                    }
                }
                if let Message::Commit { .. } = message {
                    self.look_for_hang_ups(to);
                }
                let it = &mut self.nodes[to];
                if let Message::NewGeneration { generation } = message {
                    it.generation = it.generation.max(generation);
                }
                self.with(to, |c, now| c.handle_message(now, class, message, None));
            }
        }
    }

    fn watch_generation(&mut self, to: usize, message: &Message, number: u64) {
        let it = &mut self.nodes[to];
        let (Message::Copy { generation, .. }
        | Message::DoubleWrite { generation, .. }
        | Message::DelayedWrite { generation, .. }
        | Message::Verify { generation, .. }
        | Message::VerifyHole { generation, .. }) = *message
        else {
            return;
        };
        let stale = generation < it.generation;
        it.generation = it.generation.max(generation);
        if matches!(message, Message::Copy { .. }) {
            let overtaken = number < it.last_copy;
            it.last_copy = it.last_copy.max(number);
            self.coverage.add(Reached::StaleCopy, u64::from(stale));
            self.coverage.add(Reached::Reordered, u64::from(overtaken));
        }
    }

    /// Loses every connection of a session; both ends notice later.
    pub(in crate::world) fn cut(&mut self, session: usize, notice_within: u64) {
        if !self.network.sessions[session].alive {
            return;
        }
        self.note(|| format!("   session {session} is lost"));
        let deliver = self.link_random.below(2) == 0;
        let lost = self.network.end(session, deliver);
        self.coverage.add(Reached::LostInFlight, lost);
        for node in 0..2 {
            let delay = self.link_random.between(MICROSECOND, notice_within);
            self.schedule(delay, Occurrence::Lost { session, node });
        }
    }

    /// Closes a session from one node. Its pending control messages usually still arrive.
    pub(in crate::world) fn close(&mut self, session: usize, by: usize) {
        self.network.forget(session, by);
        if !self.network.sessions[session].alive {
            return;
        }
        let orderly = self.link_random.below(4) != 0;
        let moved = if orderly {
            self.network.flush_control(session, by)
        } else {
            0
        };
        self.network.end(session, true);
        let mut at = self.network.plan.delay;
        for _ in 0..moved {
            at += self.link_random.between(MICROSECOND, 100 * MICROSECOND);
            self.schedule(
                at,
                Occurrence::Arrived {
                    from: by,
                    session,
                    connection: 0,
                },
            );
        }
        at += self.link_random.between(MICROSECOND, MILLISECOND);
        let node = 1 - by;
        self.schedule(at, Occurrence::Lost { session, node });
    }

    /// Tells a node that a session has ended.
    pub(in crate::world) fn notice_loss(&mut self, session: usize, node: usize) {
        if self.network.sessions[session].noticed[node] {
            return;
        }
        self.network.forget(session, node);
        self.note(|| format!("{}  notices that session {session} is lost", name(node)));
        self.stop_serving_session(node, session);
        if self.nodes[node].forward == Some(session) {
            self.nodes[node].forward = None;
            self.with(node, |controller, now| controller.handle_forward_lost(now));
            self.schedule_reconnect(node);
        }
        self.lose_pull(session, node);
        if self.nodes[node].migration == Some(session) {
            let mut classes = [
                TrafficClass::Control,
                TrafficClass::Sync,
                TrafficClass::Copy,
            ];
            classes.swap(0, self.link_random.below(3) as usize);
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

    pub(in crate::world) fn forget_generation(&mut self, node: usize) {
        self.nodes[node].generation = Generation(0);
        self.nodes[node].last_copy = 0;
    }
}

fn needs_tag(message: &Message) -> bool {
    matches!(
        message,
        Message::Forward { .. }
            | Message::Copy { .. }
            | Message::DoubleWrite { .. }
            | Message::DelayedWrite { .. }
            | Message::Verify { .. }
            | Message::VerifyHole { .. }
    )
}
