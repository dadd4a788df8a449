//! The virtual machine that uses the disk: the lives of its rings. `requests.rs` handles their requests, `events.rs`
//! the signals of both sides.

pub(in crate::engine) mod device;
pub(in crate::engine) mod events;
mod long_waits;
pub(in crate::engine) mod no_space;
pub(in crate::engine) mod requests;

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use godwit_core::units::Time;
use vm_memory::GuestAddress;

use crate::engine::config::EngineEvent;
use crate::engine::front_ends::vhost::events::{BellId, EventCounters};
use crate::engine::front_ends::vhost::no_space::{RETRY, Room};
use crate::engine::front_ends::vhost::requests::RingRequest;
use crate::engine::run::Engine;
use crate::engine::stats::snapshot::FrontEndState;
use godwit_io::ring::Ring;
use godwit_vhost::features::{LOG_ALL, MOST_RINGS};
use godwit_vhost::memory::dirty_log::DirtyLog;
use godwit_vhost::memory::{GuestRam, LOST_PAGES, Segment};
use godwit_vhost::protocol::device::FrontEndReply;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError, OpenedRing, RingSetup};
use godwit_vhost::rings::chain::Chain;
use godwit_vhost::rings::inflight::InflightRing;
use godwit_vhost::rings::split::SplitRing;

/// A ring being served.
pub(in crate::engine) struct GuestRing {
    pub(in crate::engine) split: SplitRing,
    /// Record of requests in progress, for the next engine to find.
    pub(in crate::engine) inflight: Option<InflightRing>,
    /// Requests taken and not answered by an earlier engine.
    pub(in crate::engine) again: VecDeque<u16>,
    /// Requests for which the image had no room.
    pub(in crate::engine) without_room: VecDeque<u16>,
    /// Requests given back because they need a missing part of the disk.
    pub(in crate::engine) given_back: VecDeque<u16>,
    /// True if requests may be taken.
    pub(in crate::engine) enabled: bool,
    /// True if the ring's contents cannot be served.
    pub(in crate::engine) broken: bool,
    /// True while the ring waits for a slot.
    pub(in crate::engine) waiting: bool,
    /// Beginning of a wait of untaken requests, and the index after the last of them.
    pub(in crate::engine) since: Option<(Time, u16)>,
    /// Requests held by the controller.
    pub(in crate::engine) in_flight: u32,
    /// Reply to the front end, which waits for the ring to stop.
    pub(in crate::engine) stopping: Option<FrontEndReply>,
    watch: u32,
    pub(in crate::engine) call: Option<BellId>,
    pub(in crate::engine) error: Option<BellId>,
}

pub(in crate::engine) struct FrontEnd {
    pub(in crate::engine) socket: UnixStream,
    pub(in crate::engine) ram: Option<Arc<GuestRam>>,
    pub(in crate::engine) log: Option<Arc<DirtyLog>>,
    pub(in crate::engine) features: u64,
    pub(in crate::engine) rings: [Option<Box<GuestRing>>; MOST_RINGS as usize],
    /// Requests held by the controller.
    pub(in crate::engine) in_flight: u32,
    /// True if no request is taken from the rings until the memory changes.
    pub(in crate::engine) still: bool,
    /// True if the machine is known to stand still: a ring may then stop while requests wait for room.
    machine_still: bool,
    /// Reply once no taken request is left.
    stilled: Option<FrontEndReply>,
    /// True once the front end has left, while its last requests are pending.
    left: bool,
    /// Reply once the last requests have ended.
    gone: Option<FrontEndReply>,
}

impl FrontEnd {
    /// Returns the log of written pages, while logging is on.
    pub(in crate::engine) fn log(&self) -> Option<&DirtyLog> {
        self.log.as_deref().filter(|_| self.features & LOG_ALL != 0)
    }

    /// Returns true if pages of anything that the front end shares are lost.
    fn has_lost_pages(&self) -> bool {
        let mut rings = self.rings.iter().flatten();
        self.ram.as_ref().is_some_and(|ram| ram.has_lost_pages())
            || self.log.as_ref().is_some_and(|log| log.has_lost_pages())
            || rings.any(|ring| {
                ring.inflight
                    .as_ref()
                    .is_some_and(InflightRing::has_lost_pages)
            })
    }
}

/// The front end, and the memory for its requests.
pub(in crate::engine) struct Vhost {
    pub(in crate::engine) front_end: Option<FrontEnd>,
    /// Next front end, which waits until this one is gone.
    next: Option<(UnixStream, FrontEndReply)>,
    /// Ring request of each slot, if any.
    pub(in crate::engine) requests: Box<[RingRequest]>,
    /// Time of the next event for a long wait for a missing part of the disk.
    tell_of_wait: Option<Time>,
    /// Reused memory for a chain.
    pub(in crate::engine) chain: Chain,
    /// Reused memory for the chain's data.
    pub(in crate::engine) data: Vec<Segment>,
    /// Rings that may have requests, a bit each.
    pub(in crate::engine) ready: u16,
    /// Rings that have answers for the guest, or broke, a bit each.
    pub(in crate::engine) answered: u16,
    /// True if a ring has more requests than a turn may take.
    pub(in crate::engine) eager: bool,
    /// True if the disk is elsewhere and the last search for its owner has failed.
    pub(in crate::engine) hopeless: bool,
    /// State of requests that wait for room in the image.
    pub(in crate::engine) room: Room,
    /// True if the last front end was disconnected because pages of its shared memory were lost.
    pub(in crate::engine) lost_pages: bool,
    /// Signals between the guest and this engine.
    pub(in crate::engine) events: EventCounters,
}

impl Vhost {
    /// Returns the state for this many slots.
    pub(in crate::engine) fn new(slots: usize) -> Self {
        Self {
            front_end: None,
            next: None,
            requests: (0..slots).map(|_| RingRequest::default()).collect(),
            tell_of_wait: None,
            chain: Chain::default(),
            data: Vec::new(),
            ready: 0,
            answered: 0,
            eager: false,
            hopeless: false,
            room: Room::Enough,
            lost_pages: false,
            events: EventCounters::default(),
        }
    }

    /// Returns the published state.
    pub(in crate::engine) fn state(&self) -> FrontEndState {
        match &self.front_end {
            None => FrontEndState::Absent,
            Some(front_end) if front_end.rings.iter().flatten().any(|ring| ring.broken) => {
                FrontEndState::Broken
            }
            Some(_) => FrontEndState::Attached,
        }
    }

    /// Returns true if this turn left requests in a ring.
    pub(in crate::engine) const fn is_eager(&self) -> bool {
        self.eager
    }

    /// Lets requests fail that wait for the disk's owner.
    pub(in crate::engine) const fn owner_unreachable(&mut self) {
        self.hopeless = self.ready != 0;
    }

    /// Returns true if the front end left before all of its memory had arrived, or if pages of its shared memory are
    /// lost.
    fn has_lost_memory(&self) -> bool {
        self.front_end.as_ref().is_some_and(|front_end| {
            let ram = front_end.ram.as_ref();
            ram.is_some_and(|ram| ram.is_lost()) || front_end.has_lost_pages()
        })
    }

    pub(in crate::engine) fn ring(&mut self, index: u16) -> Option<&mut GuestRing> {
        let rings = &mut self.front_end.as_mut()?.rings;
        rings.get_mut(usize::from(index))?.as_deref_mut()
    }

    /// Records that requests of the ring cannot be taken now.
    pub(in crate::engine) fn stall(&mut self, index: u16, now: Time) {
        let Some(front_end) = &mut self.front_end else {
            return;
        };
        if let (Some(ram), Some(ring)) = (&front_end.ram, &mut front_end.rings[usize::from(index)])
            && ring.since.is_none()
            && let Ok(end) = ring.split.available(ram.memory())
        {
            ring.since = Some((now, end));
        }
    }

    /// Stops serving a ring.
    fn remove(&mut self, uring: &mut Ring, index: u16) -> Option<Box<GuestRing>> {
        let rings = &mut self.front_end.as_mut()?.rings;
        let mut ring = rings.get_mut(usize::from(index))?.take()?;
        self.events.unwatch(uring, ring.watch, index);
        self.events.retire(uring, ring.call.take());
        self.events.retire(uring, ring.error.take());
        self.ready &= !(1 << index);
        self.answered &= !(1 << index);
        Some(ring)
    }
}

impl Engine {
    /// Carries out a step of the vhost-user protocol.
    pub(in crate::engine) fn front_end_command(
        &mut self,
        command: FrontEndCommand,
        reply: FrontEndReply,
    ) {
        let result = match command {
            FrontEndCommand::Attach { socket } => {
                return self.attach_front_end(socket, reply);
            }
            FrontEndCommand::Detach => return self.detach_front_end(reply),
            FrontEndCommand::Stop { ring } => return self.stop_ring(ring, reply),
            FrontEndCommand::Still => return self.still_rings(reply),
            FrontEndCommand::Start { ring, setup } => self.start_ring(ring, *setup),
            command => self.change_front_end(command),
        };
        reply(result.map(|()| 0));
    }

    fn attach_front_end(&mut self, socket: UnixStream, reply: FrontEndReply) {
        if self.shutdown.is_some() {
            return reply(Err(FrontEndError::Ended));
        }
        if self.vhost.front_end.is_some() {
            match self.vhost.next {
                Some(_) => reply(Err(FrontEndError::Taken)),
                None => self.vhost.next = Some((socket, reply)),
            }
            return;
        }
        self.vhost.front_end = Some(FrontEnd {
            socket,
            ram: None,
            log: None,
            features: 0,
            rings: Default::default(),
            in_flight: 0,
            still: false,
            machine_still: false,
            stilled: None,
            left: false,
            gone: None,
        });
        self.clients += 1;
        self.publish();
        self.tell(EngineEvent::Clients(self.clients));
        self.client_attaches();
        reply(Ok(0));
    }

    fn change_front_end(&mut self, command: FrontEndCommand) -> Result<(), FrontEndError> {
        let front_end = self.vhost.front_end.as_mut().filter(|f| !f.left);
        let front_end = front_end.ok_or(FrontEndError::Left)?;
        match command {
            FrontEndCommand::Memory { ram } => {
                let rings = front_end.rings.iter().flatten();
                let lost: Vec<_> = rings
                    .filter_map(|ring| ring.split.check(ram.memory()).err())
                    .collect();
                front_end.ram = Some(ram);
                front_end.still = false;
                self.vhost.lost_pages = false;
                for (index, ring) in front_end.rings.iter().enumerate() {
                    self.vhost.ready |= u16::from(ring.is_some()) << index;
                }
                if let Some(error) = lost.into_iter().next() {
                    return Err(error.into());
                }
            }
            FrontEndCommand::GoOn => {
                front_end.still = false;
                for (index, ring) in front_end.rings.iter().enumerate() {
                    self.vhost.ready |= u16::from(ring.is_some()) << index;
                }
            }
            FrontEndCommand::Log { log } => front_end.log = Some(log),
            FrontEndCommand::Features { features } => front_end.features = features,
            FrontEndCommand::Enable { ring, enabled } => {
                if let Some(state) = self.vhost.ring(ring) {
                    state.enabled = enabled;
                    self.vhost.ready |= 1 << ring;
                }
            }
            FrontEndCommand::Call { ring, call } => {
                let events = &mut self.vhost.events;
                if let Some(state) = &mut front_end.rings[usize::from(ring)] {
                    events.retire(&mut self.ring, state.call);
                    state.call = call.map(|counter| events.install(counter));
                    // A signal on the old counter may have come too late to be seen.
                    self.call_guest(ring);
                }
            }
            FrontEndCommand::Error { ring, error } => {
                let events = &mut self.vhost.events;
                if let Some(state) = &mut front_end.rings[usize::from(ring)] {
                    events.retire(&mut self.ring, state.error);
                    state.error = error.map(|counter| events.install(counter));
                }
            }
            FrontEndCommand::RingLog { ring, log } => {
                if let Some(state) = self.vhost.ring(ring) {
                    state.split.log = log;
                }
            }
            FrontEndCommand::Attach { .. }
            | FrontEndCommand::Detach
            | FrontEndCommand::Start { .. }
            | FrontEndCommand::Stop { .. }
            | FrontEndCommand::Still
            | FrontEndCommand::Announce { .. } => {}
        }
        Ok(())
    }

    fn start_ring(&mut self, index: u16, setup: RingSetup) -> Result<(), FrontEndError> {
        let front_end = self.vhost.front_end.as_mut().filter(|f| !f.left);
        let front_end = front_end.ok_or(FrontEndError::Left)?;
        if front_end.rings[usize::from(index)].is_some() {
            return Err(FrontEndError::Running);
        }
        let ram = front_end.ram.as_ref().ok_or(FrontEndError::NoMemory)?;
        let OpenedRing {
            split,
            inflight,
            again,
        } = setup.open(ram, index)?;
        let RingSetup {
            enabled,
            kick,
            call,
            error,
            ..
        } = setup;
        if !again.is_empty() {
            tracing::info!(
                disk = self.config.disk,
                ring = index,
                requests = again.len(),
                "takes up requests that were not answered"
            );
        }
        let events = &mut self.vhost.events;
        let watch = events.watch(&mut self.ring, kick, index);
        let [call, error] = [call, error].map(|counter| counter.map(|fd| events.install(fd)));
        let ring = GuestRing {
            split,
            inflight,
            again: again.into(),
            without_room: VecDeque::new(),
            given_back: VecDeque::new(),
            enabled,
            broken: false,
            waiting: false,
            since: None,
            in_flight: 0,
            stopping: None,
            watch,
            call,
            error,
        };
        if let Some(front_end) = &mut self.vhost.front_end {
            front_end.rings[usize::from(index)] = Some(Box::new(ring));
            front_end.machine_still = false;
        }
        if self.vhost.room == Room::LeftBehind {
            // The requests left behind are in `again`; a retry shows if there is room for them.
            self.vhost.room = Room::Until(self.now.after(RETRY));
        }
        // Requests from before the watch are found without a kick. And the ring's last server may have ended between an
        // answer and its signal.
        self.vhost.ready |= 1 << index;
        self.call_guest(index);
        // A hypervisor starts rings only where the machine runs, and stops the machine elsewhere first.
        self.core.handle_guest_here(self.now);
        self.drain();
        Ok(())
    }

    /// Has the guest look for answers.
    fn call_guest(&mut self, index: u16) {
        if let Some(call) = self.vhost.ring(index).and_then(|ring| ring.call) {
            self.vhost.events.signal(&mut self.ring, call);
        }
    }

    fn stop_ring(&mut self, index: u16, reply: FrontEndReply) {
        match self.vhost.ring(index) {
            None => reply(Err(FrontEndError::Left)),
            Some(ring) if ring.stopping.is_some() => reply(Err(FrontEndError::Running)),
            Some(ring) => {
                ring.stopping = Some(reply);
                // Requests of an earlier engine are finished, even if the guest misbehaves.
                self.vhost.ready |= 1 << index;
                self.give_back_missing();
                self.settle_front_end();
            }
        }
    }

    /// Prepares for a machine that is about to stand still: its rings may stop at once.
    pub(in crate::engine) fn machine_stands_still(&mut self) {
        if let Some(front_end) = &mut self.vhost.front_end {
            front_end.machine_still = true;
            self.give_back_missing();
            self.settle_front_end();
        }
    }

    /// Resumes the waiting requests of rings that have not stopped, once the machine runs or could not be stopped.
    /// Requests without room are retried anyway.
    pub(in crate::engine) fn machine_goes_on(&mut self) {
        let Some(front_end) = &mut self.vhost.front_end else {
            return;
        };
        front_end.machine_still = false;
        for (index, ring) in front_end.rings.iter_mut().enumerate() {
            if let Some(ring) = ring.as_mut().filter(|ring| !ring.given_back.is_empty()) {
                let requests = std::mem::take(&mut ring.given_back);
                ring.again.extend(requests);
                self.vhost.ready |= 1 << index;
            }
        }
    }

    /// Stills the rings before a change of the memory.
    fn still_rings(&mut self, reply: FrontEndReply) {
        match &mut self.vhost.front_end {
            None => reply(Err(FrontEndError::Left)),
            Some(front_end) => {
                front_end.still = true;
                front_end.stilled = Some(reply);
                self.settle_front_end();
            }
        }
    }

    /// Detaches a front end that has left: its memory may be gone or given to another.
    fn detach_front_end(&mut self, reply: FrontEndReply) {
        match &mut self.vhost.front_end {
            None => reply(Ok(0)),
            Some(front_end) => {
                front_end.gone = Some(reply);
                self.drop_rings();
                self.front_end_left();
                self.settle_front_end();
            }
        }
    }

    /// Disconnects a front end with lost pages in its shared memory: its guest's requests cannot be served any more.
    pub(in crate::engine) fn look_for_lost_pages(&mut self) {
        let front_end = self.vhost.front_end.as_ref();
        let Some(front_end) = front_end.filter(|it| it.has_lost_pages()) else {
            return;
        };
        if !std::mem::replace(&mut self.vhost.lost_pages, true) {
            let disk = &self.config.disk;
            tracing::error!(disk, "the virtual machine is disconnected: {LOST_PAGES}");
            // The protocol's thread sees the shutdown, and detaches the front end.
            let _ = front_end.socket.shutdown(Shutdown::Both);
            self.publish();
        }
    }

    /// Disconnects the front end at the engine's end.
    pub(in crate::engine) fn hang_up(&mut self) {
        if let Some(front_end) = &self.vhost.front_end {
            let _ = front_end.socket.shutdown(Shutdown::Both);
            self.drop_rings();
            self.settle_front_end();
        }
    }

    fn drop_rings(&mut self) {
        if let Some(front_end) = &mut self.vhost.front_end {
            front_end.left = true;
            front_end.log = None;
            if let Some(reply) = front_end.stilled.take() {
                reply(Err(FrontEndError::Left));
            }
        }
        for index in 0..MOST_RINGS {
            if let Some(ring) = self.vhost.remove(&mut self.ring, index)
                && let Some(reply) = ring.stopping
            {
                reply(Err(FrontEndError::Left));
            }
        }
    }

    /// Reports rings that have stopped, and a front end whose last request has ended.
    pub(in crate::engine) fn settle_front_end(&mut self) {
        let Some(front_end) = &mut self.vhost.front_end else {
            return;
        };
        let mut stopped = 0_u16;
        for (index, ring) in front_end.rings.iter().enumerate() {
            let Some(ring) = ring.as_ref().filter(|ring| ring.stopping.is_some()) else {
                continue;
            };
            // A ring has stopped once the guest was signalled for the last answer: the ring's next server does not know
            // of a missing signal.
            let told = self.vhost.events.are_sent(ring.call);
            let done = ring.in_flight == 0
                && ring.again.is_empty()
                && !ring.split.has_answers()
                && ring.may_stop(front_end.machine_still);
            if done && told || ring.broken && ring.in_flight == 0 {
                stopped |= 1 << index;
            }
        }
        if front_end.left && front_end.in_flight == 0 {
            let gone = front_end.gone.take();
            self.vhost.front_end = None;
            self.clients -= 1;
            self.core.forget_wanted();
            self.room_again();
            self.publish();
            self.tell(EngineEvent::Clients(self.clients));
            if let Some(reply) = gone {
                reply(Ok(0));
            }
            if let Some((socket, reply)) = self.vhost.next.take() {
                self.attach_front_end(socket, reply);
            }
            return;
        }
        let mut rings = front_end.rings.iter().flatten();
        if front_end.in_flight == 0
            && !rings.any(|ring| ring.split.has_answers() && !ring.broken)
            && let Some(reply) = front_end.stilled.take()
        {
            reply(Ok(0));
        }
        while stopped != 0 {
            let index = stopped.trailing_zeros() as u16;
            stopped &= stopped - 1;
            if let Some(ring) = self.vhost.remove(&mut self.ring, index)
                && let Some(reply) = ring.stopping
            {
                if ring.broken {
                    self.publish();
                } else if !ring.without_room.is_empty() {
                    self.vhost.room = Room::LeftBehind;
                }
                reply(Ok(ring.split.base()));
            }
        }
    }

    /// Stops serving a ring, until the guest resets the device.
    pub(in crate::engine) fn break_ring(&mut self, index: u16, why: &dyn std::fmt::Display) {
        let disk = &self.config.disk;
        if self.vhost.has_lost_memory() {
            // Nothing in lost memory makes sense, and its owner is gone.
            return;
        }
        let Some(ring) = self.vhost.ring(index) else {
            return;
        };
        if std::mem::replace(&mut ring.broken, true) {
            return;
        }
        tracing::error!(
            disk,
            ring = index,
            "device broken: {why}; the ring is not served until the guest resets the device"
        );
        let error = ring.error;
        // A broken ring keeps no one waiting for its stop.
        self.vhost.answered |= 1 << index;
        if let Some(error) = error {
            self.vhost.events.signal(&mut self.ring, error);
        }
        self.publish();
    }
}

/// Returns a descriptor table's address, for chains.
pub(in crate::engine) const fn table_of(ring: &SplitRing) -> GuestAddress {
    ring.layout().descriptors
}
