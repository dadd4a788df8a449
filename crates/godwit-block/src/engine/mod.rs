//! One engine per disk: a thread that owns the disk's image, its clients' sockets and its peers'
//! connections, and drives a [`godwit_core::Controller`] with them.

mod config;
mod handle;
mod snapshot;
mod streams;

pub use config::{EngineConfig, EngineError, EngineEvent};
pub use handle::{EngineHandle, Reply};
pub use snapshot::{Counters, LATENCY_BOUNDS_US, Latencies, LatencySummary, Snapshot};
pub use streams::{ClientStream, PeerStream, PeerStreams};

use godwit_core::authority::AuthorityRecord;

use crate::image::Image;

/// Starts the engine of a disk whose stored authority is `record`.
///
/// # Errors
/// [`EngineError::Start`] when the kernel refuses a thread, memory, or an `io_uring`.
pub fn spawn(
    config: EngineConfig,
    image: Image,
    record: AuthorityRecord,
    events: Box<dyn Fn(EngineEvent) + Send>,
) -> Result<EngineHandle, EngineError> {
    let _ = (config, image, record, events);
    todo!("the engine's thread")
}
