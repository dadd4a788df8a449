//! A node and its peers.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;

/// A node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Node {
    /// Name of the node, as in its certificate.
    pub name: String,
    /// Version of the program.
    pub version: String,
    /// Newest node-to-node protocol version that the node speaks.
    pub protocol_version: u16,
    /// Address for connections of other nodes: `HOST:PORT`.
    pub peer_listen: String,
    /// Path of the data directory.
    pub data_dir: String,
    /// Time of the node's start (RFC 3339).
    #[schema(format = DateTime)]
    pub started_at: String,
    /// CPU time used by the process so far, in seconds.
    pub cpu_seconds: f64,
}

/// A peer in this node's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// Name of the peer, as in its certificate.
    pub name: String,
    /// Address of the peer: `HOST:PORT`.
    pub address: String,
    /// True if the peer answered just now.
    pub reachable: bool,
    /// The protocol version that both nodes would speak.
    pub protocol_version: Option<u16>,
    /// True if disk and memory data travel encrypted between both nodes; absent if the peer did not answer.
    #[serde(default)]
    pub data_encrypted: Option<bool>,
    /// True if disk data may be compressed between both nodes; absent if the peer did not answer.
    #[serde(default)]
    pub compression: Option<bool>,
    /// The reason why the peer did not answer.
    pub error: Option<ErrorBody>,
}
