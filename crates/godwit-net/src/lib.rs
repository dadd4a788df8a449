//! A VM's NIC that moves with the VM, after the replicable NIC of the ReNIC paper (section 3): a vhost-user-net device
//! on a node.
//!
//! ```text
//!  guest ◄── rings ──► device thread ◄── packets ──► uplink (a tap)
//!                          │ asks
//!                     state::Nic: modes, tails, held packets, addresses, counters; no I/O
//! ```
//!
//! - [`frame`]: Ethernet frames, and the announcements of a VM's location
//! - [`state`]: every decision, without I/O, clock or thread
//! - [`clone`]: the complete state as bytes, which may come from a hostile peer
//! - [`device`]: the thread, the rings and the tap around the state

pub mod clone;
pub mod device;
pub mod frame;
pub mod mac;
pub mod state;
