//! A ring that is served.

use std::collections::VecDeque;

use godwit_core::units::Time;
use vm_memory::GuestMemory;

use crate::engine::front_ends::vhost::events::{BellId, EventCounters};
use crate::engine::front_ends::vhost::requests::Broken;
use godwit_io::ring::Ring;
use godwit_vhost::memory::dirty_log::WriteLog;
use godwit_vhost::protocol::device::FrontEndReply;
use godwit_vhost::protocol::session::{OpenedRing, RingSetup};
use godwit_vhost::rings::inflight::InflightRing;
use godwit_vhost::rings::split::SplitRing;

/// A ring being served.
pub(super) struct GuestRing {
    pub(super) split: SplitRing,
    /// Record of requests in progress, for the next engine to find.
    pub(super) inflight: Option<InflightRing>,
    /// Requests taken and not answered by an earlier engine.
    pub(super) again: VecDeque<u16>,
    /// Requests for which the image had no room.
    pub(super) without_room: VecDeque<u16>,
    /// Requests given back because they need a missing part of the disk.
    pub(super) given_back: VecDeque<u16>,
    /// True if requests may be taken.
    pub(super) enabled: bool,
    /// True if the ring's contents cannot be served.
    pub(super) broken: bool,
    /// True while the ring waits for a slot.
    pub(super) waiting: bool,
    /// Beginning of a wait of untaken requests, and the index after the last of them.
    pub(super) since: Option<(Time, u16)>,
    /// Requests held by the controller.
    pub(super) in_flight: u32,
    /// Reply to the front end, which waits for the ring to stop.
    pub(super) stopping: Option<FrontEndReply>,
    pub(super) watch: u32,
    pub(super) call: Option<BellId>,
    pub(super) error: Option<BellId>,
}

impl GuestRing {
    pub(super) fn new(
        index: u16,
        opened: OpenedRing,
        setup: RingSetup,
        events: &mut EventCounters,
        uring: &mut Ring,
    ) -> Self {
        let OpenedRing {
            split,
            inflight,
            again,
        } = opened;
        let watch = events.watch(uring, setup.kick, index);
        Self {
            split,
            inflight,
            again: again.into(),
            without_room: VecDeque::new(),
            given_back: VecDeque::new(),
            enabled: setup.enabled,
            broken: false,
            waiting: false,
            since: None,
            in_flight: 0,
            stopping: None,
            watch,
            call: setup.call.map(|counter| events.install(counter)),
            error: setup.error.map(|counter| events.install(counter)),
        }
    }

    /// Returns the first request, if one may be taken. Otherwise the guest signals the next.
    pub(super) fn first(
        &mut self,
        memory: &impl GuestMemory,
        log: WriteLog<'_>,
    ) -> Result<Option<u16>, Broken> {
        let is_stopping = self.stopping.is_some();
        if !self.enabled && !is_stopping {
            return Ok(None);
        }
        if let Some(&head) = self.again.front() {
            return Ok(Some(head));
        }
        if is_stopping {
            return Ok(None);
        }
        loop {
            if let Some(head) = self.split.peek(memory)? {
                self.split.ignore(memory, log)?;
                return Ok(Some(head));
            }
            if !self.split.listen(memory, log)? {
                return Ok(None);
            }
        }
    }

    /// Counts the first request as taken. Returns the beginning of the request's wait, if it waited.
    pub(super) fn take(&mut self, head: u16) -> Option<Time> {
        let arrived = self.since.map(|(since, _)| since);
        if self.again.pop_front().is_none() {
            self.split.take();
            let base = self.split.base();
            self.since = self
                .since
                .filter(|&(_, end)| end.wrapping_sub(base).cast_signed() > 0);
            if let Some(inflight) = &mut self.inflight {
                inflight.taken(head);
            }
        }
        self.split.begin(head);
        arrived
    }

    /// Returns true if the ring was to stop, and has.
    pub(super) fn has_stopped(&self, machine_still: bool, events: &EventCounters) -> bool {
        if self.stopping.is_none() || self.in_flight > 0 {
            return false;
        }
        // A ring has stopped once the guest was signalled for the last answer: the ring's next server does not know of
        // a missing signal.
        let done = self.again.is_empty()
            && !self.split.has_answers()
            && self.may_stop(machine_still)
            && events.are_sent(self.call);
        done || self.broken
    }

    /// Returns true if requests that wait for room, or were given back, do not keep the ring from stopping.
    fn may_stop(&self, machine_still: bool) -> bool {
        let none_waits = self.without_room.is_empty() && self.given_back.is_empty();
        none_waits || machine_still && self.inflight.is_some()
    }
}
