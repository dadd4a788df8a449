//! How many files, sockets and the like the node may have open: about five for each disk, more while
//! it moves, and one for each client.

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
