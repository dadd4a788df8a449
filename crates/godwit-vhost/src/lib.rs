//! vhost-user: devices of a virtual machine without a copy in between.
//!
//! QEMU connects to a device's socket, shares the guest's memory, and says where the rings of the
//! guest's driver are. A thread of this crate speaks that protocol for any [`protocol::device::Device`]; the
//! rings themselves are served on the device's own thread.
//!
//! ```text
//!  QEMU ── socket ──► protocol thread ── commands ──►┌───────────────┐
//!   │                                                │ device thread │
//!  guest ◄──────── rings, data in guest memory ─────►└───────────────┘
//! ```
//!
//! Nothing that the guest or the front end says is believed: see [`rings::chain`] for what a guest can
//! send. Linux 5.13 is needed.

pub mod features;
pub mod memory;
pub mod protocol;
pub mod rings;

pub use memory::post_copy::may_wait_for_pages;
pub use protocol::server::{VhostUserServer, serve};
