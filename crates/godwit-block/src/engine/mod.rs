//! The engine of a disk: a thread that owns the disk's image, its clients' sockets and its peers' connections, and
//! drives a [`godwit_core::Controller`] with them.
//!
//! ```text
//!  handle ── commands ──►┌────────────────────────────┐── events ──► owner
//!                        │ engine thread              │
//!  NBD clients ◄── ring ─┤  slots, buffers            ├─ ring ──► image
//!  guests ◄─────── ring ─┤  controller (godwit-core)  │
//!  other nodes ◄── ring ─┤                            │
//!                        └────────────────────────────┘
//! ```
//!
//! Each turn of the thread takes all completions from its `io_uring`, feeds them to the controller, carries out the
//! controller's actions, and submits the resulting operations with one system call. Data moves between sockets and disk
//! through page-aligned slot buffers without a copy in between. A request takes a slot from its class (client, sync,
//! copy), so that no class starves another. A connection whose request finds no slot is not read from until a slot is
//! free. No connection can starve others of slots: each has a lane of its own, and a limited share of the rest.

mod actions;
mod commands;
mod config;
mod connections;
mod context;
mod disk;
mod front_ends;
mod handle;
mod kept;
mod peers;
mod priority;
mod queue;
mod run;
mod slots;
mod stats;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use godwit_core::authority::AuthorityRecord;
use rustix::event::{EventfdFlags, eventfd};

pub use self::config::{
    EngineConfig, EngineError, EngineEvent, FirstMissing, MissingSnapshot, Restored,
};
pub use self::connections::streams::{ClientStream, PeerStream, PeerStreams};
pub use self::front_ends::vhost::device::BlockDevice;
pub use self::handle::{EngineHandle, Reply};
pub use self::kept::KEPT_ROOM;
pub use self::peers::link_signal::InterfaceCounter;
pub use self::slots::chunks::ChunkMemory;
pub use self::stats::baseline::LatencyBaseline;
pub use self::stats::snapshot::{
    Counters, FrontEndState, LATENCY_BOUNDS_US, Latencies, LatencySummary, Snapshot,
};

use self::handle::Waker;
use self::run::{Engine, Parts};
use crate::image::Image;

/// Fewest request tags: each class gets at least 16.
const FEWEST_REQUESTS: u32 = 64;

/// Starts the engine of a disk whose stored authority is `record`.
///
/// # Errors
/// [`EngineError::Start`] if the kernel refuses a thread, memory, or an `io_uring`.
pub fn spawn(
    config: EngineConfig,
    image: Image,
    record: AuthorityRecord,
    events: Box<dyn Fn(EngineEvent) + Send>,
) -> Result<EngineHandle, EngineError> {
    spawn_restored(config, image, record, Restored::default(), events)
}

/// Starts the engine of a disk with state stored by earlier processes.
///
/// # Errors
/// As [`spawn`].
pub fn spawn_restored(
    mut config: EngineConfig,
    image: Image,
    record: AuthorityRecord,
    restored: Restored,
    events: Box<dyn Fn(EngineEvent) + Send>,
) -> Result<EngineHandle, EngineError> {
    config.limits.requests = config.limits.requests.max(FEWEST_REQUESTS);
    let disk = config.disk.clone();
    let (capacity, limits) = (image.capacity, config.limits);
    let refused = |action: &'static str, source: io::Error| EngineError::Start {
        disk: disk.clone(),
        action,
        source,
    };
    let wake = eventfd(0, EventfdFlags::CLOEXEC)
        .map_err(|errno| refused("create an event counter", errno.into()))?;
    let wake = Arc::new(wake);
    let (sender, commands) = mpsc::channel();
    let missing = restored.missing.as_ref().map(|(missing, _)| missing);
    let published = Arc::new(Mutex::new(Snapshot::before_start(record, missing)));
    let parts = Parts {
        config,
        image,
        record,
        restored,
        commands,
        wake: Arc::clone(&wake),
        published: Arc::clone(&published),
        events,
    };
    let (ready, started) = mpsc::sync_channel(1);
    // Thread names hold 15 bytes.
    let name = format!("disk {disk}").chars().take(15).collect();
    let thread = thread::Builder::new()
        .name(name)
        .spawn(move || match Engine::new(parts) {
            Ok(engine) => {
                let _ = ready.send(Ok(()));
                run(engine)
            }
            Err(error) => {
                let _ = ready.send(Err(error));
                Ok(())
            }
        })
        .map_err(|error| refused("start its thread (TasksMax, pids.max)", error))?;
    match started.recv() {
        Ok(Ok(())) => Ok(EngineHandle::new(
            disk,
            capacity,
            limits,
            sender,
            Waker::new(wake),
            published,
            thread,
        )),
        Ok(Err(error)) => Err(error),
        Err(mpsc::RecvError) => Err(refused(
            "start its thread",
            io::Error::other("it ended at once"),
        )),
    }
}

/// Runs an engine to its end, whether in order or by a failure.
fn run(mut engine: Engine) -> Result<(), EngineError> {
    let disk = engine.cx.config.disk.clone();
    let result = catch_unwind(AssertUnwindSafe(|| engine.run())).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let cause = format!("a defect: {}", text.unwrap_or("it panicked"));
        Err(EngineError::Failed { disk, cause })
    });
    let released = engine.release();
    if let Err(error) = &result {
        tracing::error!("{error}");
        engine.cx.tell(EngineEvent::Failed(error.to_string()));
    }
    if !released {
        // The kernel may still write to the engine's memory, which must therefore stay.
        tracing::error!(
            disk = engine.cx.config.disk,
            "the kernel keeps memory of the disk's thread, which is given up"
        );
        std::mem::forget(engine);
    }
    result
}
