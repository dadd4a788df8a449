//! Where clients of disks and other nodes connect.

pub(crate) mod handshake_slots;
pub(crate) mod nbd;
pub(crate) mod peers;

use std::io;
use std::time::Duration;

use godwit_api::advice;

/// Says that a listener could not take a connection, and waits for a moment: usually no file
/// descriptors are left, and others must close some first.
pub(crate) async fn cannot_take(whom: &str, error: &io::Error) {
    match advice(&error.to_string()) {
        Some(advice) => tracing::warn!(%error, "cannot take {whom}: {advice}"),
        None => tracing::warn!(%error, "cannot take {whom}"),
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
}
