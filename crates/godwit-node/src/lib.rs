//! The Godwit daemon: serves disks, moves them to and from other nodes, and answers an API.

pub mod api;
mod daemon;
mod listeners;
mod logging;
mod metrics;
mod node;
mod owners;

pub use daemon::run::run;
pub use godwit_context::config::{
    AfterReadWait, ImagesConfig, IncomingLimits, MemoryPoolConfig, NodeConfig, PoolConfig,
    ProcessesConfig,
};
pub use godwit_context::fencing::words as fence_words;
pub use godwit_context::node_error::NodeError;
pub use godwit_core::GovernorParts;
pub use godwit_machines::vms::stream_keeper::{KEEP_STREAM, keep_stream};
pub use godwit_peers::certificates;
pub use godwit_peers::config::{PeerConfig, TlsFiles};
pub use godwit_peers::roles::Role;
pub use godwit_qemu::QemuUser;
pub use logging::{LogFormat, init_logging};
