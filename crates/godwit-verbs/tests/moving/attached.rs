//! A process that has taken over a holder's objects: the device's files belong to another process, and events of queues
//! carry addresses in this process.

use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

use godwit_verbs::abi::*;
use godwit_verbs::shim::{self, HandedOver, Plan};
use serde_json::json;

use crate::device::{complete_sends, with};
use crate::{Application, chain, suspend_and_release};

unsafe extern "C" {
    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
}

/// Returns a file that is readable at once.
fn event_file() -> OwnedFd {
    // SAFETY: a new descriptor without another owner.
    unsafe { OwnedFd::from_raw_fd(libc::eventfd(1, libc::EFD_CLOEXEC)) }
}

/// Returns a holder's hand-over for this plan.
pub(crate) fn held(plan: &Plan, files: usize) -> HandedOver {
    let said = json!({"plan": plan.name, "answers": []});
    let mut handed: HandedOver = serde_json::from_value(said).unwrap();
    handed.descriptors = (0..files).map(|_| event_file()).collect();
    handed
}

/// Moves the process, which takes over objects made ahead: two files of its device, and one file for each channel.
fn move_with(application: &Application, files: usize) {
    let plan = shim::plan();
    suspend_and_release(application, 0);
    shim::attach(held(&plan, files)).unwrap();
    shim::resume(None).unwrap();
}

/// Announces a completion on the device's last channel. The event names the queue `named`.
fn tell(named: usize, shadow: *mut ibv_cq) {
    let file = with(|device| {
        let queue = device.events.made[&shadow.addr()];
        *device.events.unheard.entry(queue).or_default() += 1;
        device.events.channel
    });
    let named = named as u64;
    // SAFETY: eight bytes to the channel's file.
    let written = unsafe { libc::write(file, (&raw const named).cast(), 8) };
    assert_eq!(written, 8);
}

fn event_of(channel: *mut ibv_comp_channel) -> (*mut ibv_cq, *mut c_void) {
    let (mut queue, mut cookie) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the channel lives.
    let got = unsafe { shim::get_cq_event(channel, &raw mut queue, &raw mut cookie) };
    assert_eq!(got, 0);
    (queue, cookie)
}

#[test]
fn events_of_completions_find_their_queue_and_are_acknowledged_at_once() {
    let application = Application::start();
    let cookie = |number: usize| number as *mut c_void;
    // SAFETY: the calls are in the order that verbs demand.
    let make = |channel, number| unsafe {
        shim::create_cq(application.context, 4, cookie(number), channel, 0)
    };
    // SAFETY: the context is the application's.
    let channel = unsafe { shim::create_comp_channel(application.context) };
    let ahead = make(channel, 7);
    move_with(&application, 3);
    let later = make(channel, 8);
    let device_queue = |shadow: *mut ibv_cq| with(|device| device.events.made[&shadow.addr()]);
    for (named, shadow, number) in [
        (ahead.addr(), ahead, 7),
        (device_queue(later), later, 8),
        (ahead.addr(), ahead, 7),
    ] {
        tell(named, shadow);
        assert_eq!(event_of(channel), (shadow, cookie(number)));
        assert_eq!(
            with(|device| device.events.wild),
            0,
            "the device's library reads what is in front of a queue that is not its own"
        );
        let queue = device_queue(shadow);
        assert_eq!(
            with(|device| device.events.unheard[&queue]),
            0,
            "the end of the queue would wait for this"
        );
    }
    // SAFETY: as verbs demand.
    unsafe {
        assert_eq!([ahead, later].map(|queue| shim::destroy_cq(queue)), [0, 0]);
        assert_eq!(shim::destroy_comp_channel(channel), 0);
    }
}

/// `IBV_EVENT_COMM_EST`
const ESTABLISHED: c_int = 4;

#[test]
fn the_end_of_a_queue_pair_does_not_wait_for_a_thread_that_has_its_event() {
    let application = Application::start();
    move_with(&application, 2);
    let (context, shadow) = (application.context.addr(), application.pair.addr());
    with(|device| {
        let object = device.events.made[&shadow];
        device
            .events
            .asynchronous
            .push_back((shadow, ESTABLISHED, object));
    });
    let thread = std::thread::spawn(move || {
        let mut event = ibv_async_event {
            element: ptr::null_mut(),
            event_type: 0,
        };
        // SAFETY: the context lives until the event is taken.
        let got = unsafe { ibv_get_async_event(context as *mut ibv_context, &raw mut event) };
        (got, event.element.addr())
    });
    while with(|device| !device.events.asynchronous.is_empty()) {
        std::thread::yield_now();
    }
    // The event's queue pair ends first.
    drop(application);
    assert_eq!(thread.join().unwrap(), (0, shadow));
}

#[test]
fn a_full_queue_is_full_and_what_it_took_is_told_whoever_opened_the_device() {
    let application = Application::start();
    move_with(&application, 2);
    with(|device| device.write_refused = true);
    // An extra entry beyond the granted capacity, for a marker.
    assert_eq!(
        [1, 2, 3, 4].map(|wr_id| application.send(wr_id)),
        [0, 0, 0, libc::ENOMEM]
    );
    assert_eq!(with(|device| device.rings), 4);
    complete_sends();
    assert_eq!(application.poll(), [1, 2, 3]);
    // Only a part of the list fits.
    // SAFETY: integers, null pointers and a union of both; the requests live until the call returns.
    unsafe {
        let mut list: [ibv_send_wr; 5] = std::mem::zeroed();
        chain(&mut list);
        let mut bad = ptr::null_mut();
        let posted = shim::post_send(application.pair, &raw mut list[0], &raw mut bad);
        assert_eq!((posted, (*bad).wr_id), (libc::ENOMEM, 3));
    }
    assert_eq!(with(|device| device.rings), 5, "what was taken is not told");
    complete_sends();
    assert_eq!(application.poll(), [0, 1, 2]);
}

#[test]
fn a_process_that_was_made_ahead_goes_on_after_a_move_that_was_given_up() {
    let application = Application::start();
    move_with(&application, 2);
    with(|device| device.write_refused = true);
    assert_eq!([1, 2].map(|wr_id| application.send(wr_id)), [0, 0]);
    shim::suspend(None).unwrap();
    assert_eq!([3, 4].map(|wr_id| application.send(wr_id)), [0, 0]);
    assert!(application.wait(0).unwrap_err().contains("in flight"));
    // The device's queue is full of requests in flight.
    shim::resume(None).unwrap();
    complete_sends();
    assert_eq!(application.poll(), [1, 2]);
    complete_sends();
    assert_eq!(application.poll(), [3, 4]);
}

#[test]
fn what_was_not_taken_whole_is_made_again() {
    let application = Application::start();
    assert_eq!([1, 2].map(|wr_id| application.receive(wr_id)), [0, 0]);
    let plan = shim::plan();
    suspend_and_release(&application, 0);
    with(|device| device.receives_refused = 1);
    let refused = shim::attach(held(&plan, 2)).unwrap_err();
    assert!(refused.contains("a receive that was posted before"));
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    let waiting: Vec<u64> = with(|device| device.receives.values().flatten().copied().collect());
    assert_eq!(waiting, [1, 2]);
}
