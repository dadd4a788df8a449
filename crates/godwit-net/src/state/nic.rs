//! The NIC, which decides about each packet.
//!
//! Paper 004 (section 3.1) gives a virtual function a *working* mode of two kinds, *releasing* and *buffering*, and a
//! *clone* mode. Here:
//!
//! - releasing: packets of the guest leave, and packets of the uplink reach the guest;
//! - buffering: packets offered by the guest stay in the ring, because the device's tail stops while the guest's tail
//!   goes on, so nothing is copied; packets of the uplink are held, in the order of each queue;
//! - clone: nothing moves, so the complete state can be read or written at once. An arriving NIC is in this mode until
//!   the VM runs at the node; packets that the uplink brings before then belong to the source.
//!
//! A protected machine stays in releasing mode, and the [gate](super::gate) holds packets of the guest alone back.
//!
//! The source continues to receive until the network knows the destination. The announcement of the destination is a
//! broadcast. Once the announcement reaches the source, the network brings no more packets for the VM to the source.
//! The destination holds the newer packets of its own uplink back until all packets of the source have arrived
//! ([`Nic::late`], [`Nic::late_ended`]).

use std::time::Duration;

use crate::clone::State;
use crate::frame::announce::{self, Token};
use crate::frame::packet::{SMALLEST, destination, frame_of, queue_of, sender, station};
use crate::mac::Mac;
use crate::state::counters::Counters;
use crate::state::gate::Gate;
use crate::state::held::{HeldPackets, Packet};
use crate::state::pace::Pace;
use crate::state::stations::{Station, Stations};
use crate::state::twins::{CameTo, Twins};

/// The mode of a NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Packets pass.
    Releasing,
    /// Packets are held back in both directions.
    Buffering,
    /// Nothing moves.
    Clone,
}

impl Mode {
    /// Returns the mode's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Releasing => "releasing",
            Self::Buffering => "buffering",
            Self::Clone => "clone",
        }
    }
}

/// The fate of a packet from the uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The guest gets the packet now.
    Deliver,
    /// The guest gets the packet later, here or at the destination.
    Held,
    /// The packet is dropped.
    Dropped,
    /// The packet is the VM's announcement from the destination, and is dropped. [`Nic::announced`] follows once the
    /// packets in the other uplink queues are held too, since some of them came before the announcement.
    Announced,
}

/// The reason why a state cannot be taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The NIC is not in clone mode.
    #[error("the state of a NIC can only be written while the NIC is in clone mode")]
    Working,
    /// The state belongs to another NIC.
    #[error("the state is that of the NIC {theirs}, and this is {own}")]
    Another {
        /// MAC address of the state.
        theirs: Mac,
        /// MAC address of this NIC.
        own: Mac,
    },
    /// The state has another number of queue pairs.
    #[error("the state is that of a NIC with {theirs} pairs of queues, and this has {own}")]
    Pairs {
        /// Queue pairs of the state.
        theirs: usize,
        /// Queue pairs of this NIC.
        own: usize,
    },
}

/// A NIC.
#[derive(Clone, Debug)]
pub struct Nic {
    mac: Mac,
    mode: Mode,
    held: HeldPackets,
    /// Packets of the guest that wait for a checkpoint. No part of the state: a protected machine does not move.
    gate: Gate,
    /// Pace of each queue pair.
    paces: Vec<Pace>,
    /// True while packets for which the guest has no room are held instead of left in the uplink, whose queue is short.
    keeps_all: bool,
    /// Token in the announcement of the current or last move.
    token: Token,
    /// Packets from the NIC's own uplink while older packets of the source are awaited. The guest gets none before all
    /// packets are in order.
    newer: Option<HeldPackets>,
    /// Packets brought to both nodes by a move, for some time after the move.
    twins: Option<Twins>,
    /// True if the VM's announcement from the destination was seen here.
    announced_elsewhere: bool,
    /// Stations from which the guest sent lately.
    stations: Stations,
    /// Time since the NIC was made.
    now: Duration,
    counters: Counters,
}

impl Nic {
    /// Creates the NIC of a VM that starts here.
    pub fn new(mac: Mac) -> Self {
        Self {
            mac,
            mode: Mode::Releasing,
            held: HeldPackets::new(1),
            gate: Gate::new(1),
            paces: vec![Pace::default()],
            keeps_all: false,
            token: Token::default(),
            newer: None,
            twins: None,
            announced_elsewhere: false,
            stations: Stations::default(),
            now: Duration::ZERO,
            counters: Counters::default(),
        }
    }

    /// Creates the NIC of a VM that is to arrive here.
    pub fn arriving(mac: Mac) -> Self {
        Self {
            mode: Mode::Clone,
            ..Self::new(mac)
        }
    }

    /// Sets the number of queue pairs.
    pub fn with_pairs(self, pairs: usize) -> Self {
        Self {
            paces: vec![Pace::default(); pairs],
            held: HeldPackets::new(pairs),
            gate: Gate::new(pairs),
            ..self
        }
    }

    /// Returns the NIC's MAC address.
    pub const fn mac(&self) -> Mac {
        self.mac
    }

    /// Returns the current mode.
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the counters.
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the number of packets waiting for the guest.
    pub fn waiting(&self) -> usize {
        self.held.len() + self.newer.as_ref().map_or(0, HeldPackets::len)
    }

    /// Sets the time since the NIC was made.
    pub const fn time_is(&mut self, now: Duration) {
        self.now = now;
    }

    /// Returns the stations from which the guest sent lately, the most recent first.
    pub fn stations(&self) -> impl Iterator<Item = Station> {
        self.stations
            .remembered(self.now)
            .map(|(station, _)| station)
    }

    /// Starts to hold packets back. The device's tail stays in place. If the VM moves on before all packets of the
    /// previous source have come, the packets here move along. The token must be unique to the move and unpredictable.
    pub fn buffer(&mut self, token: Token) {
        self.late_ended();
        self.token = token;
        self.mode = Mode::Buffering;
        self.announced_elsewhere = false;
    }

    /// Lets packets pass again, held packets first.
    pub fn release(&mut self) {
        self.mode = Mode::Releasing;
    }

    /// Returns the complete state, read while nothing moves. Held packets are copied and stay.
    pub fn read_state(&mut self) -> State {
        let mode = std::mem::replace(&mut self.mode, Mode::Clone);
        let state = State {
            mac: self.mac,
            counters: self.counters,
            stations: self.stations.remembered(self.now).collect(),
            paces: self.paces.clone(),
            token: self.token,
            held: self.held.copy_all(),
        };
        self.mode = mode;
        state
    }

    /// Takes over a state.
    ///
    /// # Errors
    /// If the NIC is not in clone mode, or the state is of another NIC or has another number of queue pairs.
    pub fn write_state(&mut self, state: State) -> Result<(), RestoreError> {
        if self.mode != Mode::Clone {
            return Err(RestoreError::Working);
        }
        if state.mac != self.mac {
            return Err(RestoreError::Another {
                theirs: state.mac,
                own: self.mac,
            });
        }
        if state.paces.len() != self.paces.len() {
            return Err(RestoreError::Pairs {
                theirs: state.paces.len(),
                own: self.paces.len(),
            });
        }
        self.counters = state.counters;
        self.stations = Stations::from_told(&state.stations, self.now);
        self.paces = state.paces;
        self.token = state.token;
        self.twins = Some(Twins::default());
        self.held.clear();
        for packet in state.held {
            self.hold(packet);
        }
        Ok(())
    }

    /// Starts to work at the destination. Returns the announcement frames, which must leave before any packet of the
    /// guest. `late` is true if [`Self::late_ended`] will be called.
    pub fn take_over(&mut self, late: bool) -> Vec<Vec<u8>> {
        self.mode = Mode::Releasing;
        self.newer = late.then(|| HeldPackets::new(1));
        self.twins = self.twins.take().filter(|_| late);
        self.counters.moves += 1;
        self.announcements()
    }

    /// Returns the frames that announce the VM: for the NIC's own address, and for each station from which the guest
    /// sent lately. The frames name no addresses of other protocols, which only the guest knows for certain.
    pub fn announcements(&self) -> Vec<Vec<u8>> {
        self.announcements_with(self.mac)
    }

    /// Returns the announcement frames with the address that the VM's front end names in the place of the NIC's own.
    pub fn announcements_with(&self, mac: Mac) -> Vec<Vec<u8>> {
        let named = Station { mac, vlan: None };
        let others = self.stations().filter(|station| *station != named);
        let is_ones = !mac.is_group() && mac != Mac::NOBODY;
        let named = is_ones.then_some(named);
        let all = named.into_iter().chain(others);
        all.map(|station| announce::rarp(station, self.token))
            .collect()
    }

    /// Adds a packet that reached the source before the network knew the destination.
    pub fn late(&mut self, packet: Packet) {
        self.take(packet, CameTo::Former);
    }

    /// Counts packets of the source that found no room on their way here.
    pub const fn late_lost(&mut self, count: u64) {
        self.counters.held += count;
        self.counters.held_overflow += count;
    }

    /// Ends the wait for packets of the source. Packets that came here meanwhile follow.
    pub fn late_ended(&mut self) {
        let newer = self.newer.take().map(|mut newer| newer.take());
        for packet in newer.into_iter().flatten() {
            // The packet was counted as held on arrival.
            if !self.held.push(packet) {
                self.counters.held_overflow += 1;
            }
        }
    }

    /// Returns true while packets of the source are awaited.
    pub const fn awaits_late(&self) -> bool {
        self.newer.is_some()
    }

    /// Ends the search for duplicates: both nodes no longer get the same packets.
    pub fn twins_ended(&mut self) {
        self.twins = None;
    }

    /// Holds a packet for the guest, unless the guest has the packet already through the other node.
    fn take(&mut self, packet: Packet, came_to: CameTo) -> Fate {
        if self.is_twin(&packet, came_to) {
            return Fate::Dropped;
        }
        self.counters.held += 1;
        let held = match (&mut self.newer, came_to) {
            (Some(newer), CameTo::New) => newer,
            _ => &mut self.held,
        };
        if !held.has_room_for(packet.len()) {
            if let Some(twins) = &mut self.twins {
                twins.was_lost(&packet, came_to, self.now);
            }
            self.counters.held_overflow += 1;
            return Fate::Dropped;
        }
        let _ = held.push(packet);
        Fate::Held
    }

    fn is_twin(&mut self, packet: &[u8], came_to: CameTo) -> bool {
        let twins = self.twins.as_mut();
        let is_twin = twins.is_some_and(|twins| twins.is_one(packet, came_to, self.now));
        self.counters.twins_dropped += u64::from(is_twin);
        is_twin
    }

    /// Copies the packets that came since the last copy, for the destination.
    pub fn copy_new(&mut self) -> Vec<Packet> {
        self.held.copy_new()
    }

    /// Returns true if the network brings no more packets for the VM here, except packets that the announcement has
    /// overtaken.
    pub const fn is_announced_elsewhere(&self) -> bool {
        self.announced_elsewhere
    }

    /// Sets whether packets are held, instead of left in the uplink, while the guest has no room. The setting is on
    /// while the VM moves or is paused and for some time after, and off otherwise, since holding costs a copy.
    pub const fn keep_all(&mut self, keeps: bool) {
        self.keeps_all = keeps;
    }

    /// Returns true if packets are held while the guest has no room for them.
    pub const fn keeps_all(&self) -> bool {
        self.keeps_all
    }

    /// Returns true if packets of an uplink queue are to be read. In releasing mode, packets wait in the uplink while
    /// the guest has no room.
    pub fn wants_uplink(&self, queue: usize, guest_has_room: bool) -> bool {
        match self.mode {
            Mode::Buffering | Mode::Clone => true,
            Mode::Releasing if self.awaits_late() => true,
            Mode::Releasing => {
                self.is_next(queue, guest_has_room) || self.keeps_all && self.held.has_room()
            }
        }
    }

    /// Returns true if the guest gets the next packet of an uplink queue at once. Order is kept within each queue only,
    /// so that a queue without room does not stop the others.
    fn is_next(&self, queue: usize, guest_has_room: bool) -> bool {
        guest_has_room && self.held.has_none_of(queue)
    }

    /// Decides about a packet of the uplink queue in the packet's header ([`queue_of`]). If the fate is `Held`, the NIC
    /// has taken a copy.
    pub fn from_uplink(&mut self, packet: &[u8], guest_has_room: bool) -> Fate {
        if packet.len() < SMALLEST {
            return Fate::Dropped;
        }
        let is_next = self.is_next(queue_of(packet), guest_has_room);
        match self.mode {
            Mode::Clone => {
                if let Some(twins) = &mut self.twins {
                    twins.leave(packet, self.now);
                }
                Fate::Dropped
            }
            // Broadcasts reach the destination too. Packets for this VM alone may not: a switch with several processors
            // may deliver a packet a moment after the announcement, although the packet came first. Packets for a group
            // may not either, if switches track the listeners, until the guest has joined at the destination.
            Mode::Buffering if self.announced_elsewhere && !self.may_miss_new_place(packet) => {
                Fate::Dropped
            }
            Mode::Buffering => {
                if frame_of(packet).is_some_and(|frame| announce::is_rarp_of(frame, self.token)) {
                    return Fate::Announced;
                }
                self.hold(packet.into())
            }
            Mode::Releasing => {
                if let Some(from) = frame_of(packet).and_then(sender) {
                    self.stations.is_elsewhere(from);
                }
                if is_next && self.newer.is_none() {
                    return match self.is_twin(packet, CameTo::New) {
                        true => Fate::Dropped,
                        false => Fate::Deliver,
                    };
                }
                self.take(packet.into(), CameTo::New)
            }
        }
    }

    /// Records that all packets before the VM's announcement from the destination are held. Broadcasts from now on
    /// reach the destination too.
    pub fn announced(&mut self) {
        self.announced_elsewhere = true;
    }

    /// Holds a packet for which the guest had no room, as the next packet of its queue.
    pub fn put_off(&mut self, packet: &[u8]) {
        let queue = queue_of(packet);
        debug_assert!(
            self.held.has_none_of(queue),
            "a packet was delivered past others"
        );
        // Other queues may have taken all the room.
        if !self.held.push(packet.into()) {
            self.counters.held += 1;
            self.counters.held_overflow += 1;
        }
    }

    fn may_miss_new_place(&self, packet: &[u8]) -> bool {
        let to = frame_of(packet).and_then(destination);
        to.is_some_and(|to| {
            to.is_group() && to != Mac::ALL || to == self.mac || self.stations.has(to)
        })
    }

    fn hold(&mut self, packet: Packet) -> Fate {
        self.counters.held += 1;
        if self.held.push(packet) {
            return Fate::Held;
        }
        self.counters.held_overflow += 1;
        Fate::Dropped
    }

    /// Returns the queue of the next waiting packet for the guest: the oldest first packet of the queues for which the
    /// guest may have room. Returns `None` unless packets pass.
    pub fn next_for_guest(&self, has_room: impl Fn(usize) -> bool) -> Option<usize> {
        match self.mode {
            Mode::Releasing => self.held.first_queue(has_room),
            Mode::Buffering | Mode::Clone => None,
        }
    }

    /// Returns the first packet of a queue from [`Self::next_for_guest`].
    pub fn for_guest(&mut self, queue: usize) -> Option<&mut [u8]> {
        self.held.first_mut(queue).map(AsMut::as_mut)
    }

    /// Removes the packet of [`Self::for_guest`], which the guest got or cannot get.
    pub fn took_first(&mut self, queue: usize) {
        self.held.pop(queue);
    }

    /// Drops the waiting packets, which were for the guest's previous driver.
    pub fn starts_anew(&mut self) {
        self.held.clear();
    }

    /// Returns the pace of a queue pair.
    pub fn pace(&mut self, pair: usize) -> &mut Pace {
        &mut self.paces[pair]
    }

    /// Returns true if the guest must process some packets before getting more. A pace is needed only for packets held
    /// back by a move or a pause. At other times the guest's ring may be full, as on any machine.
    pub fn is_ahead(&self, pair: usize) -> bool {
        self.keeps_all && self.paces[pair].is_ahead()
    }

    /// Counts a packet of this many bytes, received by the guest through a pair in this many buffers.
    pub fn received(&mut self, pair: usize, packet_bytes: usize, buffers: u16) {
        self.paces[pair].given(buffers);
        self.counters.received_packets += 1;
        self.counters.received_bytes += packet_bytes as u64;
    }

    /// Counts a packet that was too large for the guest's buffers.
    pub const fn was_too_large(&mut self) {
        self.counters.receive_too_large += 1;
    }

    /// Returns the gate for packets of the guest.
    pub const fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Returns the gate for packets of the guest, for its changes.
    pub const fn gate_mut(&mut self) -> &mut Gate {
        &mut self.gate
    }

    /// Returns true if packets of the guest may be taken, as far as the [gate](Self::gate) has room. Otherwise the device's
    /// tail stays behind the last packet that was taken.
    pub const fn may_transmit(&self) -> bool {
        matches!(self.mode, Mode::Releasing)
    }

    /// Counts a frame taken by the uplink, and records the sender from the frame's first bytes.
    pub fn sent(&mut self, beginning: &[u8], bytes: usize) {
        self.counters.sent_packets += 1;
        self.counters.sent_bytes += bytes as u64;
        if let Some(station) = station(beginning) {
            self.stations.sent(station, self.now);
        }
    }

    /// Counts a packet of the guest that did not leave.
    pub const fn refused(&mut self) {
        self.counters.send_refused += 1;
    }
}

#[cfg(test)]
#[path = "nic_tests.rs"]
mod tests;
