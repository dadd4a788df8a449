//! A guest's driver of a ring, for tests: it offers buffers, and says which of those that it got back it has
//! come to.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use godwit_vhost::memory::GuestRam;
use godwit_vhost::protocol::session::RingSetup;
use godwit_vhost::rings::split::RingLayout;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{Bytes, GuestAddress};

use crate::device::wake::Wake;

const MEMORY: u64 = 8 << 20;
/// Between the beginnings of two rings.
const AREA: u64 = 2 << 20;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const BUFFERS: u64 = 0x10000;
/// Bytes of each buffer that the guest offers.
const BUFFER: u32 = 1000;
/// The descriptor's buffer is the device's to write (`VIRTQ_DESC_F_WRITE`).
const WRITABLE: u16 = 2;

/// A ring of a guest's, which has an event index.
pub(super) struct TestGuest {
    pub(super) ram: Arc<GuestRam>,
    /// What it is in.
    pub(super) memory: Arc<File>,
    size: u16,
    /// Where its ring and buffers begin.
    start: u64,
}

impl TestGuest {
    /// With a ring of this many descriptors, at most 256.
    pub(super) fn new(size: u16) -> Self {
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&memory, MEMORY).expect("grows");
        let region = VhostUserMemoryRegion::new(0, MEMORY, 0, 0);
        let memory = File::from(memory);
        let files = vec![memory.try_clone().expect("another")];
        let ram = GuestRam::new(&[region], files, Arc::default()).expect("maps");
        Self {
            ram: Arc::new(ram),
            memory: Arc::new(memory),
            size,
            start: 0,
        }
    }

    /// Another ring of the same size in the same memory; there is room for four in all.
    pub(super) fn beside(&self) -> Self {
        Self {
            ram: Arc::clone(&self.ram),
            memory: Arc::clone(&self.memory),
            size: self.size,
            start: self.start + AREA,
        }
    }

    pub(super) const fn layout(&self) -> RingLayout {
        RingLayout {
            size: self.size,
            descriptors: GuestAddress(self.start),
            available: GuestAddress(self.start + AVAILABLE),
            used: GuestAddress(self.start + USED),
        }
    }

    /// What a front end starts the ring with, of which the guest tells with `kick`.
    pub(super) fn setup(&self, base: u16, kick: &Wake) -> Box<RingSetup> {
        Box::new(RingSetup {
            layout: self.layout(),
            base,
            event_index: true,
            enabled: true,
            log: None,
            inflight: None,
            kick: kick.as_fd().try_clone_to_owned().expect("another"),
            call: None,
            error: None,
        })
    }

    /// The guest has offered so many buffers in all: each descriptor is one, over and over.
    pub(super) fn offer(&self, count: u16) {
        let memory = self.ram.memory();
        for number in 0..self.size {
            let descriptor = self.start + u64::from(number) * 16;
            let buffer = self.start + BUFFERS + u64::from(number) * 0x1000;
            memory
                .write_obj(buffer, GuestAddress(descriptor))
                .expect("memory");
            memory
                .write_obj(BUFFER, GuestAddress(descriptor + 8))
                .expect("memory");
            self.put(descriptor - self.start + 12, WRITABLE);
            self.put(AVAILABLE + 4 + u64::from(number) * 2, number);
        }
        self.put(AVAILABLE + 2, count);
    }

    /// The guest has come to so many buffers in all, and wants to be told of the next.
    pub(super) fn came_to(&self, count: u16) {
        self.put(AVAILABLE + 4 + 2 * u64::from(self.size), count);
    }

    /// Buffers that the guest got back in all.
    pub(super) fn used(&self) -> u16 {
        self.get(USED + 2)
    }

    /// The guest tells of what it offers beyond this many buffers.
    pub(super) fn told_after(&self) -> u16 {
        self.get(USED + 4 + 8 * u64::from(self.size))
    }

    fn put(&self, at: u64, number: u16) {
        let memory = self.ram.memory();
        memory
            .write_obj(number, GuestAddress(self.start + at))
            .expect("memory");
    }

    fn get(&self, at: u64) -> u16 {
        let memory = self.ram.memory();
        memory
            .read_obj(GuestAddress(self.start + at))
            .expect("memory")
    }
}
