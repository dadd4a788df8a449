//! A guest that lays out any chain of descriptors, header and range in its memory: what is accepted
//! lies on the disk and in memory, and following it ends.

#![no_main]

use godwit_block::virtio_block::request::{Asked, parse};
use godwit_core::units::{Extent, Sectors};
use godwit_vhost::rings::chain::{Chain, MOST_SEGMENTS};
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

/// Bytes in each of the two regions of memory, between which there is a hole of as many.
const REGION: usize = 4096;

thread_local! {
    static MEMORY: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&[
        (GuestAddress(0), REGION),
        (GuestAddress(2 * REGION as u64), REGION),
    ])
    .expect("memory");
}

fuzz_target!(|data: &[u8]| {
    let Some((&[size, head, capacity], rest)) = data.split_first_chunk() else {
        return;
    };
    MEMORY.with(|memory| {
        // The table of descriptors is at the start of memory.
        let content = &rest[..rest.len().min(REGION)];
        memory
            .write_slice(&[0; REGION], GuestAddress(0))
            .expect("memory");
        memory
            .write_slice(content, GuestAddress(0))
            .expect("memory");
        check(memory, 1 << (size % 11), u16::from(head), capacity);
    });
});

fn check(memory: &GuestMemoryMmap, size: u16, head: u16, capacity: u8) {
    let capacity = Sectors(1 << (capacity % 50));
    let mut chain = Chain::default();
    let mut data = Vec::new();
    if chain.follow(memory, GuestAddress(0), size, head).is_err() {
        return;
    }
    assert!(chain.readable.len() + chain.writable.len() <= MOST_SEGMENTS + 1);
    let Ok(parsed) = parse(memory, &mut chain, capacity, &mut data) else {
        return;
    };
    let is_memory =
        |address, length| memory.check_range(GuestAddress(address), length, Permissions::ReadWrite);
    assert!(is_memory(parsed.status, 1));
    let fits = |extent: Extent| assert!(extent.within(capacity));
    match parsed.asked {
        Asked::Read(extent) | Asked::Write(extent) => {
            fits(extent);
            let bytes: u64 = data.iter().map(|segment| u64::from(segment.length)).sum();
            assert_eq!(bytes, extent.bytes());
            assert!(data.iter().all(|s| is_memory(s.address, s.length as usize)));
        }
        Asked::Zero { extent, .. } => fits(extent),
        Asked::Identify => {
            assert!(!data.is_empty());
            assert!(data.iter().all(|s| is_memory(s.address, s.length as usize)));
        }
        Asked::Flush => {}
        Asked::Refused(status) => assert!(status == 1 || status == 2),
    }
}
