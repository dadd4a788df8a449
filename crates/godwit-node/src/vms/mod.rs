//! Virtual machines: runs QEMU on this node's disks, or takes over a running QEMU.

mod control;
mod incoming;
pub(crate) mod lifecycle;
pub(crate) mod memory;
mod messages;
mod nics;
pub(crate) mod outgoing;
pub(crate) mod stream_keeper;
pub(crate) mod tunnel;
pub(crate) mod view;
pub(crate) mod vm;

pub(crate) use incoming::take_machine;
pub(crate) use lifecycle::{adopt, forget, resume, run, stop};
pub(crate) use outgoing::{cancel, migrate, switch};
pub(crate) use vm::Vms;
