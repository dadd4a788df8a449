//! Errors of the API: a code, a message and a hint.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of an error, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request is invalid: a malformed body, name, size or option.
    Invalid,
    /// No such disk, migration, job or route.
    NotFound,
    /// A disk of that name exists.
    Exists,
    /// The disk's state does not allow the request: in use, migrating, in doubt, or elsewhere.
    Conflict,
    /// The peer is not in this node's configuration.
    UnknownPeer,
    /// The peer cannot be reached or does not answer.
    PeerUnreachable,
    /// The peer's certificate was not accepted here, or this node's certificate at the peer.
    PeerIdentity,
    /// This node and the peer share no protocol version.
    PeerVersion,
    /// The peer refused the request.
    PeerRefused,
    /// The caller's certificate does not allow the request.
    Forbidden,
    /// Not enough space.
    NoSpace,
    /// A limit is reached; try again later.
    Busy,
    /// The node is shutting down.
    ShuttingDown,
    /// An internal failure of the node.
    Internal,
    /// The node cannot be reached, or its answer cannot be understood. Used by the command only, never by a node.
    Unreachable,
    /// Ctrl-C ended the wait. Used by the command only, never by a node.
    Interrupted,
}

impl ErrorCode {
    /// Returns the HTTP status of the error.
    pub const fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::Exists | Self::Conflict => 409,
            Self::UnknownPeer => 422,
            Self::PeerUnreachable | Self::PeerIdentity | Self::PeerVersion | Self::PeerRefused => {
                502
            }
            Self::NoSpace => 507,
            Self::Busy | Self::ShuttingDown => 503,
            Self::Internal | Self::Unreachable | Self::Interrupted => 500,
        }
    }
}

/// The body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct ErrorBody {
    /// Kind of the error, for programs.
    pub code: ErrorCode,
    /// The attempt, with the disk or peer, and the reason of the failure.
    pub message: String,
    /// A remedy, if there is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hint: Option<String>,
}

impl ErrorBody {
    /// Builds an error. The only hint is the [`advice`] for its message, if any.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        let message = message.into();
        Self {
            code,
            hint: advice(&message).map(str::to_owned),
            message,
        }
    }

    /// Sets the hint. An error for lack of open files keeps its own hint, since no other remedy helps.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        if advice(&self.message).is_none() {
            self.hint = Some(hint.into());
        }
        self
    }
}

/// Returns the remedy for a message about too many open files, here or at another node.
pub fn advice(message: &str) -> Option<&'static str> {
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

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn errors_for_want_of_files_say_which_limit_to_raise() {
        let told = |errno| {
            let cause = io::Error::from_raw_os_error(errno);
            let error = ErrorBody::new(ErrorCode::Internal, format!("disk d: {cause}"));
            error.hint("see the node's log").hint.expect("a hint")
        };
        let (too_many_here, too_many_on_the_host, input_output) = (24, 23, 5);
        assert!(told(too_many_here).contains("LimitNOFILE"));
        assert!(told(too_many_on_the_host).contains("fs.file-max"));
        assert_eq!(told(input_output), "see the node's log");
    }
}
