//! Events of the device's queues and queue pairs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::time::{Duration, Instant};

use godwit_verbs::abi::*;

use super::{free, with, zeroed};

/// The events, and the objects that they name.
#[derive(Default)]
pub(crate) struct Events {
    /// Completion queues and queue pairs by their cookie.
    pub(crate) made: BTreeMap<usize, usize>,
    /// Queues with announced events, and the number of unacknowledged events of each.
    pub(crate) unheard: BTreeMap<usize, i32>,
    /// Events of completions that the device's library took and that name no queue of its own.
    pub(crate) wild: usize,
    /// Waiting asynchronous events: the named object, the kind, and the device's object.
    pub(crate) asynchronous: VecDeque<(usize, c_int, usize)>,
    /// The file of the last channel.
    pub(crate) channel: c_int,
    /// Objects that are being destroyed.
    pub(crate) ending: BTreeSet<usize>,
}

/// Waits, like the device's library at the end of an object, until all of its events are acknowledged.
pub(super) fn wait_until_heard(object: usize) {
    with(|device| device.events.ending.insert(object));
    let began = Instant::now();
    while with(|device| {
        device
            .events
            .unheard
            .get(&object)
            .is_some_and(|count| *count != 0)
    }) {
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "its events are never acknowledged"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    with(|device| {
        (
            device.events.ending.remove(&object),
            device.events.unheard.remove(&object),
        )
    });
}
pub(super) unsafe extern "C" fn create_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let channel = zeroed::<ibv_comp_channel>();
    ((*channel).context, (*channel).fd) = (context, libc::eventfd(0, libc::EFD_CLOEXEC));
    with(|device| device.events.channel = (*channel).fd);
    channel
}
pub(super) unsafe extern "C" fn destroy_channel(channel: *mut ibv_comp_channel) -> c_int {
    libc::close((*channel).fd);
    free(channel)
}
/// An event names a queue of the library's own, whose operations the library then looks for in front of its context.
pub(super) unsafe extern "C" fn get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    cookie: *mut *mut c_void,
) -> c_int {
    let mut named = 0u64;
    if libc::read((*channel).fd, (&raw mut named).cast(), 8) != 8 {
        return -1;
    }
    *queue = named as *mut ibv_cq;
    *cookie = (**queue).cq_context;
    with(|device| {
        device.events.wild += usize::from(
            !device
                .events
                .made
                .values()
                .any(|made| *made as u64 == named),
        )
    });
    0
}
pub(super) unsafe extern "C" fn ack_cq_events(queue: *mut ibv_cq, count: c_uint) {
    with(|device| *device.events.unheard.entry(queue.addr()).or_default() -= count as i32);
}
/// Returns the event only after the destruction of its object has begun.
pub(super) unsafe extern "C" fn get_async_event(
    _: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    let Some((named, kind, object)) = with(|device| device.events.asynchronous.pop_front()) else {
        return -1;
    };
    with(|device| *device.events.unheard.entry(object).or_default() += 1);
    while !with(|device| device.events.ending.contains(&object)) {
        std::thread::sleep(Duration::from_millis(1));
    }
    ((*event).element, (*event).event_type) = (named as *mut c_void, kind);
    0
}
pub(super) unsafe extern "C" fn ack_async_event(event: *mut ibv_async_event) {
    with(|device| {
        *device
            .events
            .unheard
            .entry((*event).element.addr())
            .or_default() -= 1
    });
}
