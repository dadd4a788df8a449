//! The users of the disk: NBD clients and the guests of virtual machines.

pub(super) mod hang_ups;
pub(super) mod nbd;
pub(super) mod vhost;
