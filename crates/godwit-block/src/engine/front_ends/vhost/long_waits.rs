//! Requests of a virtual machine that wait long for a missing part of the disk: the machine can be stopped meanwhile.
//!
//! A machine stops only when its rings do. So the waiting requests are given back, as if left by an earlier engine, and
//! the ring's next life finds them. The disk keeps asking for the missing part, and reports its arrival.

use godwit_core::request::{RequestError, RequestTag};

use crate::engine::config::EngineEvent;
use crate::engine::front_ends::vhost::no_space::RETRY;
use crate::engine::run::Engine;
use crate::engine::slots::Owner;

impl Engine {
    /// Returns true if a request has waited long enough to justify stopping a machine, or would have if the machine
    /// still ran.
    pub(in crate::engine) fn waits_long(&self) -> bool {
        let pauses = self.config.missing_pauses_after.is_some();
        self.is_worth_stopping() || pauses && self.core.wants_missing()
    }

    /// Returns true if a request has waited long enough to justify stopping a running machine.
    fn is_worth_stopping(&self) -> bool {
        let Some(limit) = self.config.missing_pauses_after else {
            return false;
        };
        let since = self.core.missing_waits_since();
        since.is_some_and(|since| since.after(limit) <= self.now)
    }

    /// Reports a long wait of a machine, again and again. Returns true if there may be something to report soon.
    pub(in crate::engine) fn look_for_long_waits(&mut self) -> bool {
        if self.config.missing_pauses_after.is_none() {
            return false;
        }
        self.give_back_missing();
        let waits = self.core.missing_waits_since().is_some();
        let may_be_told = match self.vhost.tell_of_wait {
            Some(at) => at <= self.now,
            None => true,
        };
        let is_used = self.vhost.front_end.is_some();
        if is_used && may_be_told && self.is_worth_stopping() {
            self.vhost.tell_of_wait = Some(self.now.after(RETRY));
            self.publish();
            self.tell(EngineEvent::WaitsLong);
        }
        waits || self.core.wants_missing()
    }

    /// Gives back the waiting requests, once the machine is about to stand still.
    pub(in crate::engine) fn give_back_missing(&mut self) {
        if !self.may_be_given_back() {
            return;
        }
        let slots = &self.slots;
        let is_of_ring = |tag: RequestTag| matches!(slots.owner(tag), Owner::Ring { .. });
        self.core.give_back_missing(self.now, is_of_ring);
        self.drain();
    }

    /// Returns true if this is the answer to a request that was given back.
    pub(in crate::engine) fn was_given_back(&self, result: Result<(), RequestError>) -> bool {
        result == Err(RequestError::NotServing) && self.may_be_given_back()
    }

    fn may_be_given_back(&self) -> bool {
        let still = |front_end: &super::FrontEnd| {
            let mut rings = front_end.rings.iter().flatten();
            // Only records in memory that outlasts the ring are found again.
            front_end.machine_still && rings.all(|ring| ring.inflight.is_some())
        };
        self.config.missing_pauses_after.is_some()
            && self.shutdown.is_none()
            && self.vhost.front_end.as_ref().is_some_and(still)
    }
}
