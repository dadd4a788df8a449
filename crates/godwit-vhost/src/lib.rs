//! vhost-user: devices of a virtual machine without a copy in between.
//!
//! QEMU connects to a device's socket, shares the guest's memory, and names the addresses of the driver's rings. A
//! thread of this crate speaks the protocol for any [`protocol::device::Device`]; the device's own thread serves the
//! rings.
//!
//! ```text
//!  QEMU ── socket ──► protocol thread ── commands ──►┌───────────────┐
//!   │                                                │ device thread │
//!  guest ◄──────── rings, data in guest memory ─────►└───────────────┘
//! ```
//!
//! Nothing from the guest or the front end is trusted: [`rings::chain`] has the possible contents of a request. Needs
//! Linux 5.13.

pub mod features;
pub mod memory;
pub mod protocol;
pub mod rings;

pub use memory::post_copy::may_wait_for_pages;
pub use protocol::server::{VhostUserServer, serve};
