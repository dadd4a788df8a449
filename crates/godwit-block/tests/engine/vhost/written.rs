//! The node's own log of the pages that a disk writes.

use std::os::fd::AsRawFd;
use std::sync::{Arc, mpsc};

use godwit_testkit::vhost_client::{BASE, Client, Options, SharedMemory, Status};
use godwit_vhost::memory::relocated::FileId;
use godwit_vhost::memory::written::WrittenPages;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

use super::Served;
use crate::support::PATIENCE;

const PAGE: u64 = 4096;
const NONE: [u64; 0] = [];

fn log_writes(served: &Served, pages: Option<&Arc<WrittenPages>>) {
    let (sender, answer) = mpsc::channel();
    let reply = Box::new(move |()| {
        let _ = sender.send(());
    });
    served.engine.handle.log_writes(pages.cloned(), reply);
    answer.recv_timeout(PATIENCE).expect("the engine answers");
}

fn log_of(client: &Client) -> Arc<WrittenPages> {
    let file = FileId::of(client.memory.file()).expect("a file");
    Arc::new(WrittenPages::new(file, client.memory.length() as u64))
}

/// Takes the pages of a log, as offsets in the memory.
fn taken(log: &WrittenPages) -> Vec<u64> {
    let pages = log.take();
    let runs = pages.runs().iter();
    let pages = runs.flat_map(|run| run.first..run.first + run.pages);
    pages.map(|page| page * PAGE).collect()
}

const fn page(offset: u64) -> u64 {
    offset & !(PAGE - 1)
}

fn sorted(mut pages: Vec<u64>) -> Vec<u64> {
    pages.sort_unstable();
    pages
}

/// Reads four pages into the middle of pages, so that five are written, and lets the disk come to rest. Returns the
/// pages that the disk has written.
fn read(client: &mut Client, base: u16) -> Vec<u64> {
    read_at(client, base, 512)
}

fn read_at(client: &mut Client, base: u16, offset: u64) -> Vec<u64> {
    let data = client.data();
    client.start_queue(0, base).expect("to start");
    let head = client.submit_read(0, 0, data + offset, 4 * PAGE as u32);
    client.queues[0].notify();
    assert_eq!(client.wait_for(0, head), Status::OK);
    client.stop_queue(0).expect("to stop");
    let used = page(client.queues[0].places()[2]);
    let mut written = vec![used, page(client.queues[0].status(head))];
    written.extend((0..5).map(|index| data + index * PAGE));
    sorted(written)
}

#[test]
fn exactly_the_pages_that_a_disk_writes_are_reported_once() {
    let served = Served::new("written");
    for event_index in [true, false] {
        let options = Options {
            event_index,
            ..Options::default()
        };
        let mut client = served.connect(options);
        client.stop_queue(0).expect("to stop");
        let log = log_of(&client);
        log_writes(&served, Some(&log));
        assert_eq!(taken(&log), NONE, "nothing has happened since");
        // At the second address, the disk cannot read straight into the guest's memory.
        for (base, offset) in [(0, 512), (1, 100)] {
            let written = read_at(&mut client, base, offset);
            assert_eq!(taken(&log), written, "{event_index}, {offset}");
            assert_eq!(taken(&log), NONE, "each is reported once");
        }
        // A write changes nothing of the guest's data.
        client.start_queue(0, 2).expect("to start");
        let head = client.submit_write(0, 0, client.data(), PAGE as u32);
        client.queues[0].notify();
        assert_eq!(client.wait_for(0, head), Status::OK);
        client.identify(0).expect("a number");
        client.stop_queue(0).expect("to stop");
        let used = page(client.queues[0].places()[2]);
        let expected = vec![used, page(client.queues[0].status(head)), client.data()];
        assert_eq!(taken(&log), sorted(expected), "{event_index}");
        log_writes(&served, None);
        read(&mut client, 4);
        assert_eq!((taken(&log), log.unlogged()), (vec![], 0), "it is off");
    }
}

#[test]
fn the_node_and_the_front_end_log_side_by_side() {
    let served = Served::new("both");
    let mut client = served.connect(Options::default());
    client.stop_queue(0).expect("to stop");
    let log = log_of(&client);
    log_writes(&served, Some(&log));
    client.start_log().expect("a log");
    let written = read(&mut client, 0);
    assert_eq!(client.take_log(), written);
    assert_eq!(taken(&log), written);
    client.stop_log().expect("to stop logging");
    assert_eq!(
        taken(&log),
        NONE,
        "what the front end does is its own affair"
    );
    assert_eq!(read(&mut client, 1), taken(&log));
}

#[test]
fn a_log_outlives_front_ends_and_follows_changes_of_their_memory() {
    let mut served = Served::new("outlives");
    let mut client = served.connect(Options::default());
    client.stop_queue(0).expect("to stop");
    let log = log_of(&client);
    log_writes(&served, Some(&log));
    served.serve();
    client.reconnect(&served.path).expect("it comes back");
    client.stop_queue(0).expect("to stop");
    assert_eq!(taken(&log), [page(client.queues[0].places()[2])]);
    let written = read(&mut client, 0);
    assert_eq!(taken(&log), written);
    // Memory is added, which lies in another file.
    let added = SharedMemory::new(PAGE as usize).expect("memory");
    let more = VhostUserMemoryRegionInfo {
        guest_phys_addr: BASE + (1 << 30),
        memory_size: PAGE,
        userspace_addr: added.at(0, 0) as u64,
        mmap_offset: 0,
        mmap_handle: added.file().as_raw_fd(),
    };
    let table = [more, client.region()];
    client.frontend.set_mem_table(&table).expect("is shared");
    assert_eq!(read(&mut client, 1), taken(&log));
    assert_eq!(log.unlogged(), 0);
    client.start_queue(0, 2).expect("to start");
    let part = client.part(1 << 30, PAGE as u32, true);
    let head = client.submit(0, 0, 0, &[part]);
    client.queues[0].notify();
    assert_eq!(client.wait_for(0, head), Status::OK);
    assert_eq!(log.unlogged(), 1, "the checkpoints would lack a page");
}
