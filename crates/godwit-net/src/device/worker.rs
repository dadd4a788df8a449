//! The thread's loop: waits for commands, kicks and packets, and moves packets.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use godwit_vhost::memory::written::WrittenPages;
use godwit_vhost::protocol::device::FrontEndReply;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError};
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::rand::GetRandomFlags;

use crate::device::handle::QueueSeen;
use crate::device::handle::{Command, Hold, LatePackets, Shared};
use crate::device::queues::transmit::Space;
use crate::device::session::{Session, pair_received_by, receive_ring};
use crate::device::traffic::Pair;
use crate::device::uplink::{Uplink, tap};
use crate::frame::announce::Token;
use crate::frame::packet::HEADER;
use crate::mac::Mac;
use crate::state::nic::Nic;

/// Times of repeated announcements, counted from the first: an announcement may be lost.
const ANNOUNCE_AGAIN: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(400),
    Duration::from_millis(1000),
];

/// Most time to wait for packets from the source.
const LATE: Duration = Duration::from_secs(1);

/// Time during which the source may send packets that have also come here.
const TWINS: Duration = Duration::from_secs(4);

/// Time for which all packets are kept for a guest after a ring's stop or start: a paused guest has much to catch up
/// on.
const KEEPS: Duration = Duration::from_secs(10);

/// Most time in which a guest processes at least one packet. A slower guest is taken for a guest that offers its
/// buffers again late.
pub(super) const COMES_TO_THEM: Duration = Duration::from_secs(1);

/// Interval of checks whether a guest without new packets has processed all of the old ones, for which there is no
/// notification. A guest that offers buffers again late idles for one interval, which is little beside the blackout.
pub(super) const LOOKS: Duration = Duration::from_millis(2);

/// Pause of the uplink after a failed read.
pub(super) const UPLINK_RESTS: Duration = Duration::from_millis(100);

/// Epoll tokens of the thread's event sources.
const COMMANDS: u64 = 0;
const UPLINK: u64 = 1;
/// Token of a ring's kicks, to which the ring's index is added.
const KICKS: u64 = 2;

/// The state of a NIC's thread.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    inbox: Receiver<Command>,
    pub(super) nic: Nic,
    pub(super) uplink: Uplink,
    pub(super) session: Option<Session>,
    poller: OwnedFd,
    began: Instant,
    pub(super) pairs: Vec<Pair>,
    pub(super) space: Space,
    /// Time of the first announcement, and number of repetitions so far.
    announced: Option<(Instant, usize)>,
    /// Time until which late packets are awaited.
    late_until: Option<Instant>,
    /// Time until which the source may send packets that have also come here.
    twins_until: Option<Instant>,
    /// Time until which all packets are kept for the guest.
    keeps_until: Option<Instant>,
    /// Time until which the uplink is not read.
    pub(super) uplink_rests: Option<Instant>,
    /// True if the last VM was disconnected because pages of its shared memory were lost.
    pub(super) lost_pages: bool,
    /// The node's log of pages written here, while on. Outlives sessions.
    written: Option<Arc<WrittenPages>>,
    ended: bool,
}

impl Worker {
    pub(super) fn new(
        shared: Arc<Shared>,
        inbox: Receiver<Command>,
        nic: Nic,
        uplink: Uplink,
    ) -> io::Result<Self> {
        let poller = epoll::create(CreateFlags::CLOEXEC)?;
        let commands = EventData::new_u64(COMMANDS);
        epoll::add(&poller, &shared.wake, commands, EventFlags::IN)?;
        Ok(Self {
            shared,
            inbox,
            nic: nic.with_pairs(uplink.count()),
            pairs: (0..uplink.count()).map(|_| Pair::default()).collect(),
            uplink,
            session: None,
            poller,
            began: Instant::now(),
            space: Space::new(),
            announced: None,
            late_until: None,
            twins_until: None,
            keeps_until: None,
            uplink_rests: None,
            lost_pages: false,
            written: None,
            ended: false,
        })
    }

    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(8);
        let mut eager = false;
        while !self.ended {
            self.watch_uplink();
            self.wait(eager, &mut events);
            self.commands();
            self.timers();
            eager = self.turn();
            self.look_for_lost_pages();
            self.publish();
        }
        if let Some(session) = &self.session {
            session.hang_up();
        }
    }

    /// Waits for the next event; returns at once if `eager`.
    fn wait(&mut self, eager: bool, events: &mut Vec<Event>) {
        let now = Instant::now();
        let due = self.due(now).map(|due| due.saturating_duration_since(now));
        let limit = if eager { Some(Duration::ZERO) } else { due };
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        // An interrupted wait counts as one without events.
        let _ = epoll::wait(&self.poller, spare_capacity(events), limit.as_ref());
        for pair in &mut self.pairs {
            // Epoll reports packets in watched queues; unwatched queues are read to find out.
            pair.may_bring = !pair.watches_uplink;
        }
        for event in events.drain(..) {
            match event.data.u64() {
                COMMANDS => self.shared.wake.clear(),
                UPLINK => self.uplink_brings(),
                kick => {
                    let index = (kick - KICKS) as usize;
                    let ring = self.session.as_mut().and_then(|s| s.rings[index].as_mut());
                    if let Some(ring) = ring {
                        ring.ready = true;
                        if let Some(pair) = pair_received_by(index) {
                            self.pairs[pair].guest_may_have_room();
                        }
                    }
                }
            }
        }
    }

    /// Marks all uplink queues as possibly having packets.
    pub(super) fn uplink_brings(&mut self) {
        self.pairs.iter_mut().for_each(|pair| pair.may_bring = true);
    }

    /// Returns the time of the next work that no event reports.
    fn due(&self, now: Instant) -> Option<Instant> {
        let own = [
            self.announces_at(),
            self.late_until,
            self.twins_until,
            self.keeps_until,
            self.uplink_rests,
        ];
        let looks = self.pairs.iter().map(|pair| pair.looks_at);
        let session = self.session.as_ref();
        let discards = session.and_then(|session| session.discards_at(now));
        own.into_iter()
            .chain(looks)
            .chain([discards])
            .flatten()
            .min()
    }

    /// Returns the time of the next announcement; `None` while the VM moves on to another node.
    fn announces_at(&self) -> Option<Instant> {
        let (since, count) = self.announced.filter(|_| self.nic.may_transmit())?;
        Some(since + *ANNOUNCE_AGAIN.get(count)?)
    }

    pub(super) fn timers(&mut self) {
        let now = Instant::now();
        self.nic.time_is(now - self.began);
        if self.announces_at().is_some_and(|due| now >= due) {
            self.announced = self.announced.map(|(since, count)| (since, count + 1));
            let frames = self.nic.announcements();
            self.announce(&frames);
        }
        if self.late_until.is_some_and(|until| now >= until) {
            tracing::warn!(
                nic = self.shared.name,
                "the machine's former place did not say in time that it has no more packets"
            );
            self.late_until = None;
            self.nic.late_ended();
        }
        if self.twins_until.is_some_and(|until| now >= until) {
            self.twins_until = None;
            self.nic.twins_ended();
        }
        if self.keeps_until.is_some_and(|until| now >= until) {
            self.keeps_until = None;
        }
        for pair in &mut self.pairs {
            if pair.looks_at.is_some_and(|due| now >= due) {
                pair.looks_at = None;
                pair.room = true;
            }
        }
        if self.uplink_rests.is_some_and(|until| now >= until) {
            self.uplink_rests = None;
        }
        let moves = self.session.as_ref().is_some_and(Session::logs);
        self.nic.keep_all(moves || self.keeps_until.is_some());
    }

    /// Watches the uplink queues only while their packets are wanted.
    fn watch_uplink(&mut self) {
        for queue in 0..self.pairs.len() {
            let wanted =
                self.uplink_rests.is_none() && self.nic.wants_uplink(queue, self.has_room(queue));
            if wanted == self.pairs[queue].watches_uplink {
                continue;
            }
            let (poller, uplink) = (&self.poller, self.uplink.queue(queue));
            // An unwanted queue is removed altogether: epoll would report a vanished tap again and again.
            let changed = match wanted {
                true => epoll::add(poller, uplink, EventData::new_u64(UPLINK), EventFlags::IN),
                false => epoll::delete(poller, uplink),
            };
            match changed {
                Ok(()) => self.pairs[queue].watches_uplink = wanted,
                Err(error) => {
                    tracing::error!(nic = self.shared.name, %error, "cannot wait for packets")
                }
            }
        }
    }

    pub(super) fn commands(&mut self) {
        loop {
            match self.inbox.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.ended = true;
                    return;
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::FrontEnd(command, reply) => self.front_end(command, reply),
            Command::Freeze(reply) => {
                self.nic.buffer(token());
                // Packets from the VM's previous source are no longer awaited.
                self.late_until = None;
                self.drain();
                reply(self.nic.read_state());
            }
            Command::Release => {
                self.nic.release();
                self.keeps_until = Some(Instant::now() + KEEPS);
            }
            Command::CopyLate(reply) => {
                self.drain();
                reply(LatePackets {
                    packets: self.nic.copy_new(),
                    is_all: self.nic.is_announced_elsewhere(),
                });
            }
            Command::Restore(state, reply) => reply(self.nic.write_state(*state)),
            Command::TakeOver { awaits_late, reply } => {
                // Packets that came until now belong to the source.
                self.drain();
                let frames = self.nic.take_over(awaits_late);
                self.announce(&frames);
                let now = Instant::now();
                self.announced = Some((now, 0));
                self.late_until = awaits_late.then_some(now + LATE);
                self.twins_until = awaits_late.then_some(now + TWINS);
                self.keeps_until = Some(now + KEEPS);
                reply(());
            }
            Command::Late { packets, lost } => {
                self.shared.unread.remove(&packets);
                self.nic.late_lost(lost);
                packets.into_iter().for_each(|packet| self.nic.late(packet));
            }
            Command::LateEnded => {
                self.late_until = None;
                self.nic.late_ended();
            }
            Command::Uplink(uplink) => self.replace_uplink(uplink),
            Command::LogWrites(pages, reply) => {
                self.written.clone_from(&pages);
                if let Some(session) = &mut self.session {
                    session.written = pages;
                }
                reply(());
            }
            Command::Hold(command) => self.hold(command),
            Command::End => self.ended = true,
        }
    }

    /// Replaces the uplink. Packets left in the old uplink, whose tap may be gone already, are lost.
    fn replace_uplink(&mut self, uplink: Uplink) {
        if uplink.count() != self.pairs.len() {
            return;
        }
        for (queue, pair) in self.pairs.iter_mut().enumerate() {
            if std::mem::take(&mut pair.watches_uplink) {
                let _ = epoll::delete(&self.poller, self.uplink.queue(queue));
            }
        }
        self.uplink = uplink;
        self.uplink_rests = None;
        if let Some(features) = self.session.as_ref().map(|session| session.features) {
            self.set_offloads(tap::offloads(features));
        }
        if self.nic.may_transmit() {
            // The new uplink's bridge does not know yet where the VM is.
            self.announced = Some((Instant::now(), 0));
            self.announce(&self.nic.announcements());
        }
    }

    fn set_offloads(&self, offloads: u32) {
        if let Err(error) = self.uplink.set_offloads(offloads) {
            tracing::warn!(nic = self.shared.name, %error, "the uplink cannot leave packets unfinished");
        }
    }

    fn front_end(&mut self, command: FrontEndCommand, reply: FrontEndReply) {
        let result = match command {
            FrontEndCommand::Attach { socket } => match &self.session {
                Some(_) => Err(FrontEndError::Taken),
                None => {
                    let written = self.written.clone();
                    self.session = Some(Session::new(socket, self.pairs.len(), written));
                    Ok(0)
                }
            },
            FrontEndCommand::Detach => {
                (0..2 * self.pairs.len()).for_each(|index| self.unwatch_kicks(index));
                self.session = None;
                for pair in &mut self.pairs {
                    pair.room = false;
                    pair.is_not_ahead();
                }
                Ok(0)
            }
            FrontEndCommand::Announce { mac } => {
                self.announce_for_front_end(Mac(mac));
                Ok(0)
            }
            command => self.change(command),
        };
        reply(result);
    }

    fn change(&mut self, command: FrontEndCommand) -> Result<u16, FrontEndError> {
        if let FrontEndCommand::Stop { ring } = &command {
            self.unwatch_kicks(usize::from(*ring));
        }
        let session = self.session.as_mut().ok_or(FrontEndError::Left)?;
        let (started, offloads) = match &command {
            FrontEndCommand::Start { ring, .. } => (Some(usize::from(*ring)), None),
            FrontEndCommand::Features { features } => (None, Some(tap::offloads(*features))),
            _ => (None, None),
        };
        let begins_anew = matches!(
            &command,
            FrontEndCommand::Start { ring, setup }
                if usize::from(*ring) == receive_ring(0)
                    && !session.goes_on_at(receive_ring(0), setup.base)
        );
        let changed = match &command {
            FrontEndCommand::Start { ring, .. } | FrontEndCommand::Stop { ring } => {
                pair_received_by(usize::from(*ring))
            }
            _ => None,
        };
        let shares_memory = matches!(command, FrontEndCommand::Memory { .. });
        let answer = session.change(command)?;
        self.lost_pages &= !shares_memory;
        if let Some(pair) = changed {
            self.keeps_until = Some(Instant::now() + KEEPS);
            if let Some(ring) = &session.rings[receive_ring(pair)] {
                let split = &ring.split;
                let pace = self.nic.pace(pair);
                pace.starts(split.base(), split.layout().size);
            }
        }
        if begins_anew {
            self.start_anew();
        }
        if let Some(offloads) = offloads {
            self.set_offloads(offloads);
        }
        let rings = self.session.as_ref().map(|session| &session.rings);
        if let Some(index) = started
            && let Some(ring) = rings.and_then(|rings| rings[index].as_ref())
        {
            let data = EventData::new_u64(KICKS + index as u64);
            // Edge-triggered events report each kick once, so the counter need not be read. A starting ring is looked
            // at without a kick.
            let once = EventFlags::IN | EventFlags::ET;
            epoll::add(&self.poller, ring.kick.as_fd(), data, once)
                .map_err(|_| FrontEndError::NotEventfd)?;
        }
        self.pairs.iter_mut().for_each(Pair::guest_may_have_room);
        Ok(answer)
    }

    /// Carries out a command about packets that wait for a checkpoint.
    fn hold(&mut self, command: Hold) {
        let gate = self.nic.gate_mut();
        match command {
            Hold::Begin(reply) => {
                gate.hold();
                reply(());
            }
            Hold::EndEpoch(number, reply) => {
                gate.end_epoch(number);
                reply(());
            }
            Hold::Release(number) => gate.release(number),
            Hold::End(reply) => {
                gate.open();
                reply(());
            }
        }
    }

    /// Stops watching a ring's kicks. Closing the counter here would not suffice, since the front end has the counter
    /// open too.
    fn unwatch_kicks(&self, index: usize) {
        let rings = self.session.as_ref().map(|session| &session.rings);
        if let Some(ring) = rings.and_then(|rings| rings.get(index)?.as_ref()) {
            let _ = epoll::delete(&self.poller, ring.kick.as_fd());
        }
    }

    /// Announces a VM moved here by QEMU itself, whose guest sends no announcement. A VM moved by a node is not
    /// announced before the VM belongs to this node.
    fn announce_for_front_end(&self, mac: Mac) {
        if self.nic.may_transmit() {
            self.announce(&self.nic.announcements_with(mac));
        }
    }

    fn announce(&self, frames: &[Vec<u8>]) {
        for frame in frames {
            let packet = [&[0; HEADER], frame.as_slice()].concat();
            if let Err(error) = self.uplink.write(0, &packet) {
                tracing::warn!(nic = self.shared.name, %error, "cannot announce the machine");
            }
        }
    }

    fn publish(&self) {
        let session = self.session.as_ref();
        self.shared.publish(|snapshot| {
            snapshot.mode = self.nic.mode();
            snapshot.attached = session.is_some();
            snapshot.broken = session.is_some_and(Session::is_broken);
            snapshot.lost_pages = self.lost_pages;
            snapshot.counters = *self.nic.counters();
            snapshot.waiting = self.nic.waiting();
            snapshot.held_back = self.nic.gate().held();
            snapshot.stations.clear();
            snapshot.stations.extend(self.nic.stations());
            snapshot.queues.clear();
            let queues = self
                .pairs
                .iter()
                .enumerate()
                .map(|(number, pair)| QueueSeen {
                    is_used: session.is_some_and(|session| session.may_serve(receive_ring(number))),
                    received_packets: pair.received,
                    sent_packets: pair.sent,
                });
            snapshot.queues.extend(queues);
        });
    }
}

/// Returns a random token. A kernel without randomness leaves a predictable token.
fn token() -> Token {
    let mut bytes = [0; 16];
    let _ = rustix::rand::getrandom(&mut bytes[..], GetRandomFlags::empty());
    Token(bytes)
}
