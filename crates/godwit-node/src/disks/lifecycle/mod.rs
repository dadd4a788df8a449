//! The life of a disk on this node: created or claimed, resized, served, retired after a move, removed.

pub(crate) mod abandon;
pub(crate) mod claim;
pub(crate) mod create;
pub(crate) mod lacking;
pub(crate) mod older_copy;
pub(crate) mod remove;
pub(crate) mod resize;
pub(crate) mod retire;
pub(crate) mod run;
