//! What an engine is started with, what it tells its owner, and how it fails.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::image::Fingerprint;
use crate::image::missing::MissingNotes;
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::Event;
use godwit_core::units::{Bytes, MigrationId};
use godwit_core::{HeatPiece, Limits, Missing, WordPiece, Written};

/// How an engine is sized. All of it is fixed for the engine's life.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The disk's name, for errors and logs.
    pub disk: String,
    /// Sizes of the controller's tables. Requests are raised to at least 64.
    pub limits: Limits,
    /// Memory for the data of requests in flight, raised to at least 96 MiB so that the longest
    /// request fits in each of its parts. Address space, committed as it is used; a fifth at once
    /// when the disk arrives in a migration, until that is over. Beside it each client, and each node that
    /// forwards here, has 1 MiB of its own, and the guest's rings have 32 MiB.
    pub memory: Bytes,
    /// NBD clients attached at once. Each has a request of its own, as long as they are less than a
    /// quarter of [`Limits::requests`].
    pub max_clients: u32,
    /// Whether more than one party may have written to the disk since it came here, as
    /// [`Event::SharingChanged`] last said.
    pub shared: bool,
    /// Of what the disk lacks only what somebody waits for is pulled.
    pub pull_on_demand_only: bool,
    /// Where to store, when the engine ends in order, what was written since the disk came
    /// ([`crate::image::written`]).
    pub written: Option<PathBuf>,
    /// Where to store, when the engine ends in order, what is known to differ from the disk's image and what to be the same:
    /// as [`Self::written`], in two files.
    pub compared: Option<[PathBuf; 2]>,
    /// How long a request waits for a part of the disk that is not here, before it fails; for ever when `None`.
    pub longest_missing_wait: Option<Duration>,
    /// After how long such a wait of a virtual machine's it is to be stopped ([`EngineEvent::WaitsLong`]).
    pub missing_pauses_after: Option<Duration>,
    /// The disk was created from an image: if it has left and this node owes some of it, what is here may never have been
    /// all of it ([`Controller::is_no_base`](godwit_core::Controller::is_no_base)).
    pub on_image: bool,
    /// Another node's record shows that this node is the owner no more ([`Controller::surpass`](godwit_core::Controller::surpass)).
    pub surpassed: bool,
    /// The most bytes per second that the disk's owner may pull, if this node owes some of it.
    pub owed_bandwidth: Option<u64>,
}

/// What earlier processes stored of a disk.
#[derive(Debug, Default)]
pub struct Restored {
    /// What it lacks ([`crate::image::missing::load`]): to be given when the record has a remainder and this node
    /// serves the disk, or has accepted it.
    pub missing: Option<(Missing, MissingNotes)>,
    /// What was written since it came ([`crate::image::written::take`]), if this node serves it.
    pub written: Option<Written>,
    /// What [`EngineConfig::compared`] had.
    pub compared: Option<[Written; 2]>,
}

impl EngineConfig {
    /// The usual sizes: 1024 requests, 64 chunks, 160 MiB, 64 clients.
    pub const fn new(disk: String) -> Self {
        Self {
            disk,
            limits: Limits {
                requests: 1024,
                window_chunks: 64,
                delayed_chunks: 8,
                delayed_ranges: 1024,
                hot_places: 1024,
            },
            memory: Bytes(160 << 20),
            max_clients: 64,
            shared: false,
            pull_on_demand_only: false,
            written: None,
            compared: None,
            longest_missing_wait: None,
            missing_pauses_after: None,
            on_image: false,
            surpassed: false,
            owed_bandwidth: None,
        }
    }
}

/// What a disk lacks: see [`godwit_core::Missing`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingSnapshot {
    /// The migration whose source has what is missing.
    pub migration: MigrationId,
    /// The pieces that have changed.
    pub pieces: Vec<WordPiece>,
    /// The disk comes here: nothing was stored of it before.
    pub first: Option<FirstMissing>,
}

/// What is stored of what a disk lacks when it comes, and never changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstMissing {
    /// How hot each chunk is.
    pub heat: Vec<HeatPiece>,
    /// The blocks that are at that source, where the rest is in an image.
    pub at_source: Option<Vec<WordPiece>>,
}

/// What the engine tells its owner. Given to the `events` callback on the engine's thread, which
/// serves no I/O until the callback returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// The controller's events.
    Core(Event),
    /// Store this durably for the disk, then call
    /// [`EngineHandle::persisted`](crate::engine::EngineHandle::persisted).
    Persist(AuthorityRecord),
    /// Clients of this node need the disk's owner and no connection to it is up: dial it and call
    /// [`EngineHandle::forward`](crate::engine::EngineHandle::forward), or
    /// [`EngineHandle::fail_forwarded`](crate::engine::EngineHandle::fail_forwarded) when that is hopeless.
    /// Not repeated until one of them was called.
    ForwardDown,
    /// A client attached or left; the number attached now.
    Clients(u32),
    /// Requests of the virtual machine wait because the image has no room for them, or none does any
    /// more. The first is repeated about every second as long as it is so and the machine's rings are
    /// served. [`EngineHandle::machine_stands_still`](crate::engine::EngineHandle::machine_stands_still) lets
    /// the machine be stopped meanwhile.
    OutOfSpace(bool),
    /// A request waits for a part of the disk that is not here, for as long as [`EngineConfig::missing_pauses_after`], and
    /// a virtual machine uses the disk: it can be stopped
    /// ([`EngineHandle::machine_stands_still`](crate::engine::EngineHandle::machine_stands_still)) until
    /// [`Snapshot::waits_long`](crate::engine::Snapshot::waits_long) says that what it waits for is here. Said every second.
    WaitsLong,
    /// Store durably what the disk lacks ([`crate::image::missing`]), then call
    /// [`EngineHandle::missing_stored`](crate::engine::EngineHandle::missing_stored). Until
    /// [`Event::Whole`] or [`Event::ReceiveAborted`], when it can be removed.
    StoreMissing(MissingSnapshot),
    /// This node owes a part of the disk to its owner and no connection to that is up: dial it and call
    /// [`EngineHandle::pull`](crate::engine::EngineHandle::pull). Said with
    /// [`Event::Owes`] too, and not when the engine starts with a record that says so.
    PullDown,
    /// In place of [`Event::BecameBase`]: this node's image is what the disk was when it left by this migration, as
    /// long as the image has this fingerprint.
    BecameBase {
        /// Which migration.
        migration: MigrationId,
        /// Taken before anybody could write to the image.
        fingerprint: Fingerprint,
    },
    /// The engine has ended because of a failure that it cannot go on from.
    Failed(String),
}

/// Why an engine could not start, or how it ended.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The kernel refused a resource.
    #[error("disk {disk}: cannot {action}")]
    Start {
        /// The disk's name.
        disk: String,
        /// What was tried.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The engine failed while it ran.
    #[error("disk {disk}: the thread that serves it failed: {cause}")]
    Failed {
        /// The disk's name.
        disk: String,
        /// What happened.
        cause: String,
    },
    /// The last writes could not be made durable when the engine ended.
    #[error("disk {disk}: cannot flush the image")]
    Flush {
        /// The disk's name.
        disk: String,
        /// The kernel's answer.
        source: io::Error,
    },
}
