//! The messages of a front end, on the thread of its socket.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use crate::features::{EVENT_INDEX, LARGEST_RING, MOST_RINGS, PROTOCOL, TRANSPORT};
use crate::memory::GuestRam;
use crate::memory::dirty_log::DirtyLog;
use crate::memory::post_copy::{self, PostCopy};
use crate::protocol::device::Device;
use crate::protocol::memory::MOST_SLOTS;
use crate::protocol::own::Takes;
use crate::protocol::session::{FrontEndCommand, FrontEndError, RingSetup};
use crate::rings::inflight::InflightArea;
use crate::rings::split::RingLayout;

/// Time limit of the device for a step that waits for nothing.
pub(super) const PROMPT: Duration = Duration::from_secs(10);

/// Time limit for the requests of a stopping ring. The front end stands still meanwhile.
pub(super) const DRAIN: Duration = Duration::from_secs(30);

/// Interval between two checks for a front end that has left while the device is asked.
const LOOK: Duration = Duration::from_millis(20);

/// A ring, as far as the front end has described it.
#[derive(Default)]
pub(super) struct RingState {
    size: u16,
    /// In the front end's addresses: descriptors, available, used.
    places: Option<[u64; 3]>,
    log: Option<u64>,
    base: u16,
    enabled: bool,
    pub(super) running: bool,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
}

impl RingState {
    /// Returns true if all of the ring lies in the memory.
    pub(super) fn lies_in(&self, ram: &GuestRam) -> bool {
        let size = usize::from(self.size);
        let bytes = [16 * size, 6 + 2 * size, 6 + 8 * size];
        self.places.is_some_and(|places| {
            let mut parts = places.into_iter().zip(bytes);
            parts.all(|(user, bytes)| ram.holds(user, bytes))
        })
    }
}

/// The server side of a front end's connection.
pub(crate) struct Handler<D> {
    device: D,
    pub(super) socket: UnixStream,
    /// True if the guest's memory may arrive by post-copy.
    may_post_copy: bool,
    /// State of post-copy, while memory arrives or is about to.
    pub(super) post_copy: Option<PostCopy>,
    pub(super) ram: Option<Arc<GuestRam>>,
    /// True while a running ring lacks memory: the device stands still, and does not have `ram` yet.
    pub(super) lacks_memory: bool,
    inflight: Option<Arc<InflightArea>>,
    features: u64,
    pub(super) rings: [RingState; MOST_RINGS as usize],
    /// Cause of the last message's failure.
    problem: Option<FrontEndError>,
}

impl<D: Device> Handler<D> {
    pub(crate) fn new(device: D, socket: UnixStream) -> Self {
        Self {
            device,
            socket,
            may_post_copy: post_copy::may_wait_for_pages().is_ok(),
            post_copy: None,
            ram: None,
            lacks_memory: false,
            inflight: None,
            features: 0,
            rings: std::array::from_fn(|_| RingState::default()),
            problem: None,
        }
    }

    /// Takes the cause of the last message's failure, for cases where the crate's error does not tell.
    pub(crate) fn take_problem(&mut self) -> Option<FrontEndError> {
        self.problem.take()
    }

    /// Returns the messages to take before the crate sees them. The enabling of rings is among them until the front end
    /// has acknowledged protocol features.
    pub(crate) fn takes(&self) -> Takes {
        Takes {
            enable: self.features & PROTOCOL == 0,
            announce: self.device.announces(),
            unchanged: self.post_copy.as_ref().is_some_and(PostCopy::listens),
        }
    }

    /// Announces a machine with this MAC address to the network.
    pub(crate) fn announce(&mut self, mac: [u8; 6]) -> Result<()> {
        self.ask(FrontEndCommand::Announce { mac }, PROMPT)?;
        Ok(())
    }

    fn ring(&mut self, index: u32) -> Result<&mut RingState> {
        self.rings
            .get_mut(index as usize)
            .ok_or(Error::InvalidParam)
    }

    pub(super) fn refuse(&mut self, problem: impl Into<FrontEndError>) -> Error {
        self.problem = Some(problem.into());
        Error::InvalidParam
    }

    /// Asks the device and waits for the answer while the front end lives: the device may wait for a page, or for the
    /// guest to take a signal. The wait has a limit unless pages may be missing.
    pub(super) fn ask(&mut self, command: FrontEndCommand, within: Duration) -> Result<u16> {
        let begun = Instant::now();
        let answer = send(&self.device, command);
        loop {
            let problem = match answer.recv_timeout(LOOK) {
                Ok(Ok(base)) => return Ok(base),
                Ok(Err(problem)) => problem,
                Err(mpsc::RecvTimeoutError::Disconnected) => FrontEndError::Ended,
                Err(mpsc::RecvTimeoutError::Timeout) if post_copy::has_left(&self.socket) => {
                    self.post_copy = None;
                    FrontEndError::Left
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if self.post_copy.is_some() || begun.elapsed() < within {
                        continue;
                    }
                    FrontEndError::Slow
                }
            };
            return Err(self.refuse(problem));
        }
    }

    /// Returns the end of the front end's grace period, while the protocol waits for the memory to count as complete.
    pub(crate) fn memory_ends(&self) -> Option<Instant> {
        self.post_copy.as_ref().and_then(PostCopy::ends)
    }

    /// Marks the guest's memory as complete.
    pub(crate) fn complete_memory(&mut self) {
        if let Some(post_copy) = self.post_copy.take() {
            post_copy.complete();
        }
    }

    /// Returns the descriptor if it is an eventfd: reads and writes of anything else could block the device.
    fn eventfd(&mut self, file: Option<File>) -> Result<Option<OwnedFd>> {
        match file {
            Some(file) if is_eventfd(&file) => Ok(Some(file.into())),
            Some(_) => Err(self.refuse(FrontEndError::NotEventfd)),
            None => Ok(None),
        }
    }

    fn layout(&mut self, index: u32) -> Result<RingLayout> {
        let ring = self.ring(index)?;
        let (size, places) = (ring.size, ring.places);
        let Some(ram) = self.ram.as_ref() else {
            return Err(self.refuse(FrontEndError::NoMemory));
        };
        let place = |user| ram.guest_address(user);
        let found = places.and_then(|[descriptors, available, used]| {
            Some(RingLayout {
                size,
                descriptors: place(descriptors)?,
                available: place(available)?,
                used: place(used)?,
            })
        });
        found
            .filter(|_| size > 0)
            .ok_or_else(|| self.refuse(crate::rings::split::RingError::Layout))
    }
}

/// Asks the device and waits for the answer, until the device ends.
pub(crate) fn ask(
    device: &impl Device,
    command: FrontEndCommand,
) -> std::result::Result<u16, FrontEndError> {
    let answer = send(device, command);
    answer.recv().unwrap_or(Err(FrontEndError::Ended))
}

fn send(
    device: &impl Device,
    command: FrontEndCommand,
) -> mpsc::Receiver<std::result::Result<u16, FrontEndError>> {
    let (sender, answer) = mpsc::sync_channel(1);
    let reply = Box::new(move |result| {
        let _ = sender.send(result);
    });
    device.front_end(command, reply);
    answer
}

fn is_eventfd(file: &impl AsFd) -> bool {
    let path = format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&file.as_fd())
    );
    std::fs::read_link(path).is_ok_and(|target| target.as_os_str() == "anon_inode:[eventfd]")
}

impl<D: Device> VhostUserBackendReqHandlerMut for Handler<D> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        // Deprecated; the specification lets a back end ignore this message.
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("RESET_DEVICE was not offered"))
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(TRANSPORT | self.device.features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !(TRANSPORT | self.device.features()) != 0 {
            return Err(Error::FeatureMismatch);
        }
        if features & PROTOCOL == 0 {
            // Without protocol features, no message will enable the rings.
            self.rings.iter_mut().for_each(|ring| ring.enabled = true);
        }
        self.features = features;
        self.ask(FrontEndCommand::Features { features }, PROMPT)?;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        post_copy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        match post_copy {
            Some(true) => self.prepare_table(regions, &files).map(Some),
            _ => self.replace_table(regions, &files).map(|()| None),
        }
    }

    fn postcopy_advice(&mut self) -> Result<File> {
        let (post_copy, shared) = PostCopy::new().map_err(Error::ReqHandlerError)?;
        self.post_copy = Some(post_copy);
        Ok(shared)
    }

    fn postcopy_listen(&mut self) -> Result<()> {
        if self.ram.is_some() {
            return Err(self.refuse(FrontEndError::MemoryFirst));
        }
        if let Some(post_copy) = &mut self.post_copy {
            post_copy.listen();
        }
        Ok(())
    }

    fn postcopy_ack_mem_regions(&mut self) -> Result<()> {
        let prepared = self.post_copy.as_mut().and_then(PostCopy::take_up);
        let Some(ram) = prepared else {
            return Err(self.refuse(FrontEndError::NothingPrepared));
        };
        self.ram = Some(Arc::clone(&ram));
        self.ask(FrontEndCommand::Memory { ram }, PROMPT)?;
        Ok(())
    }

    fn postcopy_end(&mut self) -> Result<()> {
        if let Some(post_copy) = &mut self.post_copy {
            post_copy.end();
        }
        Ok(())
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let ring = self.ring(index)?;
        let size = u16::try_from(num)
            .ok()
            .filter(|size| size.is_power_of_two() && *size <= LARGEST_RING);
        ring.size = size.ok_or(Error::InvalidParam)?;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let ring = self.ring(index)?;
        let places = Some([descriptor, available, used]);
        if ring.running && ring.places != places {
            return Err(self.refuse(FrontEndError::Running));
        }
        ring.places = places;
        let logged = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG);
        ring.log = logged.then_some(log);
        if ring.running {
            let log = ring.log;
            let ring = index as u16;
            self.ask(FrontEndCommand::RingLog { ring, log }, PROMPT)?;
        }
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let ring = self.ring(index)?;
        if ring.running {
            return Err(self.refuse(FrontEndError::Running));
        }
        ring.base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        if self.ring(index)?.running {
            let ring = index as u16;
            let base = self.ask(FrontEndCommand::Stop { ring }, DRAIN)?;
            let ring = self.ring(index)?;
            ring.base = base;
            ring.running = false;
            ring.call = None;
            ring.error = None;
            if self.features & PROTOCOL != 0 {
                self.ring(index)?.enabled = false;
            }
            if self.lacks_memory {
                self.give_memory()?;
            }
        }
        let base = self.ring(index)?.base;
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let index = u32::from(index);
        let kick = self.eventfd(file)?.ok_or(Error::InvalidOperation(
            "a ring without a kick descriptor would have to be polled",
        ))?;
        if self.ring(index)?.running {
            return Err(self.refuse(FrontEndError::Running));
        }
        let layout = self.layout(index)?;
        let inflight = self.inflight.clone();
        let event_index = self.features & EVENT_INDEX != 0;
        let ring = self.ring(index)?;
        let clone = |fd: &Option<OwnedFd>| fd.as_ref().and_then(|fd| fd.try_clone().ok());
        let setup = Box::new(RingSetup {
            layout,
            base: ring.base,
            event_index,
            enabled: ring.enabled,
            log: ring.log,
            inflight,
            kick,
            call: clone(&ring.call),
            error: clone(&ring.error),
        });
        let ring = index as u16;
        self.ask(FrontEndCommand::Start { ring, setup }, PROMPT)?;
        self.ring(index)?.running = true;
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let call = self.eventfd(file)?;
        let ring = self.ring(u32::from(index))?;
        if ring.running {
            let ring = u16::from(index);
            self.ask(FrontEndCommand::Call { ring, call }, PROMPT)?;
        } else {
            ring.call = call;
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let error = self.eventfd(file)?;
        let ring = self.ring(u32::from(index))?;
        if ring.running {
            let ring = u16::from(index);
            self.ask(FrontEndCommand::Error { ring, error }, PROMPT)?;
        } else {
            ring.error = error;
        }
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        let mut features = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::REPLY_ACK;
        features.set(VhostUserProtocolFeatures::PAGEFAULT, self.may_post_copy);
        features.set(VhostUserProtocolFeatures::RARP, self.device.announces());
        let configured = self.device.has_configuration();
        features.set(VhostUserProtocolFeatures::CONFIG, configured);
        Ok(features)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        if features & !self.get_protocol_features()?.bits() != 0 {
            return Err(Error::FeatureMismatch);
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.device.queues())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let ring = self.ring(index)?;
        ring.enabled = enable;
        if ring.running {
            let command = FrontEndCommand::Enable {
                ring: index as u16,
                enabled: enable,
            };
            self.ask(command, PROMPT)?;
        }
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        self.device
            .configuration(offset, size)
            .ok_or(Error::InvalidParam)
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation(
            "nothing in the configuration can be written",
        ))
    }

    fn get_inflight_fd(
        &mut self,
        inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        let (rings, size) = (inflight.num_queues, inflight.queue_size);
        if rings > MOST_RINGS || size > LARGEST_RING {
            return Err(Error::InvalidParam);
        }
        let (file, length) =
            InflightArea::create(rings, size).map_err(|_| Error::MemFdCreateError)?;
        Ok((VhostUserInflight::new(length, 0, rings, size), file))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let (rings, size) = (inflight.num_queues, inflight.queue_size);
        if rings > MOST_RINGS || size > LARGEST_RING {
            return Err(Error::InvalidParam);
        }
        let VhostUserInflight {
            mmap_size,
            mmap_offset,
            ..
        } = *inflight;
        let area = InflightArea::open(file, mmap_offset, mmap_size, rings, size)
            .map_err(|error| self.refuse(error))?;
        self.inflight = Some(Arc::new(area));
        Ok(())
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let log = DirtyLog::new(file, log.mmap_offset, log.mmap_size)
            .map_err(|error| self.refuse(error))?;
        let log = Arc::new(log);
        self.ask(FrontEndCommand::Log { log }, PROMPT)?;
        Ok(())
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("the device has none"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("the device has none"))
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MOST_SLOTS as u64)
    }

    fn add_mem_region(
        &mut self,
        slot: &VhostUserSingleMemoryRegion,
        file: File,
        _post_copy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.add_slot(slot, &file)
    }

    fn remove_mem_region(&mut self, slot: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.remove_slot(slot)
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("the device has no state to move"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("the device has no state to move"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("the device shares no memory"))
    }
}
