//! Guest memory that changes slot by slot, or is shared again as it was.

use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use godwit_testkit::vhost_client::{
    BASE, Client, Options, Part, SharedMemory, Status, may_wait_for_pages,
};
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;

use super::{MOMENT, Served};
use crate::support::PATIENCE;

const PAGE: usize = 4096;
/// Guest-physical address of the further slot, and its length.
const FURTHER: u64 = 0x8000_0000;
const LENGTH: usize = 64 * PAGE;
const READ: u32 = 0;
const WRITE: u32 = 1;

fn options() -> Options {
    Options {
        slots: true,
        ..Options::default()
    }
}

fn slot(memory: &SharedMemory) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: FURTHER,
        memory_size: LENGTH as u64,
        userspace_addr: memory.at(0, 0) as u64,
        mmap_offset: 0,
        mmap_handle: memory.descriptor(),
    }
}

/// Starts a request with a page of the further slot.
fn submit(client: &mut Client, kind: u32, page: usize) -> u16 {
    let part = Part {
        address: FURTHER + (page * PAGE) as u64,
        length: PAGE as u32,
        writable: kind == READ,
    };
    let head = client.submit(0, kind, 8, &[part]);
    client.queues[0].notify();
    head
}

fn request(client: &mut Client, kind: u32, page: usize) -> Status {
    let head = submit(client, kind, page);
    client.wait_for(0, head)
}

#[test]
fn data_goes_through_a_slot_while_it_is_there() {
    let served = Served::new("slots");
    let mut client = served.connect(options());
    let most = client.frontend.get_max_mem_slots().expect("a number");
    assert!(most >= 8, "as many as a table has");
    let more = SharedMemory::new(LENGTH).expect("memory");
    for filling in 1..=3 {
        assert_eq!(request(&mut client, WRITE, 1), Status::ERROR, "no memory");
        more.write(PAGE as u64, &[filling; PAGE]);
        client.frontend.add_mem_region(&slot(&more)).expect("added");
        assert_eq!(request(&mut client, WRITE, 1), Status::OK);
        assert_eq!(request(&mut client, READ, 2), Status::OK);
        let mut page = [0; PAGE];
        more.read(2 * PAGE as u64, &mut page);
        assert_eq!(page, [filling; PAGE]);
        assert_eq!(client.read(0, 8, PAGE), Ok(vec![filling; PAGE]));
        let removed = client.frontend.remove_mem_region(&slot(&more));
        removed.expect("removed");
    }
}

#[test]
fn a_slot_that_makes_no_sense_ends_its_front_end_alone() {
    let served = Served::new("hostile-slots");
    let more = SharedMemory::new(LENGTH).expect("memory");
    let cases: [fn(VhostUserMemoryRegionInfo) -> VhostUserMemoryRegionInfo; 3] = [
        |slot| VhostUserMemoryRegionInfo {
            guest_phys_addr: BASE,
            ..slot
        },
        |slot| VhostUserMemoryRegionInfo {
            memory_size: LENGTH as u64 + 1,
            ..slot
        },
        |slot| VhostUserMemoryRegionInfo {
            mmap_offset: u64::MAX,
            ..slot
        },
    ];
    for case in cases {
        let mut client = served.connect(options());
        assert_eq!(client.write(0, 0, &[7; 512]), Status::OK);
        let slot = case(slot(&more));
        assert!(client.frontend.add_mem_region(&slot).is_err());
    }
    let mut client = served.connect(options());
    let removed = client.frontend.remove_mem_region(&slot(&more));
    assert!(removed.is_err(), "it is not there");
    let mut client = served.connect(options());
    assert_eq!(client.write(0, 0, &[7; 512]), Status::OK);
}

#[test]
fn requests_go_on_while_their_memory_is_shared_again() {
    let served = Served::new("shared-again");
    let mut client = served.connect(Options::default());
    let data = client.data();
    for round in 0..32 {
        let page = data + round % 8 * PAGE as u64;
        client.memory.write(page, &[round as u8; PAGE]);
        let head = client.submit_write(0, round * 8, page, PAGE as u32);
        client.queues[0].notify();
        client.share_memory().expect("to share");
        assert_eq!(client.wait_for(0, head), Status::OK);
    }
    let found = client.read(0, 31 * 8, PAGE);
    assert_eq!(found, Ok(vec![31; PAGE]));
}

#[test]
fn a_slot_that_is_added_while_memory_arrives_is_used_after_the_acknowledgement() {
    if !may_wait_for_pages() {
        println!("not tested: it takes CAP_SYS_PTRACE or vm.unprivileged_userfaultfd");
        return;
    }
    let served = Served::new("arriving-slots");
    let mut client = served.connect(Options {
        post_copy: true,
        ..options()
    });
    let faults = client.faults.as_ref().expect("faults").share();
    let faults = faults.expect("a descriptor");
    let data = client.data();
    let write = client.submit_write(0, 0, data, PAGE as u32);
    client.queues[0].notify();
    assert_eq!(faults.next(PATIENCE).expect("a fault"), Some(data));
    faults.deliver(data, 9).expect("to deliver");
    assert_eq!(client.wait_for(0, write), Status::OK);

    let more = SharedMemory::new(LENGTH).expect("memory");
    more.write(PAGE as u64, &[5; PAGE]);
    let added = client.frontend.add_mem_region(&slot(&more)).expect("added");
    assert!(added.is_some(), "the front end serves its pages");
    let write = submit(&mut client, WRITE, 1);
    assert_eq!(client.queues[0].wait(MOMENT), None, "not acknowledged");
    client.acknowledge_memory().expect("to acknowledge");
    assert_eq!(client.wait_for(0, write), Status::OK);

    // QEMU acknowledges memory that has not changed by a message without a request.
    // SAFETY: the front end keeps its socket open until it is dropped.
    let socket = unsafe { BorrowedFd::borrow_raw(client.frontend.as_raw_fd()) };
    let mut socket = UnixStream::from(socket.try_clone_to_owned().expect("a copy"));
    let message = [0_u32, 1, 8, 0, 0].map(u32::to_le_bytes).concat();
    socket.write_all(&message).expect("to acknowledge");
    let missing = data + PAGE as u64;
    let write = client.submit_write(0, 16, missing, PAGE as u32);
    client.queues[0].notify();
    let awaited = faults.next(PATIENCE).expect("a fault");
    assert_eq!(awaited, Some(missing), "it is waited for as before");
    faults.deliver(missing, 8).expect("to deliver");
    assert_eq!(client.wait_for(0, write), Status::OK);
    client.end_post_copy().expect("to end");
    let expected = [vec![9; PAGE], vec![5; PAGE], vec![8; PAGE]].concat();
    assert_eq!(client.read(0, 0, 3 * PAGE), Ok(expected));
}
