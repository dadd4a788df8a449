//! The life of a disk on this node: created or claimed, resized, served, retired after a move, removed.

pub mod abandon;
pub mod claim;
pub mod create;
pub mod lacking;
pub mod older_copy;
pub mod remove;
pub mod resize;
pub mod retire;
pub mod run;
