//! Requests of a virtual machine that wait long for a missing part of the disk: the machine can be stopped meanwhile.
//!
//! A machine stops only when its rings do. So the waiting requests are given back, as if left by an earlier engine, and
//! the ring's next life finds them. The disk keeps asking for the missing part, and reports its arrival.

use godwit_core::request::RequestTag;

use crate::engine::config::EngineEvent;
use crate::engine::context::Context;
use crate::engine::front_ends::vhost::Vhost;
use crate::engine::front_ends::vhost::no_space::RETRY;
use crate::engine::run::Engine;
use crate::engine::slots::Owner;

impl Context {
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
}

impl Vhost {
    /// Returns true if a long wait is to be reported now: again and again.
    fn tells_of_wait(&mut self, cx: &Context) -> bool {
        let is_due = self.tell_of_wait.is_none_or(|at| at <= cx.now);
        let tells = self.front_end.is_some() && is_due && cx.is_worth_stopping();
        if tells {
            self.tell_of_wait = Some(cx.now.after(RETRY));
        }
        tells
    }

    /// Returns true if requests may be given back: the machine is about to stand still.
    pub(super) fn may_be_given_back(&self, cx: &Context) -> bool {
        let still = |front_end: &super::FrontEnd| {
            let mut rings = front_end.rings.iter().flatten();
            // Only records in memory that outlasts the ring are found again.
            front_end.machine_still && rings.all(|ring| ring.inflight.is_some())
        };
        cx.config.missing_pauses_after.is_some()
            && !cx.is_ending()
            && self.front_end.as_ref().is_some_and(still)
    }
}

impl Engine {
    /// Reports a long wait of a machine. Returns true if there may be something to report soon.
    pub(in crate::engine) fn look_for_long_waits(&mut self) -> bool {
        if self.cx.config.missing_pauses_after.is_none() {
            return false;
        }
        self.give_back_missing();
        let waits = self.cx.core.missing_waits_since().is_some();
        if self.vhost.tells_of_wait(&self.cx) {
            self.publish();
            self.cx.tell(EngineEvent::WaitsLong);
        }
        waits || self.cx.core.wants_missing()
    }

    /// Gives back the waiting requests, once the machine is about to stand still.
    pub(super) fn give_back_missing(&mut self) {
        if !self.vhost.may_be_given_back(&self.cx) {
            return;
        }
        let slots = &self.memory.slots;
        let is_of_ring = |tag: RequestTag| matches!(slots.owner(tag), Owner::Ring { .. });
        self.cx.core.give_back_missing(self.cx.now, is_of_ring);
        self.drain();
    }
}
