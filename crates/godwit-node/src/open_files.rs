//! How many files, sockets and the like the node may have open: about five for each disk, more while
//! it moves, and one for each client.

use std::io;
use std::time::Duration;

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

/// What helps when a message says that too many files are open, here or at another node.
pub(crate) fn advice(message: &str) -> Option<&'static str> {
    if message.contains("(os error 24)") {
        Some(
            "the node may open no more files: raise LimitNOFILE of its unit, or the hard limit \
             (ulimit -Hn) where it is started",
        )
    } else if message.contains("(os error 23)") {
        Some("the host may open no more files: raise its fs.file-max (sysctl)")
    } else {
        None
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{ErrorBody, ErrorCode};

    #[test]
    fn errors_for_want_of_files_say_which_limit_to_raise() {
        let told = |errno: rustix::io::Errno| {
            let cause = io::Error::from(errno);
            let error = ErrorBody::new(ErrorCode::Internal, format!("disk d: {cause}"));
            error.hint("see the node's log").hint.expect("a hint")
        };
        assert!(told(rustix::io::Errno::MFILE).contains("LimitNOFILE"));
        assert!(told(rustix::io::Errno::NFILE).contains("fs.file-max"));
        assert_eq!(told(rustix::io::Errno::IO), "see the node's log");
    }
}
