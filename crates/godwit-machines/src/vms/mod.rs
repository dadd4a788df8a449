//! Virtual machines: runs QEMU on this node's disks, or takes over a running QEMU.

pub(crate) mod control;
pub(crate) mod incoming;
pub mod lifecycle;
pub mod memory;
pub(crate) mod messages;
mod nics;
pub mod outgoing;
pub mod stream_keeper;
pub mod tunnel;
pub mod view;
pub mod vm;

pub use incoming::take_machine;
pub use lifecycle::{adopt, forget, resume, run, stop};
pub use outgoing::{cancel, migrate, switch};
pub use vm::Vms;
