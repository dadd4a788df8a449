//! Packets between the guest's rings and the uplink.

use std::time::Instant;

use godwit_vhost::memory::LOST_PAGES;

use crate::device::queues::receive::{Given, give};
use crate::device::queues::ring::{Broken, Guest, NetRing};
use crate::device::queues::transmit::{Way, transmit};
use crate::device::session::{receive_ring, transmit_ring};
use crate::device::worker::{COMES_TO_THEM, LOOKS, UPLINK_RESTS, Worker};
use crate::frame::packet::{HEADER, TELLS_SENDER, set_queue};
use crate::state::nic::Fate;

/// Most packets read at once from a queue to be drained.
const DRAIN: usize = 1 << 16;

/// Most packets for the guest, and most of the gate, in one turn through each queue pair.
const TURN: usize = 256;

/// The thread's view of a queue pair.
#[derive(Debug, Default)]
pub(super) struct Pair {
    /// True while epoll watches the pair's uplink queue.
    pub(super) watches_uplink: bool,
    /// True if the pair's uplink queue may have packets.
    pub(super) may_bring: bool,
    /// True if the guest may have room for a packet.
    pub(super) room: bool,
    /// True if the guest has processed packets since this turn's transmit; more packets follow in the next turn.
    comes_on: bool,
    /// Time since which the guest has processed none of its packets.
    ahead_since: Option<Instant>,
    /// Time of the next check for processed packets.
    pub(super) looks_at: Option<Instant>,
    /// Packets received by the guest through the pair on this node.
    pub(super) received: u64,
    /// Packets sent by the guest through the pair on this node, including dropped packets.
    pub(super) sent: u64,
}

impl Pair {
    pub(super) fn guest_may_have_room(&mut self) {
        self.room = true;
        self.is_not_ahead();
    }

    pub(super) fn is_not_ahead(&mut self) {
        self.ahead_since = None;
        self.looks_at = None;
    }
}

impl Worker {
    /// Returns the pair for packets of an uplink queue: the queue's own pair, or the first used pair if the guest does
    /// not use that pair.
    pub(super) fn pair_for(&self, queue: usize) -> Option<usize> {
        let session = self.session.as_ref()?;
        let is_used = |pair: &usize| session.may_serve(receive_ring(*pair));
        let own = queue % self.pairs.len();
        Some(own)
            .filter(is_used)
            .or_else(|| (0..self.pairs.len()).find(is_used))
    }

    /// Returns true if the guest may have room for packets of an uplink queue.
    pub(super) fn has_room(&self, queue: usize) -> bool {
        self.pair_with_room(queue).is_some()
    }

    /// Returns the pair for packets of an uplink queue if the guest may have room.
    ///
    /// A front end starts one ring after the other, and the guest may run before this thread has seen the last start.
    /// Held packets therefore wait until the pair's transmit ring, which carries the answers, is served too.
    fn pair_with_room(&self, queue: usize) -> Option<usize> {
        let pair = self.pair_for(queue)?;
        let session = self.session.as_ref()?;
        let may_answer = !self.nic.keeps_all() || session.may_serve(transmit_ring(pair));
        (may_answer && self.pairs[pair].room).then_some(pair)
    }

    /// Runs one turn: sends packets from the guest, then gives packets to the guest. Returns true if there is more.
    ///
    /// A processed packet has been answered by the guest. The next packet goes to the guest only when the answer has
    /// been taken. Otherwise answers would pile up in the guest whenever this thread pauses in between.
    pub(super) fn turn(&mut self) -> bool {
        self.send() | self.receive()
    }

    /// Sees how far the guest has come, and then sends the guest's packets. Returns true if there is more.
    fn send(&mut self) -> bool {
        self.at_each_ring(Self::see_offered);
        if self.nic.keeps_all() {
            self.look_for_answers();
        }
        self.transmit()
    }

    /// Looks for answers of which the guest has not notified yet. A ring without any stays untouched: a new
    /// notification request would write to the guest's memory.
    fn look_for_answers(&mut self) {
        for pair in 0..self.pairs.len() {
            let index = transmit_ring(pair);
            let Some((ring, guest)) = self.session.as_mut().and_then(|s| s.serve(index)) else {
                continue;
            };
            match ring.split.available(guest.ram.memory()) {
                Ok(available) => ring.ready |= available != ring.split.base(),
                Err(why) => self.break_ring(index, &why.into()),
            }
        }
    }

    /// Sends the packets of the gate that may leave. Returns true if there may be more.
    fn let_leave(&mut self) -> bool {
        let mut more = false;
        for pair in 0..self.pairs.len() {
            let mut left = 0;
            while left < TURN
                && self.nic.may_transmit()
                && let Some(packet) = self.nic.gate_mut().next(pair)
            {
                let frame = &packet[HEADER..];
                match self.uplink.write(pair, &packet) {
                    Ok(()) => self
                        .nic
                        .sent(&frame[..frame.len().min(TELLS_SENDER)], frame.len()),
                    Err(_) => self.nic.refused(),
                }
                left += 1;
            }
            more |= left == TURN;
        }
        more
    }

    /// Sends the guest's packets. Returns true if there is more.
    fn transmit(&mut self) -> bool {
        if self.let_leave() {
            // The packets in the rings follow those of the gate.
            return true;
        }
        let mut more = false;
        for pair in 0..self.pairs.len() {
            let index = transmit_ring(pair);
            let Some(session) = &mut self.session else {
                return false;
            };
            // Packets in a ring no longer used by the guest are dropped. If they stayed there, the guest's sockets
            // would wait for completion.
            let (served, way) = match session.may_serve(index) {
                true => {
                    let uplink = &self.uplink;
                    let queue = pair;
                    (session.serve(index), Some(Way { uplink, queue }))
                }
                false => (session.discard(index), None),
            };
            let Some((ring, guest)) = served.filter(|(ring, _)| ring.ready) else {
                continue;
            };
            let base = ring.split.base();
            let moved = transmit(ring, guest, &mut self.nic, way, &mut self.space)
                .and_then(|more| ring.publish(guest).map(|()| more));
            self.pairs[pair].sent += u64::from(ring.split.base().wrapping_sub(base));
            match moved {
                Ok(rest) => more |= rest,
                Err(why) => self.break_ring(index, &why),
            }
        }
        more
    }

    /// Gives the guest its held packets, then the packets of the uplink. Returns true if there is more.
    fn receive(&mut self) -> bool {
        let mut more = self.give_held();
        for queue in 0..self.pairs.len() {
            more |= self.pass(queue);
        }
        more |= self.give_held();
        // The next server of the ring relies on this order: buffers taken never exceed buffers seen as offered.
        self.at_each_ring(Self::see_offered);
        self.at_each_ring(|worker, pair| match worker.receives(pair) {
            Some((ring, guest)) => ring.publish(guest),
            None => Ok(()),
        });
        for pair in &mut self.pairs {
            if std::mem::take(&mut pair.comes_on) {
                pair.room = true;
                more = true;
            }
        }
        more
    }

    fn receives(&mut self, pair: usize) -> Option<(&mut NetRing, Guest<'_>)> {
        self.session.as_mut()?.serve(receive_ring(pair))
    }

    /// Runs `act` for each pair; a failure breaks the pair's receive ring.
    fn at_each_ring(&mut self, act: impl Fn(&mut Self, usize) -> Result<(), Broken>) {
        for pair in 0..self.pairs.len() {
            if let Err(why) = act(self, pair) {
                self.break_ring(receive_ring(pair), &why);
            }
        }
    }

    /// Updates the pair's pace from the number of buffers that the guest has offered.
    fn see_offered(&mut self, pair: usize) -> Result<(), Broken> {
        if let Some((ring, guest)) = self.receives(pair) {
            let available = ring.split.available(guest.ram.memory())?;
            self.nic.pace(pair).offered(available);
        }
        Ok(())
    }

    /// Gives the guest held packets in order, each through the queue's pair. Packets of a pair without room wait, and
    /// others pass them. Returns true if there are more and the guest may have room.
    fn give_held(&mut self) -> bool {
        for _ in 0..TURN {
            let Some(queue) = self.nic.next_for_guest(|queue| self.has_room(queue)) else {
                return false;
            };
            let Some(pair) = self.pair_for(queue) else {
                return false;
            };
            if let Err(why) = self.give_first(queue, pair) {
                self.break_ring(receive_ring(pair), &why);
            }
        }
        true
    }

    /// Gives the guest the first held packet of a queue through a pair.
    fn give_first(&mut self, queue: usize, pair: usize) -> Result<(), Broken> {
        if self.nic.is_ahead(pair) {
            return self.wait_for_guest(pair);
        }
        let served = self.session.as_mut();
        let served = served.and_then(|s| s.serve(receive_ring(pair)));
        let (Some((ring, guest)), Some(packet)) = (served, self.nic.for_guest(queue)) else {
            return Ok(());
        };
        let bytes = packet.len() - HEADER;
        let given = give(ring, guest, &mut self.space.buffers, packet);
        // The queue number is restored in case the packet stays: another ring may take the packet.
        set_queue(packet, queue as u16);
        match given? {
            Given::Taken(buffers) => {
                self.nic.took_first(queue);
                self.received(pair, bytes, buffers);
            }
            Given::TooLarge => {
                self.nic.took_first(queue);
                self.nic.was_too_large();
            }
            Given::NoRoom | Given::Lost => self.pairs[pair].room = false,
        }
        Ok(())
    }

    fn received(&mut self, pair: usize, bytes: usize, buffers: u16) {
        self.nic.received(pair, bytes, buffers);
        self.pairs[pair].received += 1;
    }

    /// Passes on the packets of an uplink queue. Returns true if there are more and the guest may have room.
    fn pass(&mut self, queue: usize) -> bool {
        for _ in 0..TURN {
            let pair = self.pair_with_room(queue);
            match self.pass_one(queue, pair) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(why) => self.break_ring(receive_ring(pair.unwrap_or(0)), &why),
            }
        }
        true
    }

    /// Passes on one packet, through the pair `room` if given. Returns false if the queue has no packet, or if the
    /// packet has nowhere to go.
    fn pass_one(&mut self, queue: usize, room: Option<usize>) -> Result<bool, Broken> {
        if let Some(pair) = room
            && self.nic.is_ahead(pair)
        {
            self.wait_for_guest(pair)?;
            return Ok(true);
        }
        let Some((length, fate)) = self.read_uplink(queue, room.is_some()) else {
            return Ok(false);
        };
        let Some(pair) = room.filter(|_| fate == Fate::Deliver) else {
            return Ok(true);
        };
        let served = self.session.as_mut();
        let Some((ring, guest)) = served.and_then(|s| s.serve(receive_ring(pair))) else {
            return Ok(false);
        };
        let packet = &mut self.space.packet[..length];
        match give(ring, guest, &mut self.space.buffers, packet)? {
            Given::Taken(buffers) => self.received(pair, length - HEADER, buffers),
            Given::TooLarge => self.nic.was_too_large(),
            Given::NoRoom | Given::Lost => {
                self.pairs[pair].room = false;
                set_queue(packet, queue as u16);
                self.nic.put_off(packet);
            }
        }
        Ok(true)
    }

    /// Handles a guest that has as many unprocessed packets as allowed. The guest gets more once some are processed and
    /// the answers are sent.
    fn wait_for_guest(&mut self, pair: usize) -> Result<(), Broken> {
        let served = self.session.as_mut();
        let Some((ring, guest)) = served.and_then(|s| s.serve(receive_ring(pair))) else {
            return Ok(());
        };
        let memory = guest.ram.memory();
        // A guest offers buffers again before asking for a signal. In the other order of reading, the guest might seem
        // to offer late.
        let is_all_seen = ring.split.is_all_seen(memory)?;
        let available = ring.split.available(memory)?;
        let state = &mut self.pairs[pair];
        if available != self.nic.pace(pair).offered_so_far() {
            state.is_not_ahead();
            state.room = false;
            state.comes_on = true;
            return Ok(());
        }
        let now = Instant::now();
        let since = *state.ahead_since.get_or_insert(now);
        if is_all_seen || now >= since + COMES_TO_THEM {
            tracing::debug!(
                nic = self.shared.name,
                "the guest offers its buffers again late: it is given what fits"
            );
            self.nic.pace(pair).lift();
            state.is_not_ahead();
        } else if !ring.rest_behind(guest, available)? {
            state.room = false;
            state.looks_at = Some(now + LOOKS);
        }
        Ok(())
    }

    /// Reads a packet from an uplink queue, if a packet is wanted and there.
    fn read_uplink(&mut self, queue: usize, guest_has_room: bool) -> Option<(usize, Fate)> {
        let is_left_alone = self.uplink_rests.is_some() || !self.pairs[queue].may_bring;
        if is_left_alone || !self.nic.wants_uplink(queue, guest_has_room) {
            return None;
        }
        match self.uplink.read(queue, &mut self.space.packet) {
            Ok(Some(length)) => {
                let packet = &mut self.space.packet[..length];
                set_queue(packet, queue as u16);
                let fate = self.nic.from_uplink(packet, guest_has_room);
                if fate == Fate::Announced {
                    self.announced_by(queue);
                }
                Some((length, fate))
            }
            Ok(None) => {
                self.pairs[queue].may_bring = false;
                None
            }
            Err(error) => {
                tracing::debug!(nic = self.shared.name, %error, "the uplink cannot be read");
                self.uplink_rests = Some(Instant::now() + UPLINK_RESTS);
                None
            }
        }
    }

    /// Handles the VM's announcement from the destination, seen in an uplink queue. The other queues still have packets
    /// that the switch sent before the announcement.
    fn announced_by(&mut self, queue: usize) {
        for other in (0..self.pairs.len()).filter(|other| *other != queue) {
            for _ in 0..DRAIN {
                // All packets of the queue are held first, even if the queue has the announcement too.
                if self.read_aside(other).is_none() {
                    break;
                }
            }
        }
        self.nic.announced();
    }

    /// Reads all packets of the uplink, without giving any to the guest at once.
    pub(super) fn drain(&mut self) {
        for queue in 0..self.pairs.len() {
            for _ in 0..DRAIN {
                match self.read_aside(queue) {
                    Some(Fate::Announced) => self.announced_by(queue),
                    Some(_) => {}
                    None => break,
                }
            }
        }
    }

    /// Reads a packet from an uplink queue, if there is one, without giving the packet to the guest at once.
    fn read_aside(&mut self, queue: usize) -> Option<Fate> {
        let length = self.uplink.read(queue, &mut self.space.packet).ok()??;
        let packet = &mut self.space.packet[..length];
        set_queue(packet, queue as u16);
        Some(self.nic.from_uplink(packet, false))
    }

    /// Drops the packets waiting here and in the uplink: they were for the guest's previous driver.
    pub(super) fn start_anew(&mut self) {
        self.nic.starts_anew();
        for queue in 0..self.pairs.len() {
            for _ in 0..DRAIN {
                let Ok(Some(_)) = self.uplink.read(queue, &mut self.space.packet) else {
                    break;
                };
            }
        }
    }

    /// Disconnects the VM if pages of its shared memory are lost.
    pub(super) fn look_for_lost_pages(&mut self) {
        let Some(session) = self.session.as_ref().filter(|it| it.has_lost_pages()) else {
            return;
        };
        if !std::mem::replace(&mut self.lost_pages, true) {
            let nic = &self.shared.name;
            tracing::error!(nic, "the virtual machine is disconnected: {LOST_PAGES}");
            // The protocol's thread sees the hang-up, and detaches the VM.
            session.hang_up();
        }
    }

    pub(super) fn break_ring(&mut self, index: usize, why: &Broken) {
        let Some(session) = self.session.as_mut().filter(|it| !it.has_lost_pages()) else {
            return;
        };
        let Some(ring) = session.rings[index].as_deref_mut() else {
            return;
        };
        if std::mem::replace(&mut ring.broken, true) {
            return;
        }
        tracing::error!(
            nic = self.shared.name,
            ring = index,
            "device broken: {why}; the ring is not served until the guest resets the device"
        );
        if let Some(error) = &ring.error {
            error.signal();
        }
    }
}

#[cfg(test)]
#[path = "traffic_tests.rs"]
mod tests;
