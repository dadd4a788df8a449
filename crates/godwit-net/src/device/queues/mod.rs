//! Packets through the guest's rings.

pub(super) mod features;
pub(super) mod receive;
pub(super) mod ring;
pub(super) mod transmit;
