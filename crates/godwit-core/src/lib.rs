//! The migration controller: decides the next step for every guest I/O and every background operation.
//!
//! The controller is a pure state machine. Inputs are [`Controller`]'s `handle_*` calls, which carry the time; outputs
//! are drained with [`Controller::poll_action`]. The controller performs no I/O, reads no clock, starts no thread and
//! draws no randomness. Guest data never passes through it: only extents, tags and buffer handles do. The engine drives
//! the controller against real disks and sockets.

#![forbid(unsafe_code)]

pub mod action;
pub mod authority;
pub mod auto;
mod controller;
pub mod event;
mod planted;
pub mod request;
pub mod sla;
pub mod units;
pub mod wire;
mod write_table;

pub use controller::policy::*;
pub use controller::{
    AREA_SECTORS, ActiveAreas, Admission, Arrivals, ChangeError, Compared, Controller, DeltaBy,
    DeltaProgress, GovernorParts, GuestLoad, HOLE_PIECE_SECTORS, HeatPiece, ImageOffer, Limits,
    LinkSignal, MAX_AREAS, MAX_MOVED, MAX_PULLED, MAX_VERIFIED, MigrationChange, MigrationOptions,
    Missing, OlderCopy, PIECE_HEATS, PIECE_WORDS, Progress, PromiseProgress, StartError,
    Switchover, UnknownPart, WordPiece, Written,
};
#[cfg(feature = "planted-bugs")]
pub use planted::PlantedBug;
