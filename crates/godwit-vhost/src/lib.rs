//! vhost-user: devices of a virtual machine without a copy in between.
//!
//! QEMU connects to a device's socket, shares the guest's memory, and says where the rings of the
//! guest's driver are. A thread of this crate speaks that protocol for any [`device::Device`]; the
//! rings themselves are served on the device's own thread.
//!
//! ```text
//!  QEMU ── socket ──► protocol thread ── commands ──►┌───────────────┐
//!   │                                                │ device thread │
//!  guest ◄──────── rings, data in guest memory ─────►└───────────────┘
//! ```
//!
//! Nothing that the guest or the front end says is believed: see [`chain`] for what a guest can
//! send. Linux 5.13 is needed.

pub mod chain;
pub mod device;
pub mod dirty_log;
pub mod features;
pub mod guest_memory;
pub mod inflight;
pub mod ring;
pub mod session;

mod peer_memory;
mod post_copy;
mod protocol;
mod server;
mod userfault;

pub use post_copy::may_wait_for_pages;
pub use server::{VhostUserServer, serve};
