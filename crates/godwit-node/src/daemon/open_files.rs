//! How many files, sockets and the like the node may have open: about five for each disk, more while
//! it moves, and one for each client.

use std::io;
use std::time::Duration;

use godwit_api::advice;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Takes as many as the system allows: usually it gives a process 1024 until it asks for more.
pub(crate) fn raise_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => tracing::debug!(
            from = current,
            to = maximum,
            "raised the limit of open files"
        ),
        Err(error) => {
            tracing::warn!(limit = current, %error, "cannot raise the limit of open files")
        }
    }
}

/// Says that a listener could not take a connection, and waits for a moment: usually no file
/// descriptors are left, and others must close some first.
pub(crate) async fn cannot_take(whom: &str, error: &io::Error) {
    match advice(&error.to_string()) {
        Some(advice) => tracing::warn!(%error, "cannot take {whom}: {advice}"),
        None => tracing::warn!(%error, "cannot take {whom}"),
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
}
