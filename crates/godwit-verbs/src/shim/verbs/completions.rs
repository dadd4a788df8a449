//! Completion queues, and the channels for their events.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::completions_ex::{self, Reading};
use super::contexts::refuse;
use super::passed;
use crate::abi::*;
use crate::shim::data_path::gate::Gate;
use crate::shim::descriptors;
use crate::shim::objects::{self, *};
use crate::shim::real::real;
use crate::shim::world::{Object, running_world};
use crate::tables::Call;

/// Entries beyond the application's request, for markers of suspended queue pairs.
pub(in crate::shim) const SPARE_ENTRIES: c_int = 64;

/// `ibv_create_comp_channel`
pub unsafe fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let Some(parent) = objects::context(context) else {
        return (real().create_comp_channel)(context);
    };
    let mut world = running_world();
    let made = (real().create_comp_channel)(parent.real.load(Ordering::Acquire));
    if made.is_null() {
        return made;
    }
    let numbers = descriptors::gathering()
        .and_then(|fd| Ok((fd, close_unless(fd, descriptors::signal())?)))
        .and_then(|(fd, signal)| {
            let led = descriptors::put_into(fd, (*made).fd)
                .and_then(|()| descriptors::put_into(fd, signal));
            close_unless(fd, close_unless(signal, led))?;
            Ok((fd, signal))
        });
    let (fd, signal) = match numbers {
        Ok(numbers) => numbers,
        Err(error) => {
            (real().destroy_comp_channel)(made);
            return refuse(error.raw_os_error().unwrap_or(libc::EMFILE));
        }
    };
    let Some(id) = world.add(Call::CompletionChannel { context: parent.id }) else {
        libc::close(fd);
        libc::close(signal);
        (real().destroy_comp_channel)(made);
        return refuse(libc::EINVAL);
    };
    let shadow = Box::into_raw(Box::new(ShadowChannel {
        face: ibv_comp_channel {
            context,
            fd,
            refcnt: 0,
        },
        id,
        real: AtomicPtr::new(made),
        signal,
        state: Mutex::new(ChannelState {
            device: Some((*made).fd),
            events: VecDeque::new(),
        }),
        made_ahead: AtomicBool::new(false),
    }));
    world.objects.insert(id, Object::Channel(shadow));
    shadow.cast()
}

/// Closes `number` if the next step failed. Returns the step's result.
pub(super) fn close_unless<T>(number: c_int, came: io::Result<T>) -> io::Result<T> {
    if came.is_err() {
        // SAFETY: takes no pointer; the caller has made it and uses it no more.
        unsafe { libc::close(number) };
    }
    came
}

/// `ibv_destroy_comp_channel`
pub unsafe fn destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let Some(shadow) = objects::channel(channel) else {
        return (real().destroy_comp_channel)(channel);
    };
    let mut world = running_world();
    if world.roadmap.user_of(shadow.id).is_some() {
        return libc::EBUSY;
    }
    let result = (real().destroy_comp_channel)(shadow.real.load(Ordering::Acquire));
    if result == 0 {
        libc::close(shadow.face.fd);
        libc::close(shadow.signal);
        world.remove(shadow.id);
        drop(Box::from_raw(channel.cast::<ShadowChannel>()));
    }
    result
}

/// Makes a completion queue of the device, with room for markers if the device allows.
pub(in crate::shim) unsafe fn make_cq(
    context: *mut ibv_context,
    entries: c_int,
    shadow: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let made = (real().create_cq)(
        context,
        entries.saturating_add(SPARE_ENTRIES),
        shadow,
        channel,
        vector,
    );
    if made.is_null() {
        (real().create_cq)(context, entries, shadow, channel, vector)
    } else {
        made
    }
}

/// `ibv_create_cq`
pub unsafe fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cookie: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    create(context, entries, cookie, channel, vector, None)
}

/// `ibv_create_cq_ex`, for a queue that is read by this library's own calls. With `shared`, threads wait for each
/// other.
pub(super) unsafe fn create_readable(
    context: *mut ibv_context,
    wanted: &ibv_cq_init_attr_ex,
    shared: bool,
) -> *mut ibv_cq {
    create(
        context,
        c_int::try_from(wanted.cqe).unwrap_or(0),
        wanted.cq_context,
        wanted.channel,
        c_int::try_from(wanted.comp_vector).unwrap_or(-1),
        Some((completions_ex::calls(wanted.wc_flags), shared)),
    )
}

unsafe fn create(
    context: *mut ibv_context,
    entries: c_int,
    cookie: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
    read_by: Option<(ibv_cq_ex_polled, bool)>,
) -> *mut ibv_cq {
    let Some(parent) = objects::context(context) else {
        return (real().create_cq)(context, entries, cookie, channel, vector);
    };
    if entries <= 0 {
        return refuse(libc::EINVAL);
    }
    let mut world = running_world();
    let events = objects::channel(channel);
    let context_behind = parent.real.load(Ordering::Acquire);
    let channel_behind = events.map_or(ptr::null_mut(), |events| {
        events.real.load(Ordering::Acquire)
    });
    // The device's queue carries the shadow's address, so the shadow's memory is allocated first.
    let shadow = Box::into_raw(Box::<ShadowCq>::new_uninit());
    let made = make_cq(
        context_behind,
        entries,
        shadow.cast(),
        channel_behind,
        vector,
    );
    let call = Call::CompletionQueue {
        context: parent.id,
        channel: events.map(|events| events.id),
        entries,
        vector,
    };
    let id = if made.is_null() {
        None
    } else {
        world.add(call)
    };
    let Some(id) = id else {
        if !made.is_null() {
            (real().destroy_cq)(made);
        }
        drop(Box::from_raw(shadow));
        return ptr::null_mut();
    };
    let operations = &(*context_behind).ops;
    let (Some(poll), Some(notify)) = (operations.poll_cq, operations.req_notify_cq) else {
        (real().destroy_cq)(made);
        world.remove(id);
        drop(Box::from_raw(shadow));
        return refuse(libc::EOPNOTSUPP);
    };
    let shadow = shadow.cast::<ShadowCq>();
    let (calls, shared) = read_by.unwrap_or_default();
    shadow.write(ShadowCq {
        face: ibv_cq {
            context,
            channel,
            cq_context: cookie,
            handle: (*made).handle,
            cqe: (*made).cqe.saturating_sub(SPARE_ENTRIES).max(entries),
            mutex: [0; 5],
            cond: [0; 6],
            comp_events_completed: 0,
            async_events_completed: 0,
        },
        polled: UnsafeCell::new(calls),
        reading: Reading::new(shared),
        id,
        vector,
        made_ahead: AtomicPtr::new(ptr::null_mut()),
        lane: Gate::new(CqLane {
            real: made,
            poll,
            notify,
            routes: Vec::new(),
            last: (0, ptr::null()),
            drained: VecDeque::new(),
            suspended: false,
            backlog: false,
            markers: 0,
            armed: Armed::No,
        }),
    });
    world.objects.insert(id, Object::Cq(shadow));
    shadow.cast()
}

/// `ibv_destroy_cq`
pub unsafe fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    let Some(shadow) = objects::cq(cq) else {
        let result = (real().destroy_cq)(cq);
        if result == 0 {
            passed::queues().remove(&cq.addr());
        }
        return result;
    };
    let mut world = running_world();
    if world.roadmap.user_of(shadow.id).is_some() {
        return libc::EBUSY;
    }
    let device_queue = shadow.lane.lock().real;
    let result = (real().destroy_cq)(device_queue);
    if result == 0 {
        if let Some(events) = objects::channel(shadow.face.channel) {
            let mut state = state(events);
            let before = state.events.len();
            state.events.retain(|event| *event != cq as usize);
            if before > 0 && state.events.is_empty() {
                descriptors::set(events.signal, false);
            }
        }
        world.remove(shadow.id);
        drop(Box::from_raw(cq.cast::<ShadowCq>()));
    }
    result
}

/// `ibv_resize_cq`
pub unsafe fn resize_cq(cq: *mut ibv_cq, entries: c_int) -> c_int {
    let Some(shadow) = objects::cq(cq) else {
        return (real().resize_cq)(cq, entries);
    };
    let _world = running_world();
    let device_queue = shadow.lane.lock().real;
    // First the plain size: the room for markers must not make a size valid that the device refuses.
    let result = (real().resize_cq)(device_queue, entries);
    let mut spare = 0;
    if result == 0 && (real().resize_cq)(device_queue, entries.saturating_add(SPARE_ENTRIES)) == 0 {
        spare = SPARE_ENTRIES;
    }
    if result == 0 {
        (*cq).cqe = (*device_queue).cqe.saturating_sub(spare).max(entries);
    }
    result
}

pub(in crate::shim) fn state(channel: &ShadowChannel) -> MutexGuard<'_, ChannelState> {
    channel.state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the application's descriptor announce events of the device's channel with this descriptor, or of no device.
pub(in crate::shim) fn lead(
    channel: &ShadowChannel,
    state: &mut ChannelState,
    device: Option<c_int>,
) -> io::Result<()> {
    if state.device == device {
        return Ok(());
    }
    if let Some(device) = state.device.take() {
        descriptors::take_out_of(channel.face.fd, device)?;
    }
    if let Some(device) = device {
        descriptors::put_into(channel.face.fd, device)?;
    }
    state.device = device;
    Ok(())
}

/// Adds an event that the device's channel does not have.
pub(in crate::shim) fn add_event(
    channel: &ShadowChannel,
    state: &mut ChannelState,
    queue: *const ShadowCq,
) {
    state.events.push_back(queue as usize);
    if state.events.len() == 1 {
        descriptors::set(channel.signal, true);
    }
}

/// Announces a completion that was drained for the application.
pub(in crate::shim) fn tell(channel: &ShadowChannel, cq: *const ShadowCq) {
    add_event(channel, &mut state(channel), cq);
}

/// The queue of an event.
pub(in crate::shim) enum Event {
    Shadow(*mut ShadowCq),
    /// A queue that the application has as the device made it, with the application's cookie.
    Device(*mut ibv_cq, *mut c_void),
}

/// Takes the device's event, if any. The device's count of unacknowledged events stays zero, so that its queue can be
/// destroyed at any time. The application's own acknowledgements end in the shadow.
pub(in crate::shim) unsafe fn take_event(channel: &ShadowChannel) -> Option<Event> {
    let device_channel = channel.real.load(Ordering::Acquire);
    let mut ready = libc::pollfd {
        fd: (*device_channel).fd,
        events: libc::POLLIN,
        revents: 0,
    };
    if libc::poll(&raw mut ready, 1, 0) != 1 || ready.revents & libc::POLLIN == 0 {
        return None;
    }
    if channel.made_ahead.load(Ordering::Acquire) {
        return read_event(device_channel).map(Event::Shadow);
    }
    let (mut queue, mut cookie) = (ptr::null_mut(), ptr::null_mut());
    if (real().get_cq_event)(device_channel, &raw mut queue, &raw mut cookie) != 0 {
        return None;
    }
    if passed::queues().contains(&queue.addr()) {
        // The application acknowledges this event.
        return Some(Event::Device(queue, cookie));
    }
    (real().ack_cq_events)(queue, 1);
    Some(Event::Shadow(cookie.cast()))
}

/// As `ibv_get_cq_event`, which takes the value in an event for a queue of libibverbs' own and looks for its operations
/// in front of its context. A shadow has no such operations there. Only soft-RoCE's queues are made ahead, and
/// soft-RoCE has no operation to call for an event.
unsafe fn read_event(device_channel: *mut ibv_comp_channel) -> Option<*mut ShadowCq> {
    // `struct ib_uverbs_comp_event_desc`
    let mut handle = 0u64;
    let size = size_of_val(&handle);
    let read = libc::read((*device_channel).fd, (&raw mut handle).cast(), size);
    if usize::try_from(read) != Ok(size) {
        return None;
    }
    let queue = handle as *mut ibv_cq;
    if let Some(shadow) = objects::cq(queue) {
        let device_queue = shadow.made_ahead.load(Ordering::Acquire);
        if !device_queue.is_null() {
            (real().ack_cq_events)(device_queue, 1);
        }
        return Some(queue.cast());
    }
    // A queue that this process has made itself, on a channel that was made ahead.
    let shadow = (*queue).cq_context;
    (real().ack_cq_events)(queue, 1);
    Some(shadow.cast())
}

/// Returns the next event without waiting: an event of a drained completion, or the device's.
unsafe fn next_event(channel: &ShadowChannel) -> Option<(*mut ibv_cq, *mut c_void)> {
    let told = |queue: *mut ShadowCq| (queue.cast(), (*queue).face.cq_context);
    let mut state = state(channel);
    if let Some(event) = state.events.pop_front() {
        if state.events.is_empty() {
            descriptors::set(channel.signal, false);
        }
        return Some(told(event as *mut ShadowCq));
    }
    state.device?;
    let queue = match take_event(channel)? {
        Event::Shadow(queue) => queue,
        Event::Device(queue, cookie) => return Some((queue, cookie)),
    };
    drop(state);
    // An event is announced once for each request of the application.
    match (*queue).lane.enter() {
        Some(mut lane) => lane.armed = Armed::No,
        None => (*queue).lane.lock().armed = Armed::No,
    }
    Some(told(queue))
}

/// `ibv_get_cq_event`
pub unsafe fn get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cookie: *mut *mut c_void,
) -> c_int {
    let Some(shadow) = objects::channel(channel) else {
        return (real().get_cq_event)(channel, cq, cookie);
    };
    let may_wait = libc::fcntl(shadow.face.fd, libc::F_GETFL) & libc::O_NONBLOCK == 0;
    loop {
        if let Some(event) = next_event(shadow) {
            (*cq, *cookie) = event;
            return 0;
        }
        if !may_wait {
            *libc::__errno_location() = libc::EAGAIN;
            return -1;
        }
        let mut ready = libc::pollfd {
            fd: shadow.face.fd,
            events: libc::POLLIN,
            revents: 0,
        };
        libc::poll(&raw mut ready, 1, -1);
    }
}

/// `ibv_ack_cq_events`
pub unsafe fn ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    if objects::cq(cq).is_none() {
        (real().ack_cq_events)(cq, count);
    }
}
