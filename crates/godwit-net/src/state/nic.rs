//! The NIC: what becomes of each packet.
//!
//! Paper 004 (section 3.1) gives a virtual function a *working* mode of two kinds, *releasing* and *buffering*, and a
//! *clone* mode. Here:
//!
//! - releasing: what the guest sends leaves, what comes from the uplink reaches the guest;
//! - buffering: what the guest offers stays in its ring, because the tail up to which the device may take packets
//!   stands still while the guest's own goes on, so that nothing is copied; what the uplink brings is held, in the order of each
//!   of its queues;
//! - clone: nothing moves, so that the whole state can be read or written at once. A NIC that arrives at a node is in
//!   this mode until its machine runs there: what the uplink brings before is its former place's to take.
//!
//! A machine's former place goes on to receive until the network knows the new one. The announcement that tells the
//! network so is broadcast, and when it reaches the former place nothing more for the machine comes there. Until what
//! came there is all at the new place ([`Nic::late`], [`Nic::late_ended`]), the new place keeps what its own uplink
//! brings back, since that is newer.

use std::time::Duration;

use crate::clone::State;
use crate::frame::announce::{self, Token};
use crate::frame::packet::{SMALLEST, destination, frame_of, queue_of, sender, station};
use crate::mac::Mac;
use crate::state::counters::Counters;
use crate::state::held::{HeldPackets, Packet};
use crate::state::pace::Pace;
use crate::state::stations::{Station, Stations};
use crate::state::twins::{CameTo, Twins};

/// What a NIC does with packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Packets pass.
    Releasing,
    /// Packets are held back, both ways.
    Buffering,
    /// Nothing moves.
    Clone,
}

impl Mode {
    /// The mode's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Releasing => "releasing",
            Self::Buffering => "buffering",
            Self::Clone => "clone",
        }
    }
}

/// What becomes of a packet from the uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The guest gets it now.
    Deliver,
    /// The guest gets it later, or its new place does.
    Held,
    /// Nobody gets it.
    Dropped,
    /// Nobody gets it: it is the machine's announcement from its new place. [`Nic::announced`] follows, once what other
    /// queues of the uplink have is held too: some of that came before.
    Announced,
}

/// Why a state cannot be taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The NIC works.
    #[error("the state of a NIC can only be written while the NIC is in clone mode")]
    Working,
    /// It is another NIC's.
    #[error("the state is that of the NIC {theirs}, and this is {own}")]
    Another {
        /// Whose state it is.
        theirs: Mac,
        /// Who should take it.
        own: Mac,
    },
    /// It has another number of pairs of queues.
    #[error("the state is that of a NIC with {theirs} pairs of queues, and this has {own}")]
    Pairs {
        /// How many it was read from.
        theirs: usize,
        /// How many there are.
        own: usize,
    },
}

/// A NIC.
#[derive(Clone, Debug)]
pub struct Nic {
    mac: Mac,
    mode: Mode,
    held: HeldPackets,
    /// Of each pair of queues.
    paces: Vec<Pace>,
    /// Packets for which the guest has no room are held, and not left to the uplink, whose own queue is short.
    keeps_all: bool,
    /// What the announcement of the move that is under way, or was last, says.
    token: Token,
    /// What its own uplink brought while packets of the former place are awaited, which are older. Nobody gets any before
    /// all are in order.
    newer: Option<HeldPackets>,
    /// What a move brought to both places, for some time after it.
    twins: Option<Twins>,
    /// The machine's announcement from its new place was seen here.
    announced_elsewhere: bool,
    /// As which stations the guest sent lately.
    stations: Stations,
    /// Since the NIC was made.
    now: Duration,
    counters: Counters,
}

impl Nic {
    /// The NIC of a machine that starts here.
    pub fn new(mac: Mac) -> Self {
        Self {
            mac,
            mode: Mode::Releasing,
            held: HeldPackets::new(1),
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

    /// The NIC of a machine that is to come here.
    pub fn arriving(mac: Mac) -> Self {
        Self {
            mode: Mode::Clone,
            ..Self::new(mac)
        }
    }

    /// The same with so many pairs of queues.
    pub fn with_pairs(self, pairs: usize) -> Self {
        Self {
            paces: vec![Pace::default(); pairs],
            held: HeldPackets::new(pairs),
            ..self
        }
    }

    /// Its address.
    pub const fn mac(&self) -> Mac {
        self.mac
    }

    /// What it does.
    pub const fn mode(&self) -> Mode {
        self.mode
    }

    /// What happened.
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// How many packets wait for the guest.
    pub fn waiting(&self) -> usize {
        self.held.len() + self.newer.as_ref().map_or(0, HeldPackets::len)
    }

    /// So much time has passed since the NIC was made.
    pub const fn time_is(&mut self, now: Duration) {
        self.now = now;
    }

    /// As which stations the guest sent lately, the last first.
    pub fn stations(&self) -> impl Iterator<Item = Station> {
        self.stations
            .remembered(self.now)
            .map(|(station, _)| station)
    }

    /// Holds packets back from now on. The hardware's tail stays where it is. A machine that moves on before all came
    /// from its former place takes what is here with it. The token is the move's own, and not to be guessed.
    pub fn buffer(&mut self, token: Token) {
        self.late_ended();
        self.token = token;
        self.mode = Mode::Buffering;
        self.announced_elsewhere = false;
    }

    /// Lets packets pass again, those that were held first.
    pub fn release(&mut self) {
        self.mode = Mode::Releasing;
    }

    /// Stands still for a moment and tells everything about itself. The packets that it holds are copied, and stay.
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

    /// Becomes what the state says.
    ///
    /// # Errors
    /// When it is not in clone mode, or the state is another NIC's.
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

    /// Works at its new place from now on. Returns the frames that tell the network so, which must leave before
    /// anything of the guest's. `late` is whether [`Self::late_ended`] will be called.
    pub fn take_over(&mut self, late: bool) -> Vec<Vec<u8>> {
        self.mode = Mode::Releasing;
        self.newer = late.then(|| HeldPackets::new(1));
        self.twins = self.twins.take().filter(|_| late);
        self.counters.moves += 1;
        self.announcements()
    }

    /// The frames that tell the network where the machine is: for its own address, and for each station as which its guest
    /// sent lately. What addresses of other protocols its guest has, nobody but that knows for certain.
    pub fn announcements(&self) -> Vec<Vec<u8>> {
        self.announcements_with(self.mac)
    }

    /// The same with an address that the machine's front end names.
    pub fn announcements_with(&self, mac: Mac) -> Vec<Vec<u8>> {
        let named = Station { mac, vlan: None };
        let others = self.stations().filter(|station| *station != named);
        let is_ones = !mac.is_group() && mac != Mac::NOBODY;
        let named = is_ones.then_some(named);
        let all = named.into_iter().chain(others);
        all.map(|station| announce::rarp(station, self.token))
            .collect()
    }

    /// A packet came to the former place before the network knew the new one.
    pub fn late(&mut self, packet: Packet) {
        self.take(packet, CameTo::Former);
    }

    /// So many packets of the former place's found no room on their way here.
    pub const fn late_lost(&mut self, count: u64) {
        self.counters.held += count;
        self.counters.held_overflow += count;
    }

    /// All that came to the former place is here, or will never be: what came here meanwhile follows.
    pub fn late_ended(&mut self) {
        let newer = self.newer.take().map(|mut newer| newer.take());
        for packet in newer.into_iter().flatten() {
            // It was counted as held when it came.
            if !self.held.push(packet) {
                self.counters.held_overflow += 1;
            }
        }
    }

    /// Whether packets of the former place are awaited.
    pub const fn awaits_late(&self) -> bool {
        self.newer.is_some()
    }

    /// Nothing more comes that the other place got, too.
    pub fn twins_ended(&mut self) {
        self.twins = None;
    }

    /// Takes a packet that waits for the guest, unless that has it already from the other place.
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

    /// Copies of the packets that came here since they were last asked for, for the machine's new place.
    pub fn copy_new(&mut self) -> Vec<Packet> {
        self.held.copy_new()
    }

    /// Whether the network is known to bring nothing more for the machine here, but for packets that the announcement
    /// has overtaken.
    pub const fn is_announced_elsewhere(&self) -> bool {
        self.announced_elsewhere
    }

    /// Whether packets are held, and not left to the uplink, while the guest has no room for them: while its machine
    /// moves or stands still, for some time after that, and at no other time. They are copied, which costs.
    pub const fn keep_all(&mut self, keeps: bool) {
        self.keeps_all = keeps;
    }

    /// Whether it does.
    pub const fn keeps_all(&self) -> bool {
        self.keeps_all
    }

    /// Whether packets of a queue of the uplink are to be read. A guest without room for more by that queue lets them wait in
    /// the uplink.
    pub fn wants_uplink(&self, queue: usize, guest_has_room: bool) -> bool {
        match self.mode {
            Mode::Buffering | Mode::Clone => true,
            Mode::Releasing if self.awaits_late() => true,
            Mode::Releasing => {
                self.is_next(queue, guest_has_room) || self.keeps_all && self.held.has_room()
            }
        }
    }

    /// Whether the guest gets what a queue of the uplink brings now: order is kept within each queue, so that one for which
    /// the guest has no room does not stop the others.
    fn is_next(&self, queue: usize, guest_has_room: bool) -> bool {
        guest_has_room && self.held.has_none_of(queue)
    }

    /// What becomes of a packet that the uplink brought by the queue that it says ([`queue_of`]); when it is held, the NIC has
    /// taken a copy.
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
            // What is for all reaches the new place, too. What is for this machine alone does not: a switch that works on
            // several processors may bring it a moment after the announcement that it left before. Nor does what is for a
            // group, where switches know who listens to it, until the guest has said so at its new place.
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

    /// All that came before the machine's announcement from its new place is held: what comes for many from now on reaches that
    /// place, too.
    pub fn announced(&mut self) {
        self.announced_elsewhere = true;
    }

    /// The guest had no room for a packet that it was to get now: it gets it next by the packet's queue.
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

    /// The queue of the packet that the guest gets next of those that wait, when it may get any: the first one of a queue by
    /// which it may have room.
    pub fn next_for_guest(&self, has_room: impl Fn(usize) -> bool) -> Option<usize> {
        match self.mode {
            Mode::Releasing => self.held.first_queue(has_room),
            Mode::Buffering | Mode::Clone => None,
        }
    }

    /// The first packet of a queue that [`Self::next_for_guest`] gave.
    pub fn for_guest(&mut self, queue: usize) -> Option<&mut [u8]> {
        self.held.first_mut(queue).map(AsMut::as_mut)
    }

    /// The guest got what [`Self::for_guest`] gave, or cannot.
    pub fn took_first(&mut self, queue: usize) {
        self.held.pop(queue);
    }

    /// The guest's driver begins anew: what waits was for the one before.
    pub fn starts_anew(&mut self) {
        self.held.clear();
    }

    /// How far the guest is behind what it was given by a pair of queues.
    pub fn pace(&mut self, pair: usize) -> &mut Pace {
        &mut self.paces[pair]
    }

    /// Whether the guest gets no more before it has come to some of what it has. Nothing but what a move or a stop holds
    /// back for it needs a pace: at other times packets come as they do at any machine, and it may have a ring full.
    pub fn is_ahead(&self, pair: usize) -> bool {
        self.keeps_all && self.paces[pair].is_ahead()
    }

    /// The guest got a packet of this many bytes by a pair of queues, in so many of its buffers.
    pub fn received(&mut self, pair: usize, packet_bytes: usize, buffers: u16) {
        self.paces[pair].given(buffers);
        self.counters.received_packets += 1;
        self.counters.received_bytes += packet_bytes as u64;
    }

    /// A packet is too large for the guest's buffers.
    pub const fn was_too_large(&mut self) {
        self.counters.receive_too_large += 1;
    }

    /// Whether packets of the guest's may be taken: the hardware's tail follows the guest's own, or stands still where
    /// it is, which is behind the last packet that was taken.
    pub const fn may_transmit(&self) -> bool {
        matches!(self.mode, Mode::Releasing)
    }

    /// The uplink took a frame of this many bytes that begins like this.
    pub fn sent(&mut self, beginning: &[u8], bytes: usize) {
        self.counters.sent_packets += 1;
        self.counters.sent_bytes += bytes as u64;
        if let Some(station) = station(beginning) {
            self.stations.sent(station, self.now);
        }
    }

    /// A packet of the guest's did not leave.
    pub const fn refused(&mut self) {
        self.counters.send_refused += 1;
    }
}

#[cfg(test)]
#[path = "nic_tests.rs"]
mod tests;
