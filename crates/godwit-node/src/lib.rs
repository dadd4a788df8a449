//! The Godwit daemon: serves disks, moves them to and from other nodes, and answers an API.

pub mod api;
pub mod certificates;
mod config;
mod node;

pub use config::{NodeConfig, PeerConfig, TlsFiles};
pub use node::{NodeError, run};
