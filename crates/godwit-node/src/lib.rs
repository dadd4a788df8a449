//! The Godwit daemon: serves disks, moves them to and from other nodes, and answers an API.

pub mod api;
pub mod certificates;
mod clock;
mod config;
mod context;
mod daemon;
mod disks;
mod failpoint;
mod ids;
mod images;
mod listeners;
mod logging;
mod metrics;
mod migrations;
mod names;
mod nics;
mod node;
mod node_error;
mod owners;
mod peers;
mod processes;
mod roles;
mod store;
mod transport;
mod vms;

pub use config::{
    AfterReadWait, ImagesConfig, IncomingLimits, MemoryPoolConfig, NodeConfig, PeerConfig,
    PoolConfig, ProcessesConfig, TlsFiles,
};
pub use daemon::run::run;
pub use godwit_core::GovernorParts;
pub use godwit_qemu::QemuUser;
pub use logging::{LogFormat, init_logging};
pub use node_error::NodeError;
pub use roles::Role;
pub use vms::stream_keeper::{KEEP_STREAM, keep_stream};
