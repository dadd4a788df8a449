//! A node and those that it knows.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;

/// The node itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Node {
    /// Its name, as in its certificate.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// The newest node-to-node protocol it speaks.
    pub protocol_version: u16,
    /// Where it takes connections of other nodes: `HOST:PORT`.
    pub peer_listen: String,
    /// Where its data is.
    pub data_dir: String,
    /// When it started (RFC 3339).
    #[schema(format = DateTime)]
    pub started_at: String,
    /// CPU time that the process has used so far, in seconds.
    pub cpu_seconds: f64,
}

/// Another node of this node's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Peer {
    /// Its name, as in its certificate.
    pub name: String,
    /// Where it takes connections: `HOST:PORT`.
    pub address: String,
    /// Whether it answered just now.
    pub reachable: bool,
    /// The protocol version that both would speak.
    pub protocol_version: Option<u16>,
    /// Whether what is in disks and memory travels encrypted between both; unknown when it did not
    /// answer.
    #[serde(default)]
    pub data_encrypted: Option<bool>,
    /// Whether disks may be compressed on the way between both; unknown when it did not answer.
    #[serde(default)]
    pub compression: Option<bool>,
    /// Why it did not answer.
    pub error: Option<ErrorBody>,
}
