//! The configuration of connections between nodes.

use std::path::PathBuf;

/// The PEM files of a node's identity.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The node's certificate chain.
    pub certificate: PathBuf,
    /// The private key of the certificate.
    pub key: PathBuf,
    /// The authorities that every node's and client's certificate is checked against; several while one follows
    /// another.
    pub authority: PathBuf,
    /// The lists of revoked certificates.
    pub revoked: Option<PathBuf>,
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// The node's name, as in its certificate.
    pub name: String,
    /// The address for connections of nodes: `HOST:PORT`.
    pub address: String,
}
