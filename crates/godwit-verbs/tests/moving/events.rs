//! Events of completions, for programs that wait with poll(2).

use std::ffi::c_int;
use std::ptr;

use godwit_verbs::abi::*;
use godwit_verbs::shim;

use crate::device::complete_sends;
use crate::{Application, suspend_and_release};

fn readable(channel: *mut ibv_comp_channel) -> bool {
    // SAFETY: the channel lives.
    let fd: c_int = unsafe { (*channel).fd };
    let mut asked = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor, which lives through the call.
    unsafe { libc::poll(&raw mut asked, 1, 0) == 1 }
}

/// Returns the queue of the next event, if any.
fn event(channel: *mut ibv_comp_channel) -> Option<*mut ibv_cq> {
    let (mut queue, mut cookie) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the channel lives, and does not block.
    let got = unsafe { shim::get_cq_event(channel, &raw mut queue, &raw mut cookie) };
    (got == 0).then_some(queue)
}

/// Replaces the application's queue by one with a channel.
fn with_channel(application: &mut Application) -> *mut ibv_comp_channel {
    // SAFETY: as verbs demand; the first queue and its pair are used by nobody.
    let channel = unsafe {
        assert_eq!(shim::destroy_qp(application.pair), 0);
        assert_eq!(shim::destroy_cq(application.cq), 0);
        let channel = shim::create_comp_channel(application.context);
        let flags = libc::fcntl((*channel).fd, libc::F_GETFL);
        libc::fcntl((*channel).fd, libc::F_SETFL, flags | libc::O_NONBLOCK);
        application.cq = shim::create_cq(application.context, 16, ptr::null_mut(), channel, 0);
        channel
    };
    application.pair = application.create_pair(ptr::null_mut());
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        assert_eq!(application.change(state), 0);
    }
    channel
}

/// Replaces the application's queue by one without a channel.
fn without_channel(application: &mut Application, channel: *mut ibv_comp_channel) {
    // SAFETY: as verbs demand; nothing is used after it.
    unsafe {
        assert_eq!(shim::destroy_qp(application.pair), 0);
        assert_eq!(shim::destroy_cq(application.cq), 0);
        assert_eq!(shim::destroy_comp_channel(channel), 0);
        application.cq =
            shim::create_cq(application.context, 16, ptr::null_mut(), ptr::null_mut(), 0);
    }
    application.pair = application.create_pair(ptr::null_mut());
}

#[test]
fn whoever_waits_with_epoll_is_told_of_what_completed_while_the_process_moved() {
    let mut application = Application::start();
    let channel = with_channel(&mut application);
    for triggered in [libc::EPOLLIN, libc::EPOLLIN | libc::EPOLLET] {
        // SAFETY: the queue, the channel and the events live.
        let (instance, events) = unsafe {
            let instance = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            let mut event = libc::epoll_event {
                events: triggered as u32,
                u64: 0,
            };
            let number = (*channel).fd;
            let added = libc::epoll_ctl(instance, libc::EPOLL_CTL_ADD, number, &raw mut event);
            assert_eq!(added, 0);
            let events = move || {
                let mut into = libc::epoll_event { events: 0, u64: 0 };
                libc::epoll_wait(instance, &raw mut into, 1, 0)
            };
            assert_eq!(shim::req_notify_cq(application.cq, 0), 0);
            (instance, events)
        };
        assert_eq!(application.send(5), 0);
        assert_eq!(events(), 0);
        suspend_and_release(&application, 0);
        assert_eq!(events(), 1);
        shim::recreate(None).unwrap();
        shim::connect(&[application.connection()]).unwrap();
        shim::resume(None).unwrap();
        let level = triggered == libc::EPOLLIN;
        assert_eq!(events(), c_int::from(level));
        assert_eq!(event(channel), Some(application.cq));
        assert_eq!((events(), application.poll()), (0, vec![5]));
        // SAFETY: nothing else uses it.
        unsafe { libc::close(instance) };
    }
    without_channel(&mut application, channel);
}

#[test]
fn whoever_waits_with_poll_is_told_of_what_completed_while_the_process_moved() {
    let mut application = Application::start();
    let channel = with_channel(&mut application);
    let arm = || {
        // SAFETY: the queue lives.
        assert_eq!(unsafe { shim::req_notify_cq(application.cq, 0) }, 0);
    };
    arm();
    assert_eq!(application.send(5), 0);
    assert!(!readable(channel) && event(channel).is_none());
    suspend_and_release(&application, 0);
    assert!(
        readable(channel),
        "nobody is told while the process has no device"
    );
    shim::recreate(None).unwrap();
    assert!(readable(channel), "the new device's channel took its place");
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    assert!(readable(channel));
    assert_eq!(event(channel), Some(application.cq));
    assert_eq!(application.poll(), [5]);
    // Then events come from the device again.
    assert!(!readable(channel) && event(channel).is_none());
    arm();
    assert_eq!(application.send(6), 0);
    complete_sends();
    assert!(!readable(channel));
    assert_eq!(application.poll(), [6]);
    // An event that is taken while the process has no device is not announced again.
    arm();
    assert_eq!(application.send(7), 0);
    suspend_and_release(&application, 0);
    assert_eq!(event(channel), Some(application.cq));
    assert!(!readable(channel));
    shim::recreate(None).unwrap();
    shim::connect(&[application.connection()]).unwrap();
    shim::resume(None).unwrap();
    assert!(!readable(channel));
    assert_eq!(application.poll(), [7]);
    without_channel(&mut application, channel);
}
