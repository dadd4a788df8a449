//! vhost-user-blk: a virtual machine's disk without a copy in between.
//!
//! QEMU connects to a disk's socket, shares the guest's memory, and says where the rings of the
//! guest's virtio-blk driver are. A thread of this module speaks that protocol; the rings
//! themselves are served on the engine's own thread, and their requests enter the controller as
//! those of any other client do.
//!
//! ```text
//!  QEMU ── socket ──► protocol thread ── commands ──►┌───────────────┐
//!   │                                                │ engine thread │──► image
//!  guest ◄──────── rings, data in guest memory ─────►└───────────────┘
//! ```
//!
//! Nothing that the guest or the front end says is believed: see [`request`] for what a guest can
//! send. Linux 5.13 is needed.

pub(crate) mod config_space;
pub(crate) mod dirty_log;
pub(crate) mod inflight;
pub(crate) mod memory;
mod peer_memory;
pub(crate) mod post_copy;
mod protocol;
pub mod request;
pub(crate) mod ring;
mod server;
pub(crate) mod session;
mod userfault;

pub use memory::Segment;
pub use post_copy::may_wait_for_pages;
pub use server::{VhostUserServer, serve};
