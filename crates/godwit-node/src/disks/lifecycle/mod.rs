//! A disk on this node: made or claimed, made larger, served, retired when it has left, removed.

pub(crate) mod abandon;
pub(crate) mod claim;
pub(crate) mod create;
pub(crate) mod lacking;
pub(crate) mod older_copy;
pub(crate) mod remove;
pub(crate) mod resize;
pub(crate) mod retire;
pub(crate) mod run;
