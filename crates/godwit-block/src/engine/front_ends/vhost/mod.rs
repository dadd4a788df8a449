//! The virtual machine that uses the disk.

mod answers;
pub(in crate::engine) mod device;
pub(in crate::engine) mod events;
mod lives;
mod long_waits;
mod no_space;
pub(in crate::engine) mod requests;
mod ring;

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use godwit_core::units::Time;

use crate::engine::context::Context;
use crate::engine::front_ends::vhost::events::EventCounters;
use crate::engine::front_ends::vhost::no_space::{RETRY, Room};
use crate::engine::front_ends::vhost::requests::RingRequest;
use crate::engine::front_ends::vhost::ring::GuestRing;
use crate::engine::stats::snapshot::FrontEndState;
use godwit_io::ring::Ring;
use godwit_vhost::features::{LOG_ALL, MOST_RINGS};
use godwit_vhost::memory::dirty_log::{DirtyLog, WriteLog};
use godwit_vhost::memory::written::WrittenPages;
use godwit_vhost::memory::{GuestRam, LOST_PAGES, Segment};
use godwit_vhost::protocol::device::FrontEndReply;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError, RingSetup};
use godwit_vhost::rings::chain::Chain;
use godwit_vhost::rings::inflight::InflightRing;

/// The memory that a front end shares, and the features that it accepted.
#[derive(Default)]
struct Shared {
    ram: Option<Arc<GuestRam>>,
    log: Option<Arc<DirtyLog>>,
    features: u64,
}

impl Shared {
    /// Returns the logs for writes to `ram`: the front end's, while on, and the node's, if given.
    fn log_of<'a>(&'a self, ram: &'a GuestRam, own: Option<&'a WrittenPages>) -> WriteLog<'a> {
        let on = self.features & LOG_ALL != 0;
        WriteLog::new(ram, self.log.as_deref().filter(|_| on), own)
    }

    fn has_lost_pages(&self) -> bool {
        self.ram.as_ref().is_some_and(|ram| ram.has_lost_pages())
            || self.log.as_ref().is_some_and(|log| log.has_lost_pages())
    }
}

/// The state of a front end.
enum Presence {
    /// Requests are taken from the rings.
    Served,
    /// No request is taken from the rings until the memory changes. The reply follows the last taken request.
    Still { reply: Option<FrontEndReply> },
    /// The front end has left, and its last requests are pending. The replies, once asked for, follow the last of them:
    /// until then transfers may touch the guest's memory.
    Left(Replies),
}

/// The replies due once a front end that has left has no request any more.
#[derive(Default)]
struct Replies {
    left: Option<FrontEndReply>,
    /// To a caller that waits for still rings.
    stilled: Option<FrontEndReply>,
}

pub(in crate::engine) struct FrontEnd {
    socket: UnixStream,
    shared: Shared,
    rings: [Option<Box<GuestRing>>; MOST_RINGS as usize],
    /// Requests held by the controller.
    in_flight: u32,
    presence: Presence,
    /// True if the machine is known to stand still: a ring may then stop while requests wait for room.
    machine_still: bool,
}

impl FrontEnd {
    fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            shared: Shared::default(),
            rings: Default::default(),
            in_flight: 0,
            presence: Presence::Served,
            machine_still: false,
        }
    }

    pub(super) const fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Returns true if pages of anything that the front end shares are lost.
    fn has_lost_pages(&self) -> bool {
        let mut records = self.rings.iter().flatten().flat_map(|ring| &ring.inflight);
        self.shared.has_lost_pages() || records.any(InflightRing::has_lost_pages)
    }

    /// Returns the rings, a bit each.
    fn served(&self) -> u16 {
        let rings = self.rings.iter().enumerate();
        rings.fold(0, |bits, (index, ring)| {
            bits | u16::from(ring.is_some()) << index
        })
    }

    /// Returns the rings that have stopped, a bit each.
    fn stopped(&self, events: &EventCounters) -> u16 {
        let mut stopped = 0;
        for (index, ring) in self.rings.iter().enumerate() {
            if let Some(ring) = ring
                && ring.has_stopped(self.machine_still, events)
            {
                stopped |= 1 << index;
            }
        }
        stopped
    }

    /// Marks the front end as gone. `reply` follows the front end's last request.
    fn leave(&mut self, reply: Option<FrontEndReply>) {
        let before = Presence::Left(Replies::default());
        let mut replies = match std::mem::replace(&mut self.presence, before) {
            Presence::Served => Replies::default(),
            Presence::Still { reply: stilled } => Replies {
                left: None,
                stilled,
            },
            Presence::Left(replies) => replies,
        };
        replies.left = reply.or(replies.left);
        self.presence = Presence::Left(replies);
    }

    /// Answers a front end that waits for still rings, once its last taken request has been answered.
    fn settle_still(&mut self) {
        let mut rings = self.rings.iter().flatten();
        if let Presence::Still { reply } = &mut self.presence
            && self.in_flight == 0
            && !rings.any(|ring| ring.split.has_answers() && !ring.broken)
            && let Some(reply) = reply.take()
        {
            reply(Ok(0));
        }
    }
}

/// The outcome of a look at a front end that is to stop or to leave.
enum Settled {
    /// The front end has left, and its last request has ended: the front end is gone, and the replies are due.
    Gone(Replies),
    /// These rings have stopped, a bit each.
    Stopped(u16),
}

/// The front end, and the memory for its requests.
#[derive(Default)]
pub(in crate::engine) struct Vhost {
    pub(in crate::engine) front_end: Option<FrontEnd>,
    /// Next front end, which waits until this one is gone.
    next: Option<(UnixStream, FrontEndReply)>,
    /// Ring request of each slot, if any.
    requests: Box<[RingRequest]>,
    /// Time of the next event for a long wait for a missing part of the disk.
    tell_of_wait: Option<Time>,
    /// Reused memory for a chain.
    chain: Chain,
    /// Reused memory for the chain's data.
    data: Vec<Segment>,
    /// Place of the data of the starting disk operation, if in guest memory; empty between operations.
    pub(in crate::engine) pieces: Vec<libc::iovec>,
    /// Rings that may have requests, a bit each.
    ready: u16,
    /// Rings that have answers for the guest, or broke, a bit each.
    answered: u16,
    /// True if a ring has more requests than a turn may take.
    eager: bool,
    /// True if the disk is elsewhere and the last search for its owner has failed.
    hopeless: bool,
    /// State of requests that wait for room in the image.
    room: Room,
    /// True if the last front end was disconnected because pages of its shared memory were lost.
    pub(in crate::engine) lost_pages: bool,
    /// The node's log of pages written here, while on. Outlives front ends.
    pub(in crate::engine) written: Option<Arc<WrittenPages>>,
    /// Signals between the guest and this engine.
    pub(in crate::engine) events: EventCounters,
}

impl Vhost {
    /// Returns the state for this many slots.
    pub(in crate::engine) fn new(slots: usize) -> Self {
        Self {
            requests: (0..slots).map(|_| RingRequest::default()).collect(),
            ..Self::default()
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
            let ram = front_end.shared.ram.as_ref();
            ram.is_some_and(|ram| ram.is_lost()) || front_end.has_lost_pages()
        })
    }

    fn ring(&mut self, index: u16) -> Option<&mut GuestRing> {
        let rings = &mut self.front_end.as_mut()?.rings;
        rings.get_mut(usize::from(index))?.as_deref_mut()
    }

    /// Records that requests of the ring cannot be taken now.
    fn stall(&mut self, index: u16, now: Time) {
        let Some(front_end) = &mut self.front_end else {
            return;
        };
        if let Some(ram) = &front_end.shared.ram
            && let Some(ring) = &mut front_end.rings[usize::from(index)]
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

    fn change(&mut self, command: FrontEndCommand, uring: &mut Ring) -> Result<(), FrontEndError> {
        let front_end = self.front_end.as_mut().ok_or(FrontEndError::Left)?;
        if let Presence::Left(_) = front_end.presence {
            return Err(FrontEndError::Left);
        }
        let rings = &mut front_end.rings;
        match command {
            FrontEndCommand::Memory { ram } => {
                let mut rings = rings.iter().flatten();
                let lost = rings.find_map(|ring| ring.split.check(ram.memory()).err());
                front_end.shared.ram = Some(ram);
                self.lost_pages = false;
                self.go_on();
                return lost.map_or(Ok(()), |error| Err(error.into()));
            }
            FrontEndCommand::GoOn => self.go_on(),
            FrontEndCommand::Log { log } => front_end.shared.log = Some(log),
            FrontEndCommand::Features { features } => front_end.shared.features = features,
            FrontEndCommand::Enable { ring, enabled } => {
                if let Some(state) = self.ring(ring) {
                    state.enabled = enabled;
                    self.ready |= 1 << ring;
                }
            }
            FrontEndCommand::Call { ring, call } => {
                if let Some(state) = &mut rings[usize::from(ring)] {
                    self.events.retire(uring, state.call);
                    state.call = call.map(|counter| self.events.install(counter));
                    // A signal on the old counter may have come too late to be seen.
                    self.call_guest(ring, uring);
                }
            }
            FrontEndCommand::Error { ring, error } => {
                if let Some(state) = &mut rings[usize::from(ring)] {
                    self.events.retire(uring, state.error);
                    state.error = error.map(|counter| self.events.install(counter));
                }
            }
            FrontEndCommand::RingLog { ring, log } => {
                if let Some(state) = self.ring(ring) {
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

    /// Takes requests from the rings again.
    fn go_on(&mut self) {
        if let Some(front_end) = &mut self.front_end {
            front_end.presence = Presence::Served;
            self.ready |= front_end.served();
        }
    }

    /// Stills the rings before a change of the memory.
    fn still(&mut self, reply: FrontEndReply) {
        match self.front_end.as_mut().map(|it| &mut it.presence) {
            None => reply(Err(FrontEndError::Left)),
            Some(Presence::Left(replies)) => replies.stilled = Some(reply),
            Some(presence) => *presence = Presence::Still { reply: Some(reply) },
        }
    }

    fn start_ring(
        &mut self,
        index: u16,
        setup: RingSetup,
        cx: &Context,
        uring: &mut Ring,
    ) -> Result<(), FrontEndError> {
        let front_end = self.front_end.as_mut().ok_or(FrontEndError::Left)?;
        if let Presence::Left(_) = front_end.presence {
            return Err(FrontEndError::Left);
        }
        let place = &mut front_end.rings[usize::from(index)];
        if place.is_some() {
            return Err(FrontEndError::Running);
        }
        let ram = front_end.shared.ram.as_ref();
        let opened = setup.open(ram.ok_or(FrontEndError::NoMemory)?, index)?;
        if !opened.again.is_empty() {
            tracing::info!(
                disk = cx.config.disk,
                ring = index,
                requests = opened.again.len(),
                "takes up requests that were not answered"
            );
        }
        let ring = GuestRing::new(index, opened, setup, &mut self.events, uring);
        *place = Some(Box::new(ring));
        front_end.machine_still = false;
        if self.room == Room::LeftBehind {
            // The requests left behind are in `again`; a retry shows if there is room for them.
            self.room = Room::Until(cx.now.after(RETRY));
        }
        // Requests from before the watch are found without a kick. And the ring's last server may have ended between an
        // answer and its signal.
        self.ready |= 1 << index;
        self.call_guest(index, uring);
        Ok(())
    }

    /// Has the guest look for answers.
    fn call_guest(&mut self, index: u16, uring: &mut Ring) {
        if let Some(call) = self.ring(index).and_then(|ring| ring.call) {
            self.events.signal(uring, call);
        }
    }

    /// Begins to stop a ring. Returns false if the stop is refused.
    fn stop_ring(&mut self, index: u16, reply: FrontEndReply) -> bool {
        match self.ring(index) {
            None => reply(Err(FrontEndError::Left)),
            Some(ring) if ring.stopping.is_some() => reply(Err(FrontEndError::Running)),
            Some(ring) => {
                ring.stopping = Some(reply);
                // Requests of an earlier engine are finished, even if the guest misbehaves.
                self.ready |= 1 << index;
                return true;
            }
        }
        false
    }

    /// Resumes the waiting requests of rings that have not stopped, once the machine runs or could not be stopped.
    /// Requests without room are retried anyway.
    pub(in crate::engine) fn machine_goes_on(&mut self) {
        let Some(front_end) = &mut self.front_end else {
            return;
        };
        front_end.machine_still = false;
        for (index, ring) in front_end.rings.iter_mut().enumerate() {
            if let Some(ring) = ring.as_mut().filter(|ring| !ring.given_back.is_empty()) {
                let requests = std::mem::take(&mut ring.given_back);
                ring.again.extend(requests);
                self.ready |= 1 << index;
            }
        }
    }

    /// Disconnects a front end with lost pages in its shared memory: its guest's requests cannot be served any more.
    /// Returns true for the first look that finds lost pages.
    pub(in crate::engine) fn look_for_lost_pages(&mut self, disk: &str) -> bool {
        let front_end = self.front_end.as_ref();
        let Some(front_end) = front_end.filter(|it| it.has_lost_pages()) else {
            return false;
        };
        if std::mem::replace(&mut self.lost_pages, true) {
            return false;
        }
        tracing::error!(disk, "the virtual machine is disconnected: {LOST_PAGES}");
        // The protocol's thread sees the shutdown, and detaches the front end.
        let _ = front_end.socket.shutdown(Shutdown::Both);
        true
    }

    /// Gives up the rings of a front end that leaves. `reply` follows the last request of the front end.
    fn drop_rings(&mut self, reply: Option<FrontEndReply>, uring: &mut Ring) {
        if let Some(front_end) = &mut self.front_end {
            front_end.shared.log = None;
            front_end.leave(reply);
        }
        for index in 0..MOST_RINGS {
            if let Some(ring) = self.remove(uring, index)
                && let Some(reply) = ring.stopping
            {
                reply(Err(FrontEndError::Left));
            }
        }
    }

    /// Looks for rings that have stopped, and for a front end whose last request has ended.
    fn settle(&mut self) -> Settled {
        let Some(front_end) = &mut self.front_end else {
            return Settled::Stopped(0);
        };
        if let Presence::Left(replies) = &mut front_end.presence
            && front_end.in_flight == 0
        {
            let replies = std::mem::take(replies);
            self.front_end = None;
            return Settled::Gone(replies);
        }
        let stopped = front_end.stopped(&self.events);
        front_end.settle_still();
        Settled::Stopped(stopped)
    }

    /// Stops serving a ring, until the guest resets the device. Returns false if the ring is not served anyway.
    fn break_ring(
        &mut self,
        index: u16,
        why: &dyn std::fmt::Display,
        disk: &str,
        uring: &mut Ring,
    ) -> bool {
        // Nothing in lost memory makes sense, and its owner is gone.
        if self.has_lost_memory() {
            return false;
        }
        let Some(ring) = self.ring(index) else {
            return false;
        };
        if std::mem::replace(&mut ring.broken, true) {
            return false;
        }
        tracing::error!(
            disk,
            ring = index,
            "device broken: {why}; the ring is not served until the guest resets the device"
        );
        let error = ring.error;
        // A broken ring keeps no one waiting for its stop.
        self.answered |= 1 << index;
        if let Some(error) = error {
            self.events.signal(uring, error);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Returns a front end with a request under way, and the answers to its commands.
    fn with_a_request() -> (
        Vhost,
        mpsc::Sender<&'static str>,
        mpsc::Receiver<&'static str>,
    ) {
        let (socket, _) = UnixStream::pair().expect("two sockets");
        let mut front_end = FrontEnd::new(socket);
        front_end.in_flight = 1;
        let vhost = Vhost {
            front_end: Some(front_end),
            ..Vhost::default()
        };
        let (sender, answers) = mpsc::channel();
        (vhost, sender, answers)
    }

    fn reply(to: &mpsc::Sender<&'static str>, name: &'static str) -> FrontEndReply {
        let to = to.clone();
        Box::new(move |_| {
            let _ = to.send(name);
        })
    }

    #[test]
    fn rings_are_still_only_after_the_last_request_of_a_front_end_that_leaves() {
        for leaves_first in [true, false] {
            let (mut vhost, sender, answers) = with_a_request();
            let leave = |vhost: &mut Vhost| {
                let front_end = vhost.front_end.as_mut().expect("a front end");
                front_end.leave(Some(reply(&sender, "left")));
            };
            if leaves_first {
                leave(&mut vhost);
                vhost.still(reply(&sender, "stilled"));
            } else {
                vhost.still(reply(&sender, "stilled"));
                leave(&mut vhost);
            }
            assert!(matches!(vhost.settle(), Settled::Stopped(0)));
            assert!(answers.try_recv().is_err(), "its request is under way");
            vhost.front_end.as_mut().expect("a front end").in_flight = 0;
            let Settled::Gone(replies) = vhost.settle() else {
                panic!("the front end stays");
            };
            assert!(replies.left.is_some() && replies.stilled.is_some());
        }
    }
}
