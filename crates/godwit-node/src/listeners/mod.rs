//! Where clients of disks connect.

pub(crate) mod handshake_slots;
pub(crate) mod nbd;
