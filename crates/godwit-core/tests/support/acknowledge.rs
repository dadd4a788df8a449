//! A destination that acknowledges double writes on demand.

use godwit_core::request::RequestTag;
use godwit_core::wire::{Message, TrafficClass};

use crate::support::Source;

/// Acknowledges the oldest double write sent with this tag, as the destination.
pub(crate) fn acknowledge(source: &mut Source, tag: u32) {
    let at = source
        .doubled
        .iter()
        .position(|sent| sent.0 == RequestTag(tag));
    let (_, id, generation) = source.doubled.remove(at.expect("it was sent"));
    let message = Message::Ack {
        tag: id,
        generation,
        result: Ok(()),
    };
    let class = TrafficClass::Sync;
    source.core.handle_message(source.now, class, message, None);
}
