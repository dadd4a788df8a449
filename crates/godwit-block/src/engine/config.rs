//! The parameters, events and errors of an engine.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::image::Fingerprint;
use crate::image::notes::missing::MissingNotes;
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::Event;
use godwit_core::units::{Bytes, MigrationId};
use godwit_core::{AREA_SECTORS, ActiveAreas, HeatPiece, Limits, Missing, WordPiece, Written};

/// The parameters of an engine. All of them are fixed for the engine's life.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Name of the disk, for errors and logs.
    pub disk: String,
    /// Sizes of the controller's tables. Requests are raised to at least 64.
    pub limits: Limits,
    /// Memory for the data of requests in flight, raised to at least 96 MiB so that the longest request fits in each
    /// part. Address space, committed on use; if the disk arrives in a migration, a fifth is committed at once, until
    /// the migration is over. In addition, each client and each forwarding node has 1 MiB of its own, and the guest's
    /// rings have 32 MiB.
    pub memory: Bytes,
    /// Most NBD clients attached at once. Each has a request of its own while clients are fewer than a quarter of
    /// [`Limits::requests`].
    pub max_clients: u32,
    /// True if more than one party may have written to the disk since it arrived, as the last [`Event::SharingChanged`]
    /// said.
    pub shared: bool,
    /// True if missing parts of the disk are pulled on demand only.
    pub pull_on_demand_only: bool,
    /// File for the set of blocks written since the disk arrived, stored at an orderly end ([`crate::image::notes::written`]).
    pub written: Option<PathBuf>,
    /// Files for the blocks known to differ from the disk's image, and for the blocks known to be equal, stored at an
    /// orderly end: as [`Self::written`].
    pub compared: Option<[PathBuf; 2]>,
    /// Folder for the file of writes that a follower keeps apart ([`godwit_core::action::DiskOperation::Keep`]); the
    /// image's folder if `None`.
    pub kept_in: Option<PathBuf>,
    /// Longest wait of a request for a missing part of the disk, before the request fails; unlimited if `None`.
    pub longest_missing_wait: Option<Duration>,
    /// Duration of such a wait after which the virtual machine is to be stopped ([`EngineEvent::WaitsLong`]).
    pub missing_pauses_after: Option<Duration>,
    /// True if the disk was created from an image. If the disk has left and this node owes a part, the local data may
    /// never have been complete ([`Controller::is_no_base`](godwit_core::Controller::is_no_base)).
    pub on_image: bool,
    /// True if another node's record shows that this node no longer owns the disk
    /// ([`Controller::surpass`](godwit_core::Controller::surpass)).
    pub surpassed: bool,
    /// Most bytes per second that the disk's owner may pull, if this node owes a part of the disk.
    pub owed_bandwidth: Option<u64>,
}

/// The state of a disk that earlier processes stored.
#[derive(Debug, Default)]
pub struct Restored {
    /// Missing parts ([`crate::image::notes::missing::load`]). Required if the record has a remainder and this node serves the
    /// disk, or has accepted it.
    pub missing: Option<(Missing, MissingNotes)>,
    /// Blocks written since the disk arrived ([`crate::image::notes::written::take`]), if this node serves the disk.
    pub written: Option<Written>,
    /// Contents of the files in [`EngineConfig::compared`].
    pub compared: Option<[Written; 2]>,
    /// The activity log ([`crate::image::notes::activity::load`]), if this node serves the disk.
    pub activity: Option<ActiveAreas>,
}

impl EngineConfig {
    /// Returns the usual sizes: 1024 requests, 64 chunks, 160 MiB, 64 clients.
    pub const fn new(disk: String) -> Self {
        Self {
            disk,
            limits: Limits {
                requests: 1024,
                window_chunks: 64,
                delayed_chunks: 8,
                delayed_ranges: 1024,
                hot_places: 1024,
                area_sectors: AREA_SECTORS,
                active_areas: 256,
            },
            memory: Bytes(160 << 20),
            max_clients: 64,
            shared: false,
            pull_on_demand_only: false,
            written: None,
            compared: None,
            kept_in: None,
            longest_missing_wait: None,
            missing_pauses_after: None,
            on_image: false,
            surpassed: false,
            owed_bandwidth: None,
        }
    }
}

/// The missing parts of a disk: see [`godwit_core::Missing`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingSnapshot {
    /// Migration whose source has the missing parts.
    pub migration: MigrationId,
    /// Pieces that have changed.
    pub pieces: Vec<WordPiece>,
    /// First state, while the disk arrives: nothing was stored before.
    pub first: Option<FirstMissing>,
}

/// The part of the missing state that is stored on arrival and never changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstMissing {
    /// Heat of each chunk.
    pub heat: Vec<HeatPiece>,
    /// Blocks at the source, if the rest is in an image.
    pub at_source: Option<Vec<WordPiece>>,
}

/// An event for the engine's owner. The `events` callback gets events on the engine's thread, which serves no I/O until
/// the callback returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// An event of the controller.
    Core(Event),
    /// Store this record durably for the disk, then call
    /// [`EngineHandle::persisted`](crate::engine::EngineHandle::persisted).
    Persist(AuthorityRecord),
    /// Clients of this node need the disk's owner, and no connection to the owner is up. Dial the owner and call
    /// [`EngineHandle::forward`](crate::engine::EngineHandle::forward), or
    /// [`EngineHandle::fail_forwarded`](crate::engine::EngineHandle::fail_forwarded) if hopeless. Not repeated before
    /// one of these calls.
    ForwardDown,
    /// A client attached or left; the number attached now.
    Clients(u32),
    /// True if requests of the virtual machine wait for room in the image, false once none does. The former is repeated
    /// about every second while it holds and the machine's rings are served.
    /// [`EngineHandle::machine_stands_still`](crate::engine::EngineHandle::machine_stands_still) lets the machine be
    /// stopped meanwhile.
    OutOfSpace(bool),
    /// A virtual machine uses the disk, and a request has waited for a missing part as long as
    /// [`EngineConfig::missing_pauses_after`]. The machine can be stopped
    /// ([`EngineHandle::machine_stands_still`](crate::engine::EngineHandle::machine_stands_still)) until
    /// [`Snapshot::waits_long`](crate::engine::Snapshot::waits_long) turns false. Repeated every second.
    WaitsLong,
    /// Store durably the missing parts of the disk ([`crate::image::notes::missing`]), then call
    /// [`EngineHandle::missing_stored`](crate::engine::EngineHandle::missing_stored). The stored state can be removed
    /// at [`Event::Whole`] or [`Event::ReceiveAborted`].
    StoreMissing(MissingSnapshot),
    /// Store this activity log durably, or remove the stored one ([`crate::image::notes::activity`]), then call
    /// [`EngineHandle::activity_stored`](crate::engine::EngineHandle::activity_stored).
    StoreActivity(Option<ActiveAreas>),
    /// This node owes a part of the disk to its owner, and no connection to the owner is up. Dial the owner and call
    /// [`EngineHandle::pull`](crate::engine::EngineHandle::pull). Implied by [`Event::Owes`], and not sent when the
    /// engine starts with such a record.
    PullDown,
    /// Replaces [`Event::BecameBase`]: this node's image is the disk as it left by this migration, while the image has
    /// this fingerprint.
    BecameBase {
        /// Migration by which the disk left.
        migration: MigrationId,
        /// Fingerprint, taken before the image could change.
        fingerprint: Fingerprint,
    },
    /// The engine has ended because of a failure.
    Failed(String),
}

/// The reason for a failed start or end of an engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The kernel refused a resource.
    #[error("disk {disk}: cannot {action}")]
    Start {
        /// Name of the disk.
        disk: String,
        /// Action that failed.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The engine failed while it ran.
    #[error("disk {disk}: the thread that serves it failed: {cause}")]
    Failed {
        /// Name of the disk.
        disk: String,
        /// Cause of the failure.
        cause: String,
    },
    /// The last writes could not be made durable at the engine's end.
    #[error("disk {disk}: cannot flush the image")]
    Flush {
        /// Name of the disk.
        disk: String,
        /// The kernel's answer.
        source: io::Error,
    },
}
