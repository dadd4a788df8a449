//! Ethernet frames: their fields, and the announcements of a VM's location.

pub mod announce;
pub mod packet;
pub mod vlan;
