//! The virtual machines of a node, their moves, and their NICs.

pub mod nics;
pub mod protect;
pub mod vms;
