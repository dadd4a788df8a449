//! The context of the controller's parts.

use std::collections::VecDeque;

use crate::action::{Action, PULL_SLOTS};
use crate::authority::{Authority, AuthorityRecord};
use crate::controller::Limits;
use crate::controller::requests::slots::{Slots, TagList};
use crate::event::Event;
use crate::planted::PlantedBug;
use crate::request::RequestTag;
use crate::units::{Sectors, Time};
use crate::wire::{Message, TrafficClass};
use crate::write_table::WriteTable;

/// State that every part of the controller may use: the clock, the disk, its ownership, the requests, and the actions.
#[derive(Debug)]
pub(in crate::controller) struct Cx {
    pub(in crate::controller) now: Time,
    pub(in crate::controller) limits: Limits,
    pub(in crate::controller) capacity: Sectors,
    pub(in crate::controller) authority: Authority,
    pub(in crate::controller) slots: Slots,
    pub(in crate::controller) table: WriteTable,
    /// Tags whose blocker is gone, to be examined again.
    pub(in crate::controller) ready: VecDeque<RequestTag>,
    pub(in crate::controller) actions: VecDeque<Action>,
    #[cfg(feature = "planted-bugs")]
    pub(in crate::controller) planted: Option<PlantedBug>,
    /// Records that were acted on too early.
    #[cfg(feature = "planted-bugs")]
    pub(in crate::controller) used_early: u32,
}

impl Cx {
    pub(in crate::controller) fn new(
        limits: Limits,
        capacity: Sectors,
        record: AuthorityRecord,
    ) -> Self {
        Self {
            now: Time(0),
            limits,
            capacity,
            authority: Authority::new(record),
            slots: Slots::new(limits.requests),
            table: WriteTable::new(limits.requests + u32::from(PULL_SLOTS)),
            ready: VecDeque::with_capacity(limits.requests as usize),
            actions: VecDeque::with_capacity(
                limits.requests as usize * 4 + usize::from(limits.window_chunks) * 2 + 16,
            ),
            #[cfg(feature = "planted-bugs")]
            planted: None,
            #[cfg(feature = "planted-bugs")]
            used_early: 0,
        }
    }

    #[cfg(feature = "planted-bugs")]
    pub(in crate::controller) fn has_bug(&self, bug: PlantedBug) -> bool {
        self.planted == Some(bug)
    }

    #[cfg(not(feature = "planted-bugs"))]
    #[inline]
    #[allow(
        clippy::unused_self,
        reason = "it has the signature of its counterpart"
    )]
    pub(in crate::controller) const fn has_bug(&self, _: PlantedBug) -> bool {
        false
    }

    #[inline]
    pub(in crate::controller) fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    #[inline]
    pub(in crate::controller) fn send(&mut self, class: TrafficClass, message: Message) {
        self.act(Action::Send { class, message });
    }

    pub(in crate::controller) fn notify(&mut self, event: Event) {
        self.act(Action::Notify(event));
    }

    /// Has the tags of a list examined again.
    pub(in crate::controller) fn wake(&mut self, mut waiters: TagList) {
        while let Some(tag) = self.slots.pop(&mut waiters) {
            self.ready.push_back(tag);
        }
    }
}
