//! The thread's loop: waits for commands, kicks and packets, and moves packets.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use godwit_vhost::protocol::device::FrontEndReply;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError};
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::rand::GetRandomFlags;

use crate::device::handle::{Command, LatePackets, Shared};
use crate::device::queues::receive::{Given, give};
use crate::device::queues::ring::Broken;
use crate::device::queues::transmit::{Space, transmit};
use crate::device::session::{RECEIVE, RINGS, Session, TRANSMIT};
use crate::device::uplink::{Uplink, tap};
use crate::frame::announce::Token;
use crate::frame::packet::HEADER;
use crate::state::nic::{Fate, Nic};

/// Packets that the guest gets in one turn.
const TURN: usize = 256;

/// Packets that are read at once before something that must come after them.
const DRAIN: usize = 1 << 16;

/// When a machine's new place is announced again, counted from the first time: an announcement may be lost.
const ANNOUNCE_AGAIN: [Duration; 4] = [
    Duration::from_millis(50),
    Duration::from_millis(150),
    Duration::from_millis(400),
    Duration::from_millis(1000),
];

/// How long packets from a machine's former place are awaited.
const LATE: Duration = Duration::from_secs(1);

/// How long everything is kept for a guest after its ring was stopped, or is served again: a guest that stood still
/// has much to catch up on.
const KEEPS: Duration = Duration::from_secs(10);

/// How long a guest may take to come to any of the packets that it has, before it is taken for one that offers its
/// buffers again late.
const COMES_TO_THEM: Duration = Duration::from_secs(1);

/// How often a guest that gets no more packets for now is asked whether it has come to all of them: nothing tells of
/// that. A guest that offers its buffers again late stands idle for so long, which is little beside its blackout.
const LOOKS: Duration = Duration::from_millis(2);

/// How long the uplink rests after it could not be read.
const UPLINK_RESTS: Duration = Duration::from_millis(100);

/// What woke the thread, as the kernel repeats it.
const COMMANDS: u64 = 0;
const UPLINK: u64 = 1;
const KICKS: u64 = 2;

/// The thread.
pub(super) struct Worker {
    shared: Arc<Shared>,
    inbox: Receiver<Command>,
    nic: Nic,
    uplink: Uplink,
    session: Option<Session>,
    poller: OwnedFd,
    /// The uplink is being waited for.
    watches_uplink: bool,
    /// The guest may have room for a packet.
    room: bool,
    space: Space,
    /// When the announcements began, and how many were made again.
    announced: Option<(Instant, usize)>,
    /// Until when late packets are awaited.
    late_until: Option<Instant>,
    /// Until when everything is kept for the guest.
    keeps_until: Option<Instant>,
    /// Since when the guest has not come to any of the packets that it has.
    ahead_since: Option<Instant>,
    /// When it is looked whether it has.
    looks_at: Option<Instant>,
    /// Until when the uplink is left alone.
    uplink_rests: Option<Instant>,
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
        epoll::add(
            &poller,
            &uplink,
            EventData::new_u64(UPLINK),
            EventFlags::empty(),
        )?;
        Ok(Self {
            shared,
            inbox,
            nic,
            uplink,
            session: None,
            poller,
            watches_uplink: false,
            room: false,
            space: Space::new(),
            announced: None,
            late_until: None,
            keeps_until: None,
            ahead_since: None,
            looks_at: None,
            uplink_rests: None,
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
            eager = self.transmit();
            eager |= self.receive();
            self.publish();
        }
        if let Some(session) = &self.session {
            session.hang_up();
        }
    }

    /// Waits until there is something to do; not at all when there is.
    fn wait(&mut self, eager: bool, events: &mut Vec<Event>) {
        let now = Instant::now();
        let due = self.due().map(|due| due.saturating_duration_since(now));
        let limit = if eager { Some(Duration::ZERO) } else { due };
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        // An interrupted wait is one that found nothing.
        let _ = epoll::wait(&self.poller, spare_capacity(events), limit.as_ref());
        for event in events.drain(..) {
            match event.data.u64() {
                COMMANDS => self.shared.wake.clear(),
                UPLINK => {}
                kick => {
                    let index = (kick - KICKS) as usize;
                    let ring = self.session.as_mut().and_then(|s| s.rings[index].as_mut());
                    if let Some(ring) = ring {
                        ring.kick.clear();
                        ring.ready = true;
                        if index == RECEIVE {
                            self.guest_may_have_room();
                        }
                    }
                }
            }
        }
    }

    fn guest_may_have_room(&mut self) {
        self.room = true;
        self.is_not_ahead();
    }

    fn is_not_ahead(&mut self) {
        self.ahead_since = None;
        self.looks_at = None;
    }

    /// When something has to be done that nobody tells of.
    fn due(&self) -> Option<Instant> {
        [
            self.announces_at(),
            self.late_until,
            self.keeps_until,
            self.looks_at,
            self.uplink_rests,
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// When the machine's place is announced again: not while the machine moves on to another.
    fn announces_at(&self) -> Option<Instant> {
        let (since, count) = self.announced.filter(|_| self.nic.may_transmit())?;
        Some(since + *ANNOUNCE_AGAIN.get(count)?)
    }

    fn timers(&mut self) {
        let now = Instant::now();
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
        if self.keeps_until.is_some_and(|until| now >= until) {
            self.keeps_until = None;
        }
        if self.looks_at.is_some_and(|due| now >= due) {
            self.looks_at = None;
            self.room = true;
        }
        if self.uplink_rests.is_some_and(|until| now >= until) {
            self.uplink_rests = None;
        }
        let moves = self.session.as_ref().is_some_and(Session::logs);
        self.nic.keep_all(moves || self.keeps_until.is_some());
    }

    /// Lets the kernel tell of packets only while some are wanted.
    fn watch_uplink(&mut self) {
        let wanted = self.uplink_rests.is_none() && self.nic.wants_uplink(self.room);
        if wanted == self.watches_uplink {
            return;
        }
        let events = if wanted {
            EventFlags::IN
        } else {
            EventFlags::empty()
        };
        let data = EventData::new_u64(UPLINK);
        match epoll::modify(&self.poller, &self.uplink, data, events) {
            Ok(()) => self.watches_uplink = wanted,
            Err(error) => {
                tracing::error!(nic = self.shared.name, %error, "cannot wait for packets")
            }
        }
    }

    fn commands(&mut self) {
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
                // Nothing that comes from its former place now is awaited.
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
                // What came until now is the former place's to take.
                self.drain();
                let frames = self.nic.take_over(awaits_late);
                self.announce(&frames);
                let now = Instant::now();
                self.announced = Some((now, 0));
                self.late_until = awaits_late.then_some(now + LATE);
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
            Command::End => self.ended = true,
        }
    }

    fn front_end(&mut self, command: FrontEndCommand, reply: FrontEndReply) {
        let result = match command {
            FrontEndCommand::Attach { socket } => match &self.session {
                Some(_) => Err(FrontEndError::Taken),
                None => {
                    self.session = Some(Session::new(socket));
                    Ok(0)
                }
            },
            FrontEndCommand::Detach => {
                (0..RINGS).for_each(|index| self.unwatch_kicks(index));
                self.session = None;
                self.room = false;
                self.is_not_ahead();
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
        let stops_or_starts = matches!(
            &command,
            FrontEndCommand::Start { ring, .. } | FrontEndCommand::Stop { ring }
                if usize::from(*ring) == RECEIVE
        );
        let answer = session.change(command)?;
        if stops_or_starts {
            self.keeps_until = Some(Instant::now() + KEEPS);
            if let Some(ring) = &session.rings[RECEIVE] {
                let split = &ring.split;
                self.nic.pace().starts(split.base(), split.layout().size);
            }
        }
        if let Some(offloads) = offloads
            && let Err(error) = self.uplink.set_offloads(offloads)
        {
            tracing::warn!(nic = self.shared.name, %error, "the uplink cannot leave packets unfinished");
        }
        if let Some(index) = started
            && let Some(ring) = &session.rings[index]
        {
            let data = EventData::new_u64(KICKS + index as u64);
            epoll::add(&self.poller, ring.kick.as_fd(), data, EventFlags::IN)
                .map_err(|_| FrontEndError::NotEventfd)?;
        }
        self.guest_may_have_room();
        Ok(answer)
    }

    /// Waits for a ring's kicks no more. The kernel would go on to tell of them after the ring's counter is closed
    /// here, since the front end has it open, too.
    fn unwatch_kicks(&self, index: usize) {
        let rings = self.session.as_ref().map(|session| &session.rings);
        if let Some(ring) = rings.and_then(|rings| rings.get(index)?.as_ref()) {
            let _ = epoll::delete(&self.poller, ring.kick.as_fd());
        }
    }

    /// Reads everything that the uplink has now; nothing of it is for the guest at once.
    fn drain(&mut self) {
        for _ in 0..DRAIN {
            match self.uplink.read(&mut self.space.packet) {
                Ok(Some(length)) => {
                    self.nic.from_uplink(&self.space.packet[..length], false);
                }
                Ok(None) | Err(_) => return,
            }
        }
    }

    fn announce(&self, frames: &[Vec<u8>]) {
        for frame in frames {
            let packet = [&[0; HEADER], frame.as_slice()].concat();
            if let Err(error) = self.uplink.write(&packet) {
                tracing::warn!(nic = self.shared.name, %error, "cannot announce the machine");
            }
        }
    }

    /// Sends what the guest offers. True when there is more.
    fn transmit(&mut self) -> bool {
        let Some((ring, guest)) = self.session.as_mut().and_then(|s| s.serve(TRANSMIT)) else {
            return false;
        };
        if !ring.ready {
            return false;
        }
        let moved = transmit(ring, guest, &mut self.nic, &self.uplink, &mut self.space)
            .and_then(|more| ring.publish(guest).map(|()| more));
        match moved {
            Ok(more) => more,
            Err(why) => {
                self.break_ring(TRANSMIT, &why);
                false
            }
        }
    }

    /// Gives the guest what waits for it, then what the uplink has. True when there is more.
    fn receive(&mut self) -> bool {
        let received = self.receive_some();
        received.unwrap_or_else(|why| {
            self.break_ring(RECEIVE, &why);
            false
        })
    }

    fn receive_some(&mut self) -> Result<bool, Broken> {
        self.see_offered()?;
        let mut more = false;
        for turn in 0..TURN {
            if !self.receive_one()? {
                break;
            }
            more = turn + 1 == TURN;
        }
        // What was taken is never ahead of what was seen to be offered: whoever serves the ring next goes by that.
        self.see_offered()?;
        if let Some((ring, guest)) = self.session.as_mut().and_then(|s| s.serve(RECEIVE)) {
            ring.publish(guest)?;
        }
        Ok(more)
    }

    /// Sees how far the guest has come: by the buffers that it has offered.
    fn see_offered(&mut self) -> Result<(), Broken> {
        if let Some((ring, guest)) = self.session.as_mut().and_then(|s| s.serve(RECEIVE)) {
            let available = ring.split.available(guest.ram.memory())?;
            self.nic.pace().offered(available);
        }
        Ok(())
    }

    /// One packet. False when there is none, or the guest has no room.
    fn receive_one(&mut self) -> Result<bool, Broken> {
        let served = self.session.as_mut().and_then(|s| s.serve(RECEIVE));
        let Some((ring, guest)) = served else {
            // Packets may have to be held all the same.
            self.room = false;
            return Ok(self.read_uplink().is_some());
        };
        if self.room && self.nic.is_ahead() {
            return self.wait_for_guest().map(|()| true);
        }
        if self.room
            && let Some(packet) = self.nic.for_guest()
        {
            let bytes = packet.len() - HEADER;
            let given = give(ring, guest, &mut self.space.buffers, packet)?;
            match given {
                Given::Taken(buffers) => {
                    self.nic.took_first();
                    self.nic.received(bytes, buffers);
                }
                Given::TooLarge => {
                    self.nic.took_first();
                    self.nic.was_too_large();
                }
                Given::NoRoom | Given::Lost => self.room = false,
            }
            return Ok(given != Given::Lost);
        }
        let Some((length, fate)) = self.read_uplink() else {
            return Ok(false);
        };
        if fate != Fate::Deliver {
            return Ok(true);
        }
        let served = self.session.as_mut().and_then(|s| s.serve(RECEIVE));
        let Some((ring, guest)) = served else {
            return Ok(false);
        };
        let packet = &mut self.space.packet[..length];
        match give(ring, guest, &mut self.space.buffers, packet)? {
            Given::Taken(buffers) => self.nic.received(length - HEADER, buffers),
            Given::TooLarge => self.nic.was_too_large(),
            Given::NoRoom | Given::Lost => {
                self.room = false;
                self.nic.put_off(packet);
            }
        }
        Ok(true)
    }

    /// The guest has as many packets as it is given before it comes to some: it gets more when it has.
    fn wait_for_guest(&mut self) -> Result<(), Broken> {
        let served = self.session.as_mut().and_then(|s| s.serve(RECEIVE));
        let Some((ring, guest)) = served else {
            return Ok(());
        };
        let memory = guest.ram.memory();
        // A guest offers buffers again before it says that it waits: looked at the other way round, it might seem late.
        let is_all_seen = ring.split.is_all_seen(memory)?;
        let available = ring.split.available(memory)?;
        self.nic.pace().offered(available);
        if !self.nic.is_ahead() {
            self.is_not_ahead();
            return Ok(());
        }
        let now = Instant::now();
        let since = *self.ahead_since.get_or_insert(now);
        if is_all_seen || now >= since + COMES_TO_THEM {
            tracing::debug!(
                nic = self.shared.name,
                "the guest offers its buffers again late: it is given what fits"
            );
            self.nic.pace().lift();
            self.is_not_ahead();
        } else if !ring.rest_behind(guest, available)? {
            self.room = false;
            self.looks_at = Some(now + LOOKS);
        }
        Ok(())
    }

    /// Reads a packet, if one is wanted and there.
    fn read_uplink(&mut self) -> Option<(usize, Fate)> {
        if self.uplink_rests.is_some() || !self.nic.wants_uplink(self.room) {
            return None;
        }
        match self.uplink.read(&mut self.space.packet) {
            Ok(Some(length)) => {
                let packet = &self.space.packet[..length];
                Some((length, self.nic.from_uplink(packet, self.room)))
            }
            Ok(None) => None,
            Err(error) => {
                tracing::debug!(nic = self.shared.name, %error, "the uplink cannot be read");
                self.uplink_rests = Some(Instant::now() + UPLINK_RESTS);
                None
            }
        }
    }

    fn break_ring(&mut self, index: usize, why: &Broken) {
        let Some(session) = &mut self.session else {
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

    fn publish(&self) {
        let session = self.session.as_ref();
        self.shared.publish(|snapshot| {
            snapshot.mode = self.nic.mode();
            snapshot.attached = session.is_some();
            snapshot.broken = session.is_some_and(Session::is_broken);
            snapshot.counters = *self.nic.counters();
            snapshot.waiting = self.nic.waiting();
            snapshot.addresses.clear();
            snapshot.addresses.extend(self.nic.addresses());
        });
    }
}

/// What nobody can guess. A kernel without randomness leaves a token that anybody can.
fn token() -> Token {
    let mut bytes = [0; 16];
    let _ = rustix::rand::getrandom(&mut bytes[..], GetRandomFlags::empty());
    Token(bytes)
}
