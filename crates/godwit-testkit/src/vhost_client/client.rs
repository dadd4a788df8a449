//! The front end: negotiation, queues, and requests that wait for their answers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight,
    VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};

use super::memory::SharedMemory;
use super::post_copy::Faults;
use super::queue::{Part, QUEUE_BYTES, Queue};

/// Guest-physical address of the memory.
pub const BASE: u64 = 0x4000_0000;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

const VERSION_1: u64 = 1 << 32;
const INDIRECT: u64 = 1 << 28;
const EVENT_INDEX: u64 = 1 << 29;
const PROTOCOL: u64 = 1 << 30;
const LOG_ALL: u64 = 1 << 26;
const FLUSH: u64 = 1 << 9;
const MULTIQUEUE: u64 = 1 << 12;

const IN: u32 = 0;
const OUT: u32 = 1;
const SYNC: u32 = 4;
const IDENTIFY: u32 = 8;
const DISCARD: u32 = 11;
const ZEROES: u32 = 13;

/// The setup of a front end.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of queues.
    pub queues: u16,
    /// True if the device is a NIC. The queues of a NIC come in pairs, so their number is not queried.
    pub pairs: bool,
    /// Descriptors of each queue.
    pub size: u16,
    /// Bytes of guest memory for data.
    pub data: usize,
    pub event_index: bool,
    /// Put each request's descriptors into a table.
    pub indirect: bool,
    /// Let the guest flush; without, every write is durable.
    pub flush: bool,
    /// Keep track of requests in flight.
    pub inflight: bool,
    /// Let the memory arrive while the device uses it, all but the queues.
    pub post_copy: bool,
    /// Share the memory in slots, if the server takes slots.
    pub slots: bool,
    /// True if the memory's file can become shorter.
    pub shrinks: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queues: 1,
            pairs: false,
            size: 128,
            data: 4 << 20,
            event_index: true,
            indirect: false,
            flush: true,
            inflight: false,
            post_copy: false,
            slots: false,
            shrinks: false,
        }
    }
}

/// The memory in which a server keeps track of requests in flight.
struct Inflight {
    area: VhostUserInflight,
    file: File,
}

/// A request's status byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u8);

impl Status {
    /// Done.
    pub const OK: Self = Self(0);
    pub const ERROR: Self = Self(1);
    /// Not supported by the device.
    pub const UNSUPPORTED: Self = Self(2);
}

/// A front end.
pub struct Client {
    /// The protocol, for messages without a method here.
    pub frontend: Frontend,
    /// The guest's memory.
    pub memory: Arc<SharedMemory>,
    pub queues: Vec<Queue>,
    options: Options,
    features: u64,
    /// The dirty log, while the server keeps one.
    log: Option<SharedMemory>,
    inflight: Option<Inflight>,
    /// The server's page faults, in memory that arrives while it is used.
    pub faults: Option<Faults>,
}

fn failed(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

impl Client {
    /// Connects to a server and negotiates. No queue is started.
    pub fn connect(path: &Path, options: Options) -> io::Result<Self> {
        let length = u64::from(options.queues) * QUEUE_BYTES + options.data as u64;
        let memory = match options.shrinks {
            false => SharedMemory::new(length as usize)?,
            true => SharedMemory::unsealed(length as usize)?,
        };
        let memory = Arc::new(memory);
        let queues = (0..options.queues).map(|index| {
            let start = u64::from(index) * QUEUE_BYTES;
            Queue::new(
                Arc::clone(&memory),
                start,
                BASE,
                options.size,
                options.event_index,
            )
        });
        let queues = queues.collect::<io::Result<_>>()?;
        let mut client = Self {
            frontend: Self::dial(path)?,
            memory,
            queues,
            options,
            features: 0,
            log: None,
            inflight: None,
            faults: None,
        };
        client.negotiate()?;
        Ok(client)
    }

    fn dial(path: &Path) -> io::Result<Frontend> {
        Ok(Frontend::from_stream(UnixStream::connect(path)?, 16))
    }

    /// Reconnects with the same memory, queues and requests in flight, as QEMU does when the server comes back, and
    /// starts all queues.
    pub fn reconnect(&mut self, path: &Path) -> io::Result<()> {
        self.frontend = Self::dial(path)?;
        self.negotiate()?;
        for index in 0..self.queues.len() {
            let base = self.queues[index].used();
            self.start_queue(index, base)?;
        }
        Ok(())
    }

    fn negotiate(&mut self) -> io::Result<()> {
        let frontend = &mut self.frontend;
        frontend.set_owner().map_err(failed)?;
        let offered = frontend.get_features().map_err(failed)?;
        let mut features = VERSION_1 | PROTOCOL | INDIRECT;
        if self.options.event_index {
            features |= EVENT_INDEX;
        }
        if self.options.flush {
            features |= FLUSH;
        }
        if self.options.queues > 1 && !self.options.pairs {
            features |= MULTIQUEUE;
        }
        self.features = features & offered;
        frontend.set_features(self.features).map_err(failed)?;
        let offered = frontend.get_protocol_features().map_err(failed)?;
        let mut wanted = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::REPLY_ACK;
        wanted.set(VhostUserProtocolFeatures::MQ, !self.options.pairs);
        if self.options.inflight {
            wanted |= VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        }
        if self.options.post_copy {
            wanted |= VhostUserProtocolFeatures::PAGEFAULT;
        }
        let slots = VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        wanted.set(slots, self.options.slots);
        let agreed = wanted & offered;
        self.options.slots = agreed.contains(slots);
        frontend.set_protocol_features(agreed).map_err(failed)?;
        if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        if agreed.contains(VhostUserProtocolFeatures::MQ) {
            frontend.get_queue_num().map_err(failed)?;
        }
        if self.options.post_copy {
            self.announce_post_copy()?;
        }
        self.share_memory()?;
        self.acknowledge_memory()?;
        if self.options.inflight {
            self.share_inflight()?;
        }
        Ok(())
    }

    fn announce_post_copy(&mut self) -> io::Result<()> {
        for queue in 0..u64::from(self.options.queues) {
            let place = self.memory.at(queue * QUEUE_BYTES, QUEUE_BYTES as usize);
            // SAFETY: `at` checked the range. The queues are still empty.
            unsafe { place.write_bytes(0, QUEUE_BYTES as usize) };
        }
        let file = self.frontend.postcopy_advise().map_err(failed)?;
        self.frontend.postcopy_listen().map_err(failed)?;
        self.faults = Some(Faults::new(file, Arc::clone(&self.memory)));
        Ok(())
    }

    /// Shares the memory, again. For memory that arrives while it is used, [`Client::acknowledge_memory`] then tells
    /// the server that its page faults can be served.
    pub fn share_memory(&mut self) -> io::Result<()> {
        let region = self.region();
        let base = match self.options.slots {
            true => self.frontend.add_mem_region(&region).map_err(failed)?,
            false => {
                let bases = self.frontend.set_mem_table(&[region]).map_err(failed)?;
                bases.map(|bases| bases[0])
            }
        };
        if let (Some(faults), Some(base)) = (&mut self.faults, base) {
            faults.set_base(base);
        }
        Ok(())
    }

    /// Tells the server that page faults in the memory shared last can be served.
    pub fn acknowledge_memory(&mut self) -> io::Result<()> {
        if self.faults.is_some() {
            let code = match self.options.slots {
                true => FrontendReq::ADD_MEM_REG,
                false => FrontendReq::SET_MEM_TABLE,
            };
            self.frontend
                .postcopy_ack_mem_regions(code)
                .map_err(failed)?;
        }
        Ok(())
    }

    /// Tells the server that all of the memory has arrived.
    pub fn end_post_copy(&mut self) -> io::Result<()> {
        self.faults = None;
        self.frontend.postcopy_end().map_err(failed)
    }

    /// Returns the description of the memory for the server.
    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: BASE,
            memory_size: self.memory.length() as u64,
            userspace_addr: self.memory.at(0, 0) as u64,
            mmap_offset: 0,
            mmap_handle: self.memory.descriptor(),
        }
    }

    fn share_inflight(&mut self) -> io::Result<()> {
        if self.inflight.is_none() {
            let wanted = VhostUserInflight::new(0, 0, self.options.queues, self.options.size);
            let (area, file) = self.frontend.get_inflight_fd(&wanted).map_err(failed)?;
            self.inflight = Some(Inflight { area, file });
        }
        if let Some(Inflight { area, file }) = &self.inflight {
            let fd = file.as_raw_fd();
            self.frontend.set_inflight_fd(area, fd).map_err(failed)?;
        }
        Ok(())
    }

    /// Returns the disk's configuration space.
    pub fn config(&mut self) -> io::Result<Vec<u8>> {
        let room = [0; 60];
        let (_, space) = self
            .frontend
            .get_config(0, 60, VhostUserConfigFlags::empty(), &room)
            .map_err(failed)?;
        Ok(space)
    }

    /// Starts all queues.
    pub fn start(&mut self) -> io::Result<()> {
        for index in 0..self.queues.len() {
            self.start_queue(index, 0)?;
        }
        Ok(())
    }

    /// Starts a queue of which `base` requests have been taken.
    pub fn start_queue(&mut self, index: usize, base: u16) -> io::Result<()> {
        let size = self.queues[index].size();
        self.frontend.set_vring_num(index, size).map_err(failed)?;
        self.place_queue(index)?;
        let (frontend, queue) = (&mut self.frontend, &self.queues[index]);
        frontend.set_vring_base(index, base).map_err(failed)?;
        frontend
            .set_vring_call(index, &queue.call)
            .map_err(failed)?;
        frontend
            .set_vring_err(index, &queue.error)
            .map_err(failed)?;
        frontend
            .set_vring_kick(index, &queue.kick)
            .map_err(failed)?;
        self.enable_queue(index, true)
    }

    pub fn enable_queue(&mut self, index: usize, enabled: bool) -> io::Result<()> {
        let enabling = self.frontend.set_vring_enable(index, enabled);
        enabling.map_err(failed)
    }

    /// Sends the addresses of a queue, and whether the server logs its writes there.
    fn place_queue(&mut self, index: usize) -> io::Result<()> {
        let queue = &self.queues[index];
        let [descriptors, available, used] = queue.places();
        let user = self.memory.at(0, 0) as u64;
        let config = VringConfigData {
            queue_max_size: queue.size(),
            queue_size: queue.size(),
            flags: u32::from(self.log.is_some()),
            desc_table_addr: user + descriptors,
            avail_ring_addr: user + available,
            used_ring_addr: user + used,
            log_addr: self.log.is_some().then_some(BASE + used),
        };
        self.frontend.set_vring_addr(index, &config).map_err(failed)
    }

    /// Stops a queue and returns the number of requests taken, modulo 65536.
    pub fn stop_queue(&mut self, index: usize) -> io::Result<u16> {
        let base = self.frontend.get_vring_base(index).map_err(failed)?;
        u16::try_from(base).map_err(failed)
    }

    /// Lets the server log written pages.
    pub fn start_log(&mut self) -> io::Result<()> {
        let pages = (BASE + self.memory.length() as u64).div_ceil(4096);
        let length = pages.div_ceil(8).next_multiple_of(4096);
        let log = SharedMemory::new(length as usize)?;
        let region = VhostUserDirtyLogRegion {
            mmap_size: length,
            mmap_offset: 0,
            mmap_handle: log.descriptor(),
        };
        self.frontend
            .set_log_base(0, Some(region))
            .map_err(failed)?;
        self.log = Some(log);
        self.frontend
            .set_features(self.features | LOG_ALL)
            .map_err(failed)?;
        (0..self.queues.len()).try_for_each(|index| self.place_queue(index))
    }

    /// Ends the server's logging, with the log still shared and empty.
    pub fn stop_log(&mut self) -> io::Result<()> {
        self.frontend.set_features(self.features).map_err(failed)?;
        self.take_log();
        Ok(())
    }

    /// Returns the memory in which the server keeps track of requests in flight.
    pub fn inflight_memory(&self) -> io::Result<SharedMemory> {
        let inflight = self.inflight.as_ref().ok_or(io::ErrorKind::NotFound)?;
        SharedMemory::map(inflight.file.try_clone()?, inflight.area.mmap_size as usize)
    }

    /// Returns the pages logged since the last call, as offsets in the memory, in order.
    pub fn take_log(&self) -> Vec<u64> {
        let Some(log) = &self.log else {
            return Vec::new();
        };
        let mut bits = vec![0; log.length()];
        log.read(0, &mut bits);
        log.write(0, &vec![0; log.length()]);
        (0..bits.len() as u64 * 8)
            .filter(|page| bits[(page / 8) as usize] & (1 << (page % 8)) != 0)
            .map(|page| (page * 4096).wrapping_sub(BASE))
            .collect()
    }

    /// Returns the offset of the data area in the memory.
    pub const fn data(&self) -> u64 {
        self.options.queues as u64 * QUEUE_BYTES
    }

    /// Starts a request with these parts of data, if any, and returns the head.
    pub fn submit(&mut self, queue: usize, kind: u32, sector: u64, data: &[Part]) -> u16 {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        let indirect = self.options.indirect;
        self.queues[queue]
            .request(header, data, indirect)
            .expect("room in the queue")
    }

    /// Starts a read into `length` bytes at an offset of the memory.
    pub fn submit_read(&mut self, queue: usize, sector: u64, offset: u64, length: u32) -> u16 {
        let part = self.part(offset, length, true);
        self.submit(queue, IN, sector, &[part])
    }

    /// Starts a write of `length` bytes at an offset of the memory.
    pub fn submit_write(&mut self, queue: usize, sector: u64, offset: u64, length: u32) -> u16 {
        let part = self.part(offset, length, false);
        self.submit(queue, OUT, sector, &[part])
    }

    /// Returns a part of a request at an offset of the memory.
    pub const fn part(&self, offset: u64, length: u32, writable: bool) -> Part {
        Part {
            address: BASE + offset,
            length,
            writable,
        }
    }

    /// Waits for a request's answer, which must be the queue's next.
    pub fn wait_for(&mut self, queue: usize, head: u16) -> Status {
        let done = self.queues[queue].wait(PATIENCE).expect("an answer");
        assert_eq!(done.head, head, "the answer to another request");
        self.status(queue, head)
    }

    pub fn status(&self, queue: usize, head: u16) -> Status {
        let mut status = [0];
        self.memory
            .read(self.queues[queue].status(head), &mut status);
        Status(status[0])
    }

    fn call(&mut self, queue: usize, kind: u32, sector: u64, data: &[Part]) -> Status {
        let head = self.submit(queue, kind, sector, data);
        self.queues[queue].notify();
        self.wait_for(queue, head)
    }

    pub fn read(&mut self, queue: usize, sector: u64, length: usize) -> Result<Vec<u8>, Status> {
        let part = self.part(self.data(), length as u32, true);
        match self.call(queue, IN, sector, &[part]) {
            Status::OK => {
                let mut bytes = vec![0; length];
                self.memory.read(self.data(), &mut bytes);
                Ok(bytes)
            }
            status => Err(status),
        }
    }

    /// Writes.
    pub fn write(&mut self, queue: usize, sector: u64, bytes: &[u8]) -> Status {
        self.memory.write(self.data(), bytes);
        let part = self.part(self.data(), bytes.len() as u32, false);
        self.call(queue, OUT, sector, &[part])
    }

    /// Makes all writes durable.
    pub fn flush(&mut self, queue: usize) -> Status {
        self.call(queue, SYNC, 0, &[])
    }

    /// Reads the serial number.
    pub fn identify(&mut self, queue: usize) -> Result<Vec<u8>, Status> {
        let part = self.part(self.data(), 20, true);
        match self.call(queue, IDENTIFY, 0, &[part]) {
            Status::OK => {
                let mut bytes = vec![0; 20];
                self.memory.read(self.data(), &mut bytes);
                Ok(bytes)
            }
            status => Err(status),
        }
    }

    pub fn discard(&mut self, queue: usize, sector: u64, sectors: u32) -> Status {
        self.range(queue, DISCARD, sector, sectors, 0)
    }

    /// Makes sectors read as zeroes.
    pub fn zero(&mut self, queue: usize, sector: u64, sectors: u32, unmap: bool) -> Status {
        self.range(queue, ZEROES, sector, sectors, u32::from(unmap))
    }

    fn range(&mut self, queue: usize, kind: u32, sector: u64, sectors: u32, flags: u32) -> Status {
        let mut bytes = sector.to_le_bytes().to_vec();
        bytes.extend(sectors.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        self.memory.write(self.data(), &bytes);
        let part = self.part(self.data(), 16, false);
        self.call(queue, kind, 0, &[part])
    }
}
