//! What the protocol's thread asks of the engine, which serves the rings.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use super::dirty_log::DirtyLog;
use super::inflight::{InflightArea, InflightError};
use super::memory::{GuestRam, MemoryError};
use super::request::SERIAL;
use super::ring::{RingError, RingLayout};

/// Why the front end cannot have what it asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrontEndError {
    /// The engine has ended, or is ending.
    #[error("the disk is not served any more")]
    Ended,
    /// Another front end is attached, and another waits.
    #[error("another virtual machine is attached to the disk, and one more waits for its turn")]
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
    /// The engine did not answer in time.
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
pub(crate) struct RingSetup {
    pub(crate) layout: RingLayout,
    /// Requests taken before, modulo 65536.
    pub(crate) base: u16,
    pub(crate) event_index: bool,
    pub(crate) enabled: bool,
    /// Guest-physical address that the used ring has in the log, when its pages are logged.
    pub(crate) log: Option<u64>,
    pub(crate) inflight: Option<Arc<InflightArea>>,
    /// The guest signals new requests here.
    pub(crate) kick: OwnedFd,
    /// The guest is signalled here.
    pub(crate) call: Option<OwnedFd>,
    /// The front end is told here that the ring is broken.
    pub(crate) error: Option<OwnedFd>,
}

/// A step of the protocol that concerns the engine. It is answered when it has taken effect.
pub(crate) enum FrontEndCommand {
    /// A front end is here, for a disk of this serial number. It waits until the one before it has
    /// left. The engine shuts the socket down
    /// when it ends.
    Attach {
        socket: UnixStream,
        serial: [u8; SERIAL],
    },
    /// It left: nothing of its memory is touched any more except by transfers under way, and the
    /// answer comes when those have ended.
    Detach,
    /// Take nothing from any ring until the memory changes. The answer comes when nothing that was
    /// taken is left.
    Still,
    /// The guest's memory is this from now on.
    Memory { ram: Arc<GuestRam> },
    /// The log is this from now on.
    Log { log: Arc<DirtyLog> },
    /// The features are these from now on.
    Features { features: u64 },
    /// Serve a ring.
    Start { ring: u16, setup: Box<RingSetup> },
    /// Take no more requests of a ring. The answer comes when all that were taken are answered, and
    /// is the index of the next.
    Stop { ring: u16 },
    /// Take requests, or take none for now.
    Enable { ring: u16, enabled: bool },
    /// Signal the guest here.
    Call { ring: u16, call: Option<OwnedFd> },
    /// Signal errors here.
    Error { ring: u16, error: Option<OwnedFd> },
    /// The used ring's address in the log.
    RingLog { ring: u16, log: Option<u64> },
}
