//! Malicious guests and front ends.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use godwit_block::engine::FrontEndState;
use godwit_testkit::vhost_client::{
    BASE, Client, INDIRECT, NEXT, Options, Status, WRITE, readable,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::{MOMENT, Served};
use crate::support::PATIENCE;

/// Checks that the queue is given up, and that the disk goes on for others.
fn breaks(served: &Served, what: &str, put: impl FnOnce(&mut Client)) {
    let mut client = served.connect(Options {
        queues: 2,
        ..Options::default()
    });
    put(&mut client);
    client.queues[0].kick.write(1).expect("a kick");
    assert!(readable(&client.queues[0].error, PATIENCE), "{what}");
    served
        .engine
        .wait_until(|snapshot| snapshot.front_end == FrontEndState::Broken);
    assert_eq!(client.write(1, 0, &[7; 512]), Status::OK, "the other queue");
    assert_eq!(client.queues[0].used(), 0, "{what}");
    client.stop_queue(0).expect("a broken queue stops");
    assert_eq!(
        served.engine.handle.snapshot().front_end,
        FrontEndState::Attached
    );
}

/// Returns a front end whose first queue's call counter takes no signal, with a signal due.
fn deaf(served: &Served) -> (Client, EventFd) {
    let mut client = served.connect(Options {
        queues: 2,
        ..Options::default()
    });
    let call = client.queues[0].call.try_clone().expect("a descriptor");
    call.read().ok();
    call.write(u64::MAX - 1).expect("fills the counter");
    let data = client.data();
    client.submit_read(0, 0, data, 512);
    client.queues[0].notify();
    while client.queues[0].used() == 0 {
        std::thread::yield_now();
    }
    (client, call)
}

/// Longest wait of a disk's next front end after one that left without a word.
const SOON: Duration = Duration::from_secs(10);

/// Checks that the next front end is served soon, and can stop its queue.
fn goes_on(served: &Served) {
    let begun = std::time::Instant::now();
    let mut next = served.connect(Options::default());
    assert_eq!(next.write(0, 0, &[7; 512]), Status::OK);
    assert_eq!(next.stop_queue(0).expect("to stop"), 1);
    assert!(begun.elapsed() < SOON, "took {:?}", begun.elapsed());
}

#[test]
fn a_guest_that_takes_no_signal_holds_up_nobody_else() {
    let served = Served::new("deaf");
    let (mut client, _call) = deaf(&served);
    assert_eq!(client.write(1, 0, &[7; 512]), Status::OK, "the other queue");
    assert_eq!(client.stop_queue(1).expect("to stop"), 1);
    drop(client);
    goes_on(&served);
}

#[test]
fn a_front_end_that_leaves_while_its_queue_stops_is_not_waited_for() {
    let served = Served::new("impatient");
    let (client, _call) = deaf(&served);
    // GET_VRING_BASE of the first queue, without a wait for the answer.
    let message = [11_u32, 1, 8, 0, 0].map(u32::to_le_bytes).concat();
    // SAFETY: the front end keeps its socket open until it is dropped.
    let socket = unsafe { BorrowedFd::borrow_raw(client.frontend.as_raw_fd()) };
    let mut stream =
        std::os::unix::net::UnixStream::from(socket.try_clone_to_owned().expect("a copy"));
    std::io::Write::write_all(&mut stream, &message).expect("to ask");
    std::thread::sleep(MOMENT);
    drop((client, stream));
    goes_on(&served);
}

#[test]
fn a_queue_that_breaks_while_it_stops_stops() {
    let served = Served::new("broken-while-stopping");
    let client = Client::connect(
        &served.path,
        Options {
            inflight: true,
            ..Options::default()
        },
    )
    .expect("a front end");
    // A request in flight whose descriptor makes no sense, on a queue that is never enabled.
    let inflight = client.inflight_memory().expect("the memory");
    inflight.store(8, 1); // version
    inflight.store(10, 128); // descriptors
    inflight.write(16, &[1]);
    let (queue, frontend) = (&client.queues[0], &client.frontend);
    let user = client.memory.at(0, 0) as u64;
    let [descriptors, available, used] = queue.places();
    let config = VringConfigData {
        queue_max_size: 128,
        queue_size: 128,
        flags: 0,
        desc_table_addr: user + descriptors,
        avail_ring_addr: user + available,
        used_ring_addr: user + used,
        log_addr: None,
    };
    frontend.set_vring_num(0, 128).expect("a size");
    frontend.set_vring_addr(0, &config).expect("a place");
    frontend.set_vring_base(0, 0).expect("a base");
    frontend.set_vring_kick(0, &queue.kick).expect("to start");
    let begun = std::time::Instant::now();
    frontend.get_vring_base(0).expect("to stop");
    assert!(begun.elapsed() < SOON, "took {:?}", begun.elapsed());
}

#[test]
fn a_queue_that_makes_no_sense_is_given_up() {
    let served = Served::new("broken");
    let header = |client: &Client| BASE + client.queues[0].header(0);
    breaks(&served, "loop", |client| {
        client.queues[0].put(0, header(client), 16, NEXT, 0);
        client.queues[0].offer(0);
    });
    breaks(&served, "a descriptor that does not exist", |client| {
        client.queues[0].put(0, header(client), 16, NEXT, 128);
        client.queues[0].offer(0);
    });
    breaks(&served, "a head that does not exist", |client| {
        client.queues[0].offer(40_000);
    });
    breaks(&served, "more requests than descriptors", |client| {
        client.queues[0].claim(129);
    });
    breaks(&served, "no status", |client| {
        client.queues[0].put(0, header(client), 16, 0, 0);
        client.queues[0].offer(0);
    });
    breaks(&served, "a status outside of memory", |client| {
        client.queues[0].put(0, header(client), 16, NEXT, 1);
        client.queues[0].put(1, 0x1000, 1, WRITE, 0);
        client.queues[0].offer(0);
    });
    breaks(&served, "a table outside of memory", |client| {
        client.queues[0].put(0, u64::MAX - 15, 32, INDIRECT, 0);
        client.queues[0].offer(0);
    });
    breaks(&served, "a table in a table", |client| {
        let table = client.queues[0].places()[0] + 16;
        client.queues[0].put(0, BASE + table, 16, INDIRECT, 0);
        client.queues[0].put(1, BASE + table, 16, INDIRECT, 0);
        client.queues[0].offer(0);
    });
}

#[test]
fn a_request_that_cannot_be_done_fails_alone() {
    let served = Served::new("refused");
    let mut client = served.connect(Options::default());
    let data = client.data();
    let end = client.memory.length() as u64;
    let sectors = super::SIZE / 512;
    let cases = [
        ("past the end", 0, sectors, data, 512, true, Status::ERROR),
        (
            "far past the end",
            0,
            u64::MAX,
            data,
            512,
            true,
            Status::ERROR,
        ),
        ("not whole sectors", 1, 0, data, 513, false, Status::ERROR),
        ("outside of memory", 0, 0, end, 512, true, Status::ERROR),
        ("half outside", 1, 0, end - 256, 512, false, Status::ERROR),
        (
            "an absurd length",
            1,
            0,
            data,
            u32::MAX,
            false,
            Status::ERROR,
        ),
        ("wrong direction", 0, 0, data, 512, false, Status::ERROR),
        ("empty", 0, 0, data, 0, true, Status::ERROR),
        ("unknown", 77, 0, data, 512, true, Status::UNSUPPORTED),
    ];
    for (what, kind, sector, offset, length, writable, expected) in cases {
        let part = client.part(offset, length, writable);
        let head = client.submit(0, kind, sector, &[part]);
        client.queues[0].notify();
        assert_eq!(client.wait_for(0, head), expected, "{what}");
    }
    assert_eq!(client.write(0, 0, &[7; 512]), Status::OK);
}

#[test]
fn the_same_descriptor_twice_at_once_breaks_the_queue() {
    let served = Served::new("twice");
    breaks(&served, "twice", |client| {
        let data = client.data();
        let head = client.submit_write(0, 0, data, 1 << 20);
        client.queues[0].offer(head);
    });
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let served = Served::new("memory");
    let client = Client::connect(&served.path, Options::default()).expect("a front end");
    let short = tempfile::tempfile().expect("a file");
    short.set_len(4096).expect("a size");
    let region = VhostUserMemoryRegionInfo {
        memory_size: 8192,
        mmap_handle: short.as_raw_fd(),
        ..client.region()
    };
    assert!(client.frontend.set_mem_table(&[region]).is_err());
    drop(client);
    // The next front end is served.
    let mut client = served.connect(Options::default());
    assert_eq!(client.write(0, 0, &[7; 512]), Status::OK);
}

/// A request of a front end after its memory shrank to so many bytes, at a sector where the disk has sevens.
type Asks = fn(&mut Client, u64) -> u16;

#[test]
fn memory_that_shrinks_ends_its_front_end_alone() {
    const SECTOR: u64 = 8;
    let [served, other] = ["shrinks", "beside"].map(Served::new);
    let mut beside = other.connect(Options::default());
    let read: Asks = |client, data| client.submit_read(0, SECTOR, data, 4096);
    let write: Asks = |client, data| client.submit_write(0, SECTOR, data, 4096);
    // Without the data alone, the kernel finds out first; without the queues, the engine does.
    for (with_queues, asks) in [(true, read), (true, write), (false, read)] {
        let mut client = served.connect(Options {
            shrinks: true,
            ..Options::default()
        });
        assert_eq!(client.write(0, SECTOR, &[7; 4096]), Status::OK);
        let data = client.data();
        asks(&mut client, data);
        let left = if with_queues { data } else { 0 };
        client.memory.file().set_len(left).expect("shrinks");
        client.queues[0].kick.write(1).expect("a kick");
        served
            .engine
            .wait_until(|snapshot| snapshot.lost_pages && snapshot.clients == 0);
        assert_eq!(beside.write(0, 0, &[9; 512]), Status::OK);
        drop(client);
        let mut next = served.connect(Options::default());
        assert_eq!(next.read(0, SECTOR, 4096), Ok(vec![7; 4096]));
        served.engine.wait_until(|snapshot| !snapshot.lost_pages);
    }
}

#[test]
fn kicks_must_be_eventfds() {
    let served = Served::new("kicks");
    let client = Client::connect(&served.path, Options::default()).expect("a front end");
    let file = tempfile::tempfile().expect("a file");
    let fd = std::os::fd::IntoRawFd::into_raw_fd(file);
    // SAFETY: the descriptor was just given up by its file.
    let fake =
        unsafe { <vmm_sys_util::eventfd::EventFd as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    assert!(client.frontend.set_vring_call(0, &fake).is_err());
    drop(client);
    let mut client = served.connect(Options::default());
    assert_eq!(client.write(0, 0, &[7; 512]), Status::OK);
}

#[test]
fn a_second_front_end_waits_until_the_first_has_left() {
    let served = Served::new("second");
    let mut first = served.connect(Options::default());
    let path = served.path.clone();
    let (sender, connected) = std::sync::mpsc::channel();
    let second = std::thread::spawn(move || {
        let mut second = Client::connect(&path, Options::default()).expect("a front end");
        sender.send(()).expect("sent");
        second.start().expect("queues");
        second.read(0, 0, 512)
    });
    assert!(connected.recv_timeout(MOMENT).is_err());
    assert_eq!(first.write(0, 0, &[9; 512]), Status::OK);
    drop(first);
    assert_eq!(second.join().expect("no panic"), Ok(vec![9; 512]));
}
