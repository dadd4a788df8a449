//! The listeners for clients of disks and for other nodes.

pub(crate) mod handshake_slots;
pub(crate) mod nbd;
pub(crate) mod peers;

use std::io;
use std::time::Duration;

use godwit_api::advice;

/// Logs that a listener could not accept a connection, and pauses briefly. Usually no file descriptors are left, and
/// some must be closed first.
pub(crate) async fn cannot_take(whom: &str, error: &io::Error) {
    match advice(&error.to_string()) {
        Some(advice) => tracing::warn!(%error, "cannot take {whom}: {advice}"),
        None => tracing::warn!(%error, "cannot take {whom}"),
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
}
