//! The limit of open files and sockets. A node needs about five for each disk, more during a move, and one for each
//! client.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit to the system's maximum: a process usually starts with 1024.
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
