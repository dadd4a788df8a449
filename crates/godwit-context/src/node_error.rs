//! The errors of a node's start.

/// The reason for a node that could not start.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The configuration contradicts itself or cannot be used.
    #[error("{0}")]
    Config(String),
    /// Another node runs on the data directory.
    #[error("another node runs on {path}: stop it first, or give this one its own --data-dir")]
    InUse {
        /// The data directory.
        path: String,
    },
    /// The data directory cannot be used.
    #[error("cannot {action} {path}")]
    DataDir {
        /// The attempted action.
        action: &'static str,
        /// The file or folder.
        path: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A listener cannot be opened.
    #[error("cannot listen for {what} on {address}")]
    Listen {
        /// The kind of client.
        what: &'static str,
        /// The address or path.
        address: String,
        /// The error of the system.
        source: std::io::Error,
    },
    /// The store cannot be opened or read.
    #[error("{0}")]
    Store(String),
}
