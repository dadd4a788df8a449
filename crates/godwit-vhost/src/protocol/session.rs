//! The protocol thread's commands for the device, which serves the rings.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::memory::dirty_log::DirtyLog;
use crate::memory::{GuestRam, LOST_PAGES, MemoryError};
use crate::rings::inflight::{InflightArea, InflightError, InflightRing};
use crate::rings::split::{RingError, RingLayout, SplitRing};

/// The reason for refusing a front end's request.
#[derive(Debug, thiserror::Error)]
pub enum FrontEndError {
    /// The device has ended, or is ending.
    #[error("the device is not served any more")]
    Ended,
    /// Another front end is attached, and one more waits.
    #[error("another virtual machine is attached, and one more waits for its turn")]
    Taken,
    /// No front end is attached.
    #[error("the virtual machine has left")]
    Left,
    /// The ring is served already.
    #[error("the ring is being served; stop it first")]
    Running,
    /// The ring needs memory first.
    #[error("the ring was started before the guest's memory was shared")]
    NoMemory,
    /// No memory was prepared.
    #[error("guest memory is acknowledged that nobody has shared")]
    NothingPrepared,
    /// Pages of memory that was already shared cannot be waited for.
    #[error("post-copy begins after the guest's memory was shared")]
    MemoryFirst,
    /// A lost connection announced the memory.
    #[error(
        "memory of the virtual machine was still arriving (post-copy) when its connection was lost, \
         and cannot be waited for any more: stop the virtual machine and start it anew"
    )]
    StillArriving,
    /// A kick, call or error descriptor is something else.
    #[error("a ring's kick, call or error descriptor is not an eventfd")]
    NotEventfd,
    /// Pages of the front end's shared memory are lost.
    #[error("{LOST_PAGES}")]
    LostPages,
    /// The device did not answer in time.
    #[error(
        "the ring's requests did not end in time; they stay recorded as in flight, and the front \
         end may reconnect"
    )]
    Slow,
    /// The ring is invalid.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The record of the ring's requests in flight is unusable.
    #[error(transparent)]
    Inflight(#[from] InflightError),
    /// The shared memory is unusable.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The parameters of a ring's start.
pub struct RingSetup {
    /// Addresses and size of the ring.
    pub layout: RingLayout,
    /// Requests taken before, modulo 65536.
    pub base: u16,
    /// True if events are suppressed by index.
    pub event_index: bool,
    /// True if requests are taken from the start.
    pub enabled: bool,
    /// Guest-physical address of the used ring in the log, if its pages are logged.
    pub log: Option<u64>,
    /// Record of requests in flight.
    pub inflight: Option<Arc<InflightArea>>,
    /// Event counter by which the guest signals new requests.
    pub kick: OwnedFd,
    /// Event counter that signals the guest.
    pub call: Option<OwnedFd>,
    /// Event counter that tells the front end of a broken ring.
    pub error: Option<OwnedFd>,
}

/// A ring that can be served.
pub struct OpenedRing {
    /// Source of requests and destination of answers.
    pub split: SplitRing,
    /// Record of requests in progress.
    pub inflight: Option<InflightRing>,
    /// Requests taken and not answered by the ring's last server, in the order of taking.
    pub again: Vec<u16>,
}

impl RingSetup {
    /// Opens ring `index` in the guest's memory.
    ///
    /// # Errors
    /// The ring is not in memory, or the record of its requests makes no sense.
    pub fn open(&self, ram: &GuestRam, index: u16) -> Result<OpenedRing, FrontEndError> {
        let mut split = SplitRing::new(
            ram.memory(),
            self.layout,
            self.base,
            self.event_index,
            self.log,
        )?;
        let (inflight, again) = match &self.inflight {
            None => (None, Vec::new()),
            Some(area) => {
                let area = Arc::clone(area);
                let (inflight, again) =
                    InflightRing::open(area, index, self.layout.size, split.used())?;
                // Taken requests are the answered and the unanswered ones. The front end's base may be older than the
                // end of the ring's last server.
                split.set_base(split.used().wrapping_add(again.len() as u16));
                (Some(inflight), again)
            }
        };
        if ram.has_lost_pages() || inflight.as_ref().is_some_and(InflightRing::has_lost_pages) {
            return Err(FrontEndError::LostPages);
        }
        Ok(OpenedRing {
            split,
            inflight,
            again,
        })
    }
}

/// A step of the protocol for the device. The reply comes once the step has taken effect.
pub enum FrontEndCommand {
    /// A front end is here, and waits until the front end before has left. The device shuts the socket down when the
    /// device ends.
    Attach {
        /// The front end's connection.
        socket: UnixStream,
    },
    /// The front end has left. Only transfers under way still touch its memory, and the reply comes once those have
    /// ended.
    Detach,
    /// Takes no request from any ring until the memory changes. The reply comes once all taken requests have ended.
    Still,
    /// Resumes after [`FrontEndCommand::Still`]: the device's memory is unchanged.
    GoOn,
    /// Replaces the guest's memory.
    Memory {
        /// All of the memory.
        ram: Arc<GuestRam>,
    },
    /// Replaces the log.
    Log {
        /// Bitmap for the pages written by the device.
        log: Arc<DirtyLog>,
    },
    /// Sets the features.
    Features {
        /// Acknowledged features, a bit each.
        features: u64,
    },
    /// Serves a ring.
    Start {
        /// Index of the ring.
        ring: u16,
        /// Parameters of the start.
        setup: Box<RingSetup>,
    },
    /// Takes no more requests of a ring. The reply comes once all taken requests are answered, and is the index of the
    /// next request.
    Stop {
        /// Index of the ring.
        ring: u16,
    },
    /// Takes requests, or takes none for now.
    Enable {
        /// Index of the ring.
        ring: u16,
        /// True if requests are taken.
        enabled: bool,
    },
    /// Replaces the event counter that signals the guest.
    Call {
        /// Index of the ring.
        ring: u16,
        /// An event counter, or nothing.
        call: Option<OwnedFd>,
    },
    /// Replaces the event counter for errors.
    Error {
        /// Index of the ring.
        ring: u16,
        /// An event counter, or nothing.
        error: Option<OwnedFd>,
    },
    /// Tells the network that a machine with this MAC address is here: the front end has moved the machine, and the
    /// guest does not announce itself.
    Announce {
        /// MAC address of the machine.
        mac: [u8; 6],
    },
    /// Sets the used ring's address in the log.
    RingLog {
        /// Index of the ring.
        ring: u16,
        /// Guest-physical; nothing if the ring's pages are not logged.
        log: Option<u64>,
    },
}
