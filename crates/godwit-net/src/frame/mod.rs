//! What Ethernet frames say, and those that announce where a machine is.

pub mod announce;
pub mod packet;
pub mod vlan;
