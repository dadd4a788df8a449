//! The Godwit daemon: serves disks, moves them to and from other nodes, and answers an API.

pub mod api;
pub mod certificates;
mod clock;
mod config;
mod data_dir;
mod disks;
mod failpoint;
mod logging;
mod metrics;
mod migrations;
mod names;
mod nbd_listener;
mod node;
mod notify;
mod open_files;
mod peers;
mod recover;
mod roles;
mod run;
mod slots;
mod store;
mod transport;
mod vms;

pub use config::{NodeConfig, PeerConfig, PoolConfig, TlsFiles};
pub use godwit_qemu::QemuUser;
pub use logging::{LogFormat, init_logging};
pub use migrations::admission::IncomingLimits;
pub use roles::Role;
pub use run::{NodeError, run};
