//! Guest memory that arrives while the disk is used.

use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use godwit_testkit::vhost_client::{
    Client, Faults, Options, Status, may_wait_for_pages, wait_for_pages,
};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

use super::{MOMENT, Served};
use crate::support::PATIENCE;

const PAGE: usize = 4096;

fn options() -> Options {
    Options {
        post_copy: true,
        ..Options::default()
    }
}

/// Returns a disk with two blocks of 7s, and a front end whose data pages are missing. `None` if processes may not wait
/// for pages.
fn arriving(name: &str) -> Option<(Served, Client, Faults)> {
    if !may_wait_for_pages() {
        println!("not tested: it takes CAP_SYS_PTRACE or vm.unprivileged_userfaultfd");
        return None;
    }
    let served = Served::new(name);
    let mut before = served.connect(Options::default());
    assert_eq!(before.write(0, 0, &[7; 2 * PAGE]), Status::OK);
    drop(before);
    let client = served.connect(options());
    let faults = client.faults.as_ref().expect("faults").share();
    Some((served, client, faults.expect("a descriptor")))
}

/// Returns the blocks that a new front end reads.
fn found(served: &Served) -> Vec<u8> {
    let mut client = served.connect(Options::default());
    client.read(0, 0, 2 * PAGE).expect("a read")
}

/// Returns the front end's socket, for a close while it is in use.
fn socket(client: &Client) -> UnixStream {
    let fd = std::os::fd::AsRawFd::as_raw_fd(&client.frontend);
    // SAFETY: the front end keeps its socket open during this.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed.try_clone_to_owned().expect("a descriptor").into()
}

#[test]
fn requests_wait_for_the_pages_that_they_need() {
    let Some((_served, mut client, faults)) = arriving("arriving") else {
        return;
    };
    let data = client.data();
    let write = client.submit_write(0, 0, data, PAGE as u32);
    client.queues[0].notify();
    assert_eq!(faults.next(PATIENCE).expect("a fault"), Some(data));
    assert_eq!(client.queues[0].wait(MOMENT), None, "its data is not there");
    faults.deliver(data, 9).expect("to deliver");
    assert_eq!(client.wait_for(0, write), Status::OK);

    // A read into part of a page leaves the rest as it arrives.
    let into = data + PAGE as u64;
    let read = client.submit_read(0, 0, into + 512, 512);
    client.queues[0].notify();
    assert_eq!(faults.next(PATIENCE).expect("a fault"), Some(into));
    assert_eq!(client.queues[0].wait(MOMENT), None, "it has no place yet");
    faults.deliver(into, 5).expect("to deliver");
    assert_eq!(client.wait_for(0, read), Status::OK);
    let mut page = [0; PAGE];
    client.memory.read(into, &mut page);
    assert_eq!(page[..512], [5; 512]);
    assert_eq!(page[512..1024], [9; 512]);
    assert_eq!(page[1024..], [5; PAGE - 1024]);

    // Once everything is reported to be there, accesses no longer wait.
    client.end_post_copy().expect("to end");
    drop(faults);
    let late = client.submit_write(0, 8, data + 2 * PAGE as u64, PAGE as u32);
    client.queues[0].notify();
    assert_eq!(client.wait_for(0, late), Status::OK);
    let expected = [vec![9; PAGE], vec![0; PAGE]].concat();
    assert_eq!(client.read(0, 0, 2 * PAGE), Ok(expected));
}

#[test]
fn a_front_end_that_is_gone_lets_the_engine_go_and_writes_nothing() {
    let Some((served, mut client, faults)) = arriving("abandoned") else {
        return;
    };
    let data = client.data();
    // The first page is there, and the second never will be.
    faults.deliver(data, 9).expect("to deliver");
    client.submit_write(0, 0, data, 2 * PAGE as u32);
    client.queues[0].notify();
    let missing = data + PAGE as u64;
    assert_eq!(faults.next(PATIENCE).expect("a fault"), Some(missing));
    drop(client);
    // The descriptor is still open here, as in a QEMU hanging at its exit.
    assert!(found(&served) == [7; 2 * PAGE], "nothing that nobody wrote");
    drop(faults);
}

#[test]
fn a_front_end_may_leave_while_it_waits_for_the_engine() {
    let Some((served, mut client, faults)) = arriving("hung-up") else {
        return;
    };
    let socket = socket(&client);
    client.submit_write(0, 0, client.data(), PAGE as u32);
    client.queues[0].notify();
    assert!(faults.next(PATIENCE).expect("a fault").is_some());
    let stops = std::thread::spawn(move || client.stop_queue(0).is_err());
    std::thread::sleep(MOMENT);
    assert!(!stops.is_finished(), "the queue's request is not done");
    let begin = Instant::now();
    socket.shutdown(Shutdown::Both).expect("to hang up");
    assert!(stops.join().expect("no panic"), "the queue did not stop");
    assert!(found(&served) == [7; 2 * PAGE]);
    assert!(begin.elapsed() < PATIENCE / 10, "{:?}", begin.elapsed());
}

#[test]
fn an_engine_ends_although_its_guest_waits_for_a_page() {
    let Some((mut served, mut client, faults)) = arriving("ending") else {
        return;
    };
    client.submit_write(0, 0, client.data(), PAGE as u32);
    client.queues[0].notify();
    assert!(faults.next(PATIENCE).expect("a fault").is_some());
    served.server = None;
    let image = served.engine.finish();
    assert!(image[..2 * PAGE] == [7; 2 * PAGE]);
}

#[test]
fn a_queue_whose_own_pages_are_missing_starts_when_they_arrive() {
    let Some((_served, mut client, faults)) = arriving("queue") else {
        return;
    };
    client.stop_queue(0).expect("to stop");
    let read = client.submit_read(0, 0, client.data(), 512);
    let data = client.data();
    client.memory.write(data, &[1; 512]);
    // The page with the answers' index goes missing here as QEMU discards pages: all mappings lose it.
    let used = client.queues[0].places()[2];
    let page = used / PAGE as u64 * PAGE as u64;
    let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(client.memory.file(), mode, page, PAGE as u64).expect("a hole");
    let starts = std::thread::spawn(move || {
        client.start_queue(0, 0).expect("to start");
        client
    });
    assert_eq!(faults.next(PATIENCE).expect("a fault"), Some(page));
    std::thread::sleep(MOMENT);
    assert!(!starts.is_finished(), "it is not known what was answered");
    faults.deliver(page, 0).expect("to deliver");
    let mut client = starts.join().expect("no panic");
    assert_eq!(client.wait_for(0, read), Status::OK);
}

#[test]
fn memory_changes_when_nothing_waits_in_it() {
    let Some((_served, mut client, faults)) = arriving("changes") else {
        return;
    };
    let data = client.data();
    let write = client.submit_write(0, 0, data, PAGE as u32);
    client.queues[0].notify();
    assert_eq!(faults.next(PATIENCE).expect("a fault"), Some(data));
    let changes = std::thread::spawn(move || {
        client.share_memory().expect("to share");
        client
    });
    std::thread::sleep(MOMENT);
    assert!(!changes.is_finished(), "a page is waited for where it was");
    faults.deliver(data, 9).expect("to deliver");
    let mut client = changes.join().expect("no panic");
    assert_eq!(client.wait_for(0, write), Status::OK);
    // Nothing is taken before the front end can serve the new place.
    let place = data + PAGE as u64;
    let next = client.submit_write(0, 8, place, PAGE as u32);
    client.queues[0].notify();
    let faults = client.faults.as_ref().expect("faults").share();
    let faults = faults.expect("a descriptor");
    assert_eq!(faults.next(MOMENT).expect("nothing"), None);
    client.acknowledge_memory().expect("to acknowledge");
    assert_eq!(faults.next(PATIENCE).expect("a fault"), Some(place));
    faults.deliver(place, 8).expect("to deliver");
    assert_eq!(client.wait_for(0, next), Status::OK);
    let expected = [vec![9; PAGE], vec![8; PAGE]].concat();
    assert_eq!(client.read(0, 0, 2 * PAGE).expect("a read"), expected);
}

#[test]
fn a_front_end_that_fails_at_the_end_leaves_no_trace_either() {
    let Some((served, mut client, faults)) = arriving("failed") else {
        return;
    };
    client.submit_write(0, 0, client.data(), PAGE as u32);
    client.queues[0].notify();
    assert!(faults.next(PATIENCE).expect("a fault").is_some());
    // QEMU reports this before it exits because the source is gone.
    client.end_post_copy().expect("to end");
    std::thread::sleep(Duration::from_millis(100));
    drop(client);
    assert!(found(&served) == [7; 2 * PAGE]);
}

#[test]
fn memory_that_is_in_use_does_not_arrive() {
    if !may_wait_for_pages() {
        return;
    }
    let served = Served::new("late");
    let mut client = served.connect(Options {
        post_copy: true,
        ..Options::default()
    });
    assert!(client.frontend.postcopy_advise().is_err(), "twice");
    let mut client = served.connect(Options::default());
    let offered = client.frontend.get_protocol_features().expect("features");
    assert!(offered.contains(VhostUserProtocolFeatures::PAGEFAULT));
    client
        .frontend
        .set_protocol_features(offered)
        .expect("to agree");
    client.frontend.postcopy_advise().expect("a descriptor");
    assert!(client.frontend.postcopy_listen().is_err(), "it is mapped");
}

#[test]
fn memory_that_still_arrives_is_not_taken_from_a_new_connection() {
    if !may_wait_for_pages() {
        return;
    }
    let served = Served::new("again");
    let mut client = served.connect(Options::default());
    let waits = wait_for_pages(&client.memory).expect("to wait");
    let again = client.reconnect(&served.path);
    assert!(again.is_err(), "it would be zeroes");
    drop(waits);
    client.reconnect(&served.path).expect("all is there");
    assert_eq!(client.flush(0), Status::OK);
}
