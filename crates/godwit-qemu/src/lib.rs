//! QEMU as a program that somebody else runs: its command line, its process, its monitor, its own migration. It
//! knows nothing of nodes, peers and disks beyond the sockets that a command line names.

pub mod cards;
pub mod debugger;
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
