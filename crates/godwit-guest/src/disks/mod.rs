//! The load on disks.

pub(crate) mod blocks;
pub(crate) mod files;
pub(crate) mod writers;
