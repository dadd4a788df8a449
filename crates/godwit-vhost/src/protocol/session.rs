//! What the protocol's thread asks of the device, which serves the rings.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::memory::dirty_log::DirtyLog;
use crate::memory::{GuestRam, LOST_PAGES, MemoryError};
use crate::rings::inflight::{InflightArea, InflightError, InflightRing};
use crate::rings::split::{RingError, RingLayout, SplitRing};

/// Why the front end cannot have what it asked for.
#[derive(Debug, thiserror::Error)]
pub enum FrontEndError {
    /// The device has ended, or is ending.
    #[error("the device is not served any more")]
    Ended,
    /// Another front end is attached, and another waits.
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
    /// No memory was announced.
    #[error("guest memory is acknowledged that nobody has shared")]
    NothingPrepared,
    /// Its pages cannot be waited for any more.
    #[error("post-copy begins after the guest's memory was shared")]
    MemoryFirst,
    /// It was told of by a connection that is lost.
    #[error(
        "memory of the virtual machine was still arriving (post-copy) when its connection was lost, \
         and cannot be waited for any more: stop the virtual machine and start it anew"
    )]
    StillArriving,
    /// A kick or call descriptor is something else.
    #[error("a ring's kick, call or error descriptor is not an eventfd")]
    NotEventfd,
    /// Pages of the memory that it shares are lost.
    #[error("{LOST_PAGES}")]
    LostPages,
    /// The device did not answer in time.
    #[error(
        "the ring's requests did not end in time; they stay recorded as in flight, and the front \
         end may reconnect"
    )]
    Slow,
    /// The ring itself.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Its requests in flight.
    #[error(transparent)]
    Inflight(#[from] InflightError),
    /// Memory that was shared.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Everything that a ring is started with.
pub struct RingSetup {
    /// Where it is.
    pub layout: RingLayout,
    /// Requests taken before, modulo 65536.
    pub base: u16,
    /// Events are suppressed by index.
    pub event_index: bool,
    /// Requests are taken from the start.
    pub enabled: bool,
    /// Guest-physical address that the used ring has in the log, when its pages are logged.
    pub log: Option<u64>,
    /// Where requests in flight are recorded.
    pub inflight: Option<Arc<InflightArea>>,
    /// The guest signals new requests here.
    pub kick: OwnedFd,
    /// The guest is signalled here.
    pub call: Option<OwnedFd>,
    /// The front end is told here that the ring is broken.
    pub error: Option<OwnedFd>,
}

/// A ring that can be served.
pub struct OpenedRing {
    /// Where requests come from and answers go.
    pub split: SplitRing,
    /// Where requests being worked on are recorded.
    pub inflight: Option<InflightRing>,
    /// Requests that whoever served the ring before took and did not answer, in the order in which it took them.
    pub again: Vec<u16>,
}

impl RingSetup {
    /// Opens ring `index` in the guest's memory.
    ///
    /// # Errors
    /// When it is not in memory, or what is recorded of its requests makes no sense.
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
                // Those taken are the answered ones and the unanswered ones, whatever the front
                // end knew of it when the last server of the ring ended.
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

/// A step of the protocol that concerns the device. It is answered when it has taken effect.
pub enum FrontEndCommand {
    /// A front end is here. It waits until the one before it has left. The device shuts the socket
    /// down when it ends.
    Attach {
        /// Its connection.
        socket: UnixStream,
    },
    /// It left: nothing of its memory is touched any more except by transfers under way, and the
    /// answer comes when those have ended.
    Detach,
    /// Take nothing from any ring until the memory changes. The answer comes when nothing that was
    /// taken is left.
    Still,
    /// Go on after [`FrontEndCommand::Still`]: the memory is where it was for the device.
    GoOn,
    /// The guest's memory is this from now on.
    Memory {
        /// All of it.
        ram: Arc<GuestRam>,
    },
    /// The log is this from now on.
    Log {
        /// Where pages that the device writes are marked.
        log: Arc<DirtyLog>,
    },
    /// The features are these from now on.
    Features {
        /// What was offered and taken, one bit each.
        features: u64,
    },
    /// Serve a ring.
    Start {
        /// Its index.
        ring: u16,
        /// What it is started with.
        setup: Box<RingSetup>,
    },
    /// Take no more requests of a ring. The answer comes when all that were taken are answered, and
    /// is the index of the next.
    Stop {
        /// Its index.
        ring: u16,
    },
    /// Take requests, or take none for now.
    Enable {
        /// Its index.
        ring: u16,
        /// Requests are taken.
        enabled: bool,
    },
    /// Signal the guest here.
    Call {
        /// Its index.
        ring: u16,
        /// An event counter, or nothing.
        call: Option<OwnedFd>,
    },
    /// Signal errors here.
    Error {
        /// Its index.
        ring: u16,
        /// An event counter, or nothing.
        error: Option<OwnedFd>,
    },
    /// Tell the network that a machine with this MAC address is here: the front end has moved it, and its guest does not do
    /// so itself.
    Announce {
        /// The address.
        mac: [u8; 6],
    },
    /// The used ring's address in the log.
    RingLog {
        /// Its index.
        ring: u16,
        /// Guest-physical; nothing when its pages are not logged.
        log: Option<u64>,
    },
}
