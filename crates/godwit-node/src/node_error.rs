//! Why a node does not start.

/// Why a node could not start.
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
        /// What was tried.
        action: &'static str,
        /// On which file or folder.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A listener cannot be opened.
    #[error("cannot listen for {what} on {address}")]
    Listen {
        /// Who would connect there.
        what: &'static str,
        /// The address or path.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The store cannot be opened or read.
    #[error("{0}")]
    Store(String),
}
