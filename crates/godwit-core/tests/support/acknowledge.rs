//! A destination that acknowledges double writes when it is told to.

use godwit_core::request::RequestTag;
use godwit_core::wire::{Message, TrafficClass};

use crate::support::Source;

/// The destination acknowledges the oldest double write that was sent with this tag.
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
