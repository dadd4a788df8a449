//! The events to come.

use std::collections::BTreeMap;

use godwit_core::action::PullSlot;
use godwit_core::units::Extent;

use crate::world::wires::network::Way;

/// A scheduled event.
#[derive(Clone, Copy, Debug)]
pub(super) enum Occurrence {
    /// An event of this process of a node; void once the process has ended.
    Own(usize, u32, OwnEvent),
    /// The link has carried a part of a frame from this node.
    Carried(usize),
    /// A frame arrives.
    Arrived(Way),
    /// Frames blocked at the receiver are retried.
    Unblocked(Way),
    /// A node notices that a session has ended.
    Lost {
        session: usize,
        node: usize,
    },
    /// A place in the guest's queue is free.
    Guest(usize),
    /// The client moves to the owner.
    Follow,
    Migrate,
    /// The guest's host orders the switchover of the migration of this number.
    SwitchOver(usize),
    /// The operator changes the migration of this number.
    Change(usize),
    Fault(usize),
    Restart(usize),
    /// A node looks for the other node of an undecided migration.
    Dial(usize),
    /// A node whose clients stayed looks for the owner.
    Reconnect(usize),
    /// A node that owes data looks for the owner.
    ConnectPull(usize),
    /// A disk was compared with its image, by this process of a node.
    Compared(usize, u32),
    /// A resolver's session may have done its work.
    HangUp(usize),
    Sample,
    /// A node reviews its own choice of the policy.
    Think,
}

/// An event of a node's process.
#[derive(Clone, Copy, Debug)]
pub(super) enum OwnEvent {
    /// The disk operation at this place is done.
    DiskDone(usize),
    Stored,
    /// The sharing state is stored.
    SharingStored,
    /// A disk's missing blocks are stored.
    MissingStored,
    /// The node notices that the guest has hung up.
    HangUpSeen,
    /// Data of an image arrives on the connection of this number.
    ImageAnswers(u32, PullSlot, Extent),
    /// The connection to the image ends.
    ImageHangsUp(u32),
}

/// The events to come, in their order.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    events: BTreeMap<(u64, u64), Occurrence>,
    last_number: u64,
}

impl Agenda {
    /// Returns the next number for an event or a frame.
    pub(super) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn add(&mut self, at: u64, occurrence: Occurrence) {
        let number = self.number();
        self.events.insert((at, number), occurrence);
    }

    /// Returns the time of the next event.
    pub(super) fn next(&self) -> Option<u64> {
        self.events.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn take(&mut self) -> Option<Occurrence> {
        self.events.pop_first().map(|(_, occurrence)| occurrence)
    }
}
