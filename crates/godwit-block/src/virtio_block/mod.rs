//! virtio-blk: the requests of a guest's disk driver, and the facts of the disk for the guest.
//!
//! Nothing from the guest is trusted: [`request`] has the possible contents of a request.

pub(crate) mod config_space;
pub mod request;
