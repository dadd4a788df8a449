//! A guest's driver of a ring, for tests. The driver offers buffers, and tells how many used buffers are processed.

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

pub(super) const MEMORY: u64 = 8 << 20;
/// Distance between the starts of two rings in bytes.
const AREA: u64 = 2 << 20;
const AVAILABLE: u64 = 0x1000;
pub(super) const USED: u64 = 0x2000;
pub(super) const BUFFERS: u64 = 0x10000;
/// Bytes of each buffer.
const BUFFER: u32 = 1000;
/// Place of a packet's number in the packet, behind the headers.
pub(super) const NUMBER_AT: usize = 12 + 14;
/// Descriptor flag of a buffer for the device to write (`VIRTQ_DESC_F_WRITE`).
const WRITABLE: u16 = 2;

/// A guest's ring with an event index.
pub(super) struct TestGuest {
    pub(super) ram: Arc<GuestRam>,
    /// File behind the guest's memory.
    pub(super) memory: Arc<File>,
    size: u16,
    /// Offset of the ring and its buffers.
    start: u64,
}

impl TestGuest {
    /// Creates a guest with a ring of this many descriptors, at most 256.
    pub(super) fn new(size: u16) -> Self {
        let memory = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a file");
        ftruncate(&memory, 2 * MEMORY).expect("grows");
        Self::within(Arc::new(memory.into()), size, 0)
    }

    /// Creates a guest with its memory in the same file, behind this guest's memory.
    pub(super) fn behind(&self) -> Self {
        Self::within(Arc::clone(&self.memory), self.size, MEMORY)
    }

    fn within(memory: Arc<File>, size: u16, offset: u64) -> Self {
        let region = VhostUserMemoryRegion::new(0, MEMORY, 0, offset);
        let files = vec![memory.try_clone().expect("another")];
        let ram = GuestRam::new(&[region], files, Arc::default()).expect("maps");
        Self {
            ram: Arc::new(ram),
            memory,
            size,
            start: 0,
        }
    }

    /// Adds another ring of the same size in the same memory, which has room for four rings.
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

    /// Returns the setup with which a front end starts the ring; `kick` carries the guest's notifications.
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

    /// Offers this many buffers in all, cycling through the descriptors.
    pub(super) fn offer(&self, count: u16) {
        (0..self.size).for_each(|number| self.describe(number, WRITABLE));
        self.put(AVAILABLE + 2, count);
    }

    /// Offers packets for sending, each with its number, from the `begin`th of all to before the `end`th.
    pub(super) fn send(&self, begin: u16, end: u16) {
        for count in 0..end.wrapping_sub(begin) {
            let number = begin.wrapping_add(count);
            let place = number % self.size;
            self.describe(place, 0);
            let buffer = BUFFERS + u64::from(place) * 0x1000;
            self.put(buffer + NUMBER_AT as u64, number);
        }
        self.put(AVAILABLE + 2, end);
    }

    /// Fills a descriptor and its place in the available ring.
    fn describe(&self, number: u16, flags: u16) {
        let memory = self.ram.memory();
        let descriptor = self.start + u64::from(number) * 16;
        let buffer = self.start + BUFFERS + u64::from(number) * 0x1000;
        memory
            .write_obj(buffer, GuestAddress(descriptor))
            .expect("memory");
        memory
            .write_obj(BUFFER, GuestAddress(descriptor + 8))
            .expect("memory");
        self.put(descriptor - self.start + 12, flags);
        self.put(AVAILABLE + 4 + u64::from(number) * 2, number);
    }

    /// Marks this many buffers in all as processed, and asks for a signal at the next.
    pub(super) fn came_to(&self, count: u16) {
        self.put(AVAILABLE + 4 + 2 * u64::from(self.size), count);
    }

    /// Returns the number of buffers that the device has returned in all.
    pub(super) fn used(&self) -> u16 {
        self.get(USED + 2)
    }

    /// Returns the number of offered buffers beyond which the device wants a notification.
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
