//! Requests of a virtual machine for which the image has no room. They wait instead of failing, as with QEMU's own
//! disks: a file system in the guest survives a wait, but not an I/O error.
//!
//! For the controller such a request is over. The guest gets no answer, as if an earlier engine had left the request.
//! The engine retries every [`RETRY`] until there is room. A ring stops only when all its requests are answered, unless
//! the machine is known to stand still: then the waiting requests are left for the ring's next life.

use std::time::Duration;

use godwit_core::request::{Operation, RequestError};
use godwit_core::units::Time;

use crate::engine::config::EngineEvent;
use crate::engine::front_ends::vhost::GuestRing;
use crate::engine::run::Engine;

/// Time between two attempts of waiting requests.
pub(in crate::engine) const RETRY: Duration = Duration::from_secs(1);

/// The state of requests that wait for room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::engine) enum Room {
    /// No request waits, as far as known.
    #[default]
    Enough,
    /// Requests wait, and are retried at this time.
    Until(Time),
    /// Requests wait, and were left for the next life of their rings.
    LeftBehind,
}

impl GuestRing {
    /// Returns true if requests that wait for room, or were given back, do not keep the ring from stopping.
    pub(in crate::engine) fn may_stop(&self, still: bool) -> bool {
        let none_waits = self.without_room.is_empty() && self.given_back.is_empty();
        none_waits || still && self.inflight.is_some()
    }
}

impl Engine {
    /// Lets the request at `head` wait if the image has no room for it, or if it was given back. Returns false if the
    /// request is to be answered.
    pub(in crate::engine) fn waits_for_room(
        &mut self,
        index: u16,
        head: u16,
        operation: &Operation,
        result: Result<(), RequestError>,
    ) -> bool {
        let writes = matches!(
            operation,
            Operation::Write { .. } | Operation::WriteZeroes { .. }
        );
        if self.was_given_back(result) {
            if let Some(ring) = self.vhost.ring(index) {
                ring.split.put_back(head);
                ring.given_back.push_back(head);
            }
            return true;
        }
        // An engine that ends cannot wait.
        if result != Err(RequestError::NoSpace) || !writes || self.shutdown.is_some() {
            return false;
        }
        let Some(ring) = self.vhost.ring(index) else {
            return false;
        };
        ring.split.put_back(head);
        ring.without_room.push_back(head);
        if !matches!(self.vhost.room, Room::Until(_)) {
            self.vhost.room = Room::Until(self.now.after(RETRY));
            self.publish();
            self.tell(EngineEvent::OutOfSpace(true));
        }
        true
    }

    /// Retries the waiting requests, once due.
    pub(in crate::engine) fn retry_for_room(&mut self) {
        match self.vhost.room {
            Room::Until(at) if at <= self.now => {}
            _ => return,
        }
        let mut lacking = 0_u16;
        let rings = self.vhost.front_end.iter_mut().flat_map(|f| &mut f.rings);
        for (index, ring) in rings.enumerate() {
            if let Some(ring) = ring.as_mut().filter(|ring| !ring.without_room.is_empty()) {
                let requests = std::mem::take(&mut ring.without_room);
                ring.again.extend(requests);
                lacking |= 1 << index;
            }
        }
        if lacking == 0 {
            return self.room_again();
        }
        self.vhost.ready |= lacking;
        self.vhost.room = Room::Until(self.now.after(RETRY));
        // Repeated: the receiver may not have been able to stop the machine before.
        self.tell(EngineEvent::OutOfSpace(true));
    }

    /// Ends the state of waiting for room.
    pub(in crate::engine) fn room_again(&mut self) {
        if std::mem::take(&mut self.vhost.room) != Room::Enough {
            self.publish();
            self.tell(EngineEvent::OutOfSpace(false));
        }
    }
}
