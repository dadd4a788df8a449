//! Requests of a virtual machine that wait long for a part of the disk which is not here: the machine can be stopped
//! meanwhile.
//!
//! A machine stops only when its rings do. So what waits is given back then, as if an earlier engine had left it, and its
//! ring's next life finds it. The disk goes on to ask for what it waited for, and tells when that is here.

use godwit_core::request::{RequestError, RequestTag};

use crate::engine::config::EngineEvent;
use crate::engine::front_ends::vhost::no_space::RETRY;
use crate::engine::run::Engine;
use crate::engine::slots::Owner;

impl Engine {
    /// Whether somebody waits for as long as is worth stopping a machine, or would if it were not stopped.
    pub(in crate::engine) fn waits_long(&self) -> bool {
        let pauses = self.config.missing_pauses_after.is_some();
        self.is_worth_stopping() || pauses && self.core.wants_missing()
    }

    /// Whether somebody waits for as long as is worth stopping a machine that runs.
    fn is_worth_stopping(&self) -> bool {
        let Some(limit) = self.config.missing_pauses_after else {
            return false;
        };
        let since = self.core.missing_waits_since();
        since.is_some_and(|since| since.after(limit) <= self.now)
    }

    /// Tells of a machine that waits for long, again and again. Whether there may be something to tell of soon.
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

    /// Gives back what waits, once the machine is about to stand still.
    pub(in crate::engine) fn give_back_missing(&mut self) {
        if !self.may_be_given_back() {
            return;
        }
        let slots = &self.slots;
        let is_of_ring = |tag: RequestTag| matches!(slots.owner(tag), Owner::Ring { .. });
        self.core.give_back_missing(self.now, is_of_ring);
        self.drain();
    }

    /// Whether this is the answer to a request that was given back.
    pub(in crate::engine) fn was_given_back(&self, result: Result<(), RequestError>) -> bool {
        result == Err(RequestError::NotServing) && self.may_be_given_back()
    }

    fn may_be_given_back(&self) -> bool {
        let still = |front_end: &super::FrontEnd| {
            let mut rings = front_end.rings.iter().flatten();
            // Only what is noted in memory that outlasts the ring is found again.
            front_end.machine_still && rings.all(|ring| ring.inflight.is_some())
        };
        self.config.missing_pauses_after.is_some()
            && self.shutdown.is_none()
            && self.vhost.front_end.as_ref().is_some_and(still)
    }
}
