//! The virtual machines of a node, their moves, their NICs, and their protection.

pub mod nics;
pub mod protect;
pub mod vms;
