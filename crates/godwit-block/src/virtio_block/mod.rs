//! virtio-blk: what a guest's driver of a disk asks for, and what it is told of the disk.
//!
//! Nothing that the guest says is believed: see [`request`] for what it can send.

pub(crate) mod config_space;
pub mod request;
