//! The NIC of a virtual machine that moves with it, after the replicable NIC of the ReNIC paper (section 3): a
//! vhost-user-net device that a node serves.
//!
//! ```text
//!  guest ◄── rings ──► device thread ◄── packets ──► uplink (a tap)
//!                          │ asks
//!                     state::Nic: modes, tails, held packets, addresses, counters; no I/O
//! ```
//!
//! - [`frame`]: what Ethernet frames say, and those that announce a machine's new place
//! - [`state`]: every decision, without I/O, clock or thread
//! - [`clone`]: the whole state as bytes, which a hostile peer may have made
//! - [`device`]: the thread, the rings and the tap around the state

pub mod clone;
pub mod device;
pub mod frame;
pub mod mac;
pub mod state;
