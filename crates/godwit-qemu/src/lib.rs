//! QEMU as an external program: command line, process, monitor, and QEMU's own migration. This crate knows nothing of
//! nodes, peers and disks beyond the sockets on a command line.

pub mod cards;
pub mod debugger;
pub mod held_cards;
pub mod inspect;
pub mod kvm;
pub mod mac;
pub mod machine;
pub mod migration;
pub mod monitor;
pub mod plugged;
pub mod process;
mod user;
pub mod version;

pub use user::QemuUser;
