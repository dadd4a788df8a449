//! The events to come.

use std::collections::BTreeMap;

use super::World;

/// Acts on the world at the time of the event.
type Event = Box<dyn FnOnce(&mut World)>;

/// The events to come, in their order.
#[derive(Default)]
pub(super) struct Agenda {
    /// By time, and by number for equal times.
    events: BTreeMap<(u64, u64), Event>,
    last_number: u64,
}

impl Agenda {
    /// Returns the next number for an event or a frame.
    pub(super) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn add(&mut self, at: u64, event: Event) {
        let number = self.number();
        self.events.insert((at, number), event);
    }

    /// Returns the time of the next event.
    pub(super) fn next(&self) -> Option<u64> {
        self.events.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn take(&mut self) -> Option<Event> {
        self.events.pop_first().map(|(_, event)| event)
    }
}
