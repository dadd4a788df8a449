//! At the node that gave a disk away: sends the owner the missing blocks on request.

use core::num::NonZeroU64;

use crate::action::{
    Action, Content, DiskOperation, DiskTag, Inspect, PULL_SECTORS, PULL_SLOTS, PullSlot,
};
use crate::controller::Controller;
use crate::controller::cx::Cx;
use crate::controller::transfer::remainder::{PullLink, SILENT_AFTER};
use crate::request::RequestError;
use crate::units::{Extent, Time};
use crate::wire::{Message, TrafficClass};

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Serving {
    Nothing,
    /// The extent is being read for the owner.
    Reading(Extent),
    /// The read belongs to a lost connection. Afterwards `next` is read, if the owner has asked again since.
    InVain {
        next: Option<Extent>,
    },
}

/// The debt of a node that gave a disk away without a part: its reads for the owner, and its reminders.
#[derive(Debug)]
pub(in crate::controller) struct Owing {
    slots: [Serving; PULL_SLOTS as usize],
    /// The owner's last sign of life on this connection, if the owner gives any.
    heard: Option<Time>,
    /// Time of the next reminder to the owner of this node's debt.
    pub(in crate::controller) tell_at: Option<Time>,
    /// Maximum bytes per second that the owner may pull of this node's debt.
    pub(in crate::controller) bandwidth: Option<NonZeroU64>,
}

impl Owing {
    pub(in crate::controller) const fn new() -> Self {
        Self {
            slots: [Serving::Nothing; PULL_SLOTS as usize],
            heard: None,
            tell_at: None,
            bandwidth: None,
        }
    }

    pub(in crate::controller) const fn owner_heard(&mut self, now: Time) {
        self.heard = Some(now);
    }

    /// Handles the loss of the connection to the owner, who will repeat unanswered pulls.
    pub(in crate::controller) fn link_lost(&mut self) {
        self.heard = None;
        for slot in &mut self.slots {
            if *slot != Serving::Nothing {
                *slot = Serving::InVain { next: None };
            }
        }
    }
}

impl Owing {
    /// Handles the owner's request for a part of the disk. An invalid request is not answered.
    pub(in crate::controller) fn serve_pull(
        &mut self,
        cx: &mut Cx,
        slot: PullSlot,
        extent: Extent,
    ) {
        let owed = cx.authority.owes().is_some()
            && extent.within(cx.capacity)
            && extent.sectors() <= PULL_SECTORS;
        let Some(serving) = self.slots.get_mut(usize::from(slot.0)).filter(|_| owed) else {
            return;
        };
        match serving {
            Serving::Nothing => *serving = Serving::Reading(extent),
            Serving::InVain { next } => {
                *next = Some(extent);
                return;
            }
            Serving::Reading(_) => return,
        }
        read_owed(cx, slot, extent);
    }

    /// Handles the end of a read for the owner.
    pub(in crate::controller) fn owed_read(
        &mut self,
        cx: &mut Cx,
        slot: PullSlot,
        result: Result<Content, RequestError>,
    ) {
        let Some(serving) = self.slots.get_mut(usize::from(slot.0)) else {
            return;
        };
        match core::mem::replace(serving, Serving::Nothing) {
            Serving::Nothing | Serving::InVain { next: None } => {}
            Serving::InVain { next: Some(extent) } => {
                *serving = Serving::Reading(extent);
                read_owed(cx, slot, extent);
            }
            Serving::Reading(extent) => {
                let message = Message::Pulled {
                    slot,
                    extent,
                    zeroes: result == Ok(Content::Zeroes),
                    result: result.map(|_| ()),
                };
                cx.send(TrafficClass::Pull, message);
            }
        }
    }
}

impl Controller {
    /// Returns true while the owner of a disk of which this node owes a part is connected and gives signs of life. An
    /// owner that never gives signs of life counts as alive while connected.
    pub fn owner_is_there(&self) -> bool {
        let is_silent = |heard: Time| heard.after(SILENT_AFTER) <= self.cx.now;
        self.pull_link == PullLink::Dialled && !self.owing.heard.is_some_and(is_silent)
    }
}

fn read_owed(cx: &mut Cx, slot: PullSlot, extent: Extent) {
    cx.act(Action::Disk {
        tag: DiskTag::Owed(slot),
        operation: DiskOperation::Read {
            extent,
            inspect: Inspect::Zeroes,
        },
    });
}
