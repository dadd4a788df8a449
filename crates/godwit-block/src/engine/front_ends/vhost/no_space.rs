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
use crate::engine::context::Context;
use crate::engine::front_ends::vhost::Vhost;
use crate::engine::front_ends::vhost::answers::Answered;
use crate::engine::run::Engine;

/// Time between two attempts of waiting requests.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// The state of requests that wait for room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Room {
    /// No request waits, as far as known.
    #[default]
    Enough,
    /// Requests wait, and are retried at this time.
    Until(Time),
    /// Requests wait, and were left for the next life of their rings.
    LeftBehind,
}

impl Vhost {
    /// Returns true if requests wait for room, as far as known.
    pub(in crate::engine) fn lacks_room(&self) -> bool {
        self.room != Room::Enough
    }

    /// Returns true if waiting requests are to be retried.
    pub(in crate::engine) const fn is_retrying(&self) -> bool {
        matches!(self.room, Room::Until(_))
    }

    /// Lets the request at `head` wait if the image has no room for it, or if it was given back. Returns `None` if the
    /// request is to be answered.
    pub(super) fn wait_for_room(
        &mut self,
        index: u16,
        head: u16,
        operation: &Operation,
        result: Result<(), RequestError>,
        cx: &Context,
    ) -> Option<Answered> {
        let writes = matches!(
            operation,
            Operation::Write { .. } | Operation::WriteZeroes { .. }
        );
        let given_back = result == Err(RequestError::NotServing) && self.may_be_given_back(cx);
        // An engine that ends cannot wait.
        let lacks_room = result == Err(RequestError::NoSpace) && writes && !cx.is_ending();
        if !given_back && !lacks_room {
            return None;
        }
        let ring = self.ring(index)?;
        ring.split.put_back(head);
        if given_back {
            ring.given_back.push_back(head);
            return Some(Answered::Waits);
        }
        ring.without_room.push_back(head);
        if self.is_retrying() {
            return Some(Answered::Waits);
        }
        self.room = Room::Until(cx.now.after(RETRY));
        Some(Answered::FirstWaits)
    }

    /// Lets the requests that wait for room be taken again, once due. Returns `Enough` if no request waits any more, `Until`
    /// if some were retried, and `None` if nothing was due.
    fn retry(&mut self, now: Time) -> Option<Room> {
        match self.room {
            Room::Until(at) if at <= now => {}
            _ => return None,
        }
        let mut lacking = 0_u16;
        let rings = self.front_end.iter_mut().flat_map(|f| &mut f.rings);
        for (index, ring) in rings.enumerate() {
            if let Some(ring) = ring.as_mut().filter(|ring| !ring.without_room.is_empty()) {
                let requests = std::mem::take(&mut ring.without_room);
                ring.again.extend(requests);
                lacking |= 1 << index;
            }
        }
        if lacking == 0 {
            return Some(Room::Enough);
        }
        self.ready |= lacking;
        self.room = Room::Until(now.after(RETRY));
        Some(self.room)
    }
}

impl Engine {
    /// Retries the waiting requests, once due.
    pub(in crate::engine) fn retry_for_room(&mut self) {
        match self.vhost.retry(self.cx.now) {
            None => {}
            Some(Room::Enough) => self.room_again(),
            // Repeated: the receiver may not have been able to stop the machine before.
            Some(_) => self.cx.tell(EngineEvent::OutOfSpace(true)),
        }
    }

    /// Ends the state of waiting for room.
    pub(super) fn room_again(&mut self) {
        if std::mem::take(&mut self.vhost.room) != Room::Enough {
            self.publish();
            self.cx.tell(EngineEvent::OutOfSpace(false));
        }
    }
}
