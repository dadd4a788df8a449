//! Failures of commands: a message for the user, a remedy, and an exit code.

use std::fmt;

use godwit_api::{ErrorBody, ErrorCode};

/// Exit code after a refusal or failure.
pub(crate) const EXIT_FAILED: u8 = 1;
/// Exit code after an invalid command line.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit code if the node cannot be reached, or its answer cannot be understood.
pub(crate) const EXIT_UNREACHABLE: u8 = 3;
/// Exit code if a migration began and ended without moving anything.
pub(crate) const EXIT_NOT_MOVED: u8 = 4;
/// Exit code after Ctrl-C, as in shells.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

/// Meaning of each exit code.
pub(crate) const EXIT_CODES: [(u8, &str); 6] = [
    (0, "done"),
    (EXIT_FAILED, "refused or failed"),
    (EXIT_USAGE, "wrong command line"),
    (EXIT_UNREACHABLE, "no answer from the node"),
    (EXIT_NOT_MOVED, "the migration began and moved nothing"),
    (EXIT_INTERRUPTED, "Ctrl-C"),
];

/// The failure of a command.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The attempt and the reason of the failure, in one line.
    pub message: String,
    /// A remedy, if there is one.
    pub hint: Option<String>,
    /// Exit code of the process.
    pub exit: u8,
    /// Error code of the API, for `--json`.
    pub code: Option<ErrorCode>,
}

impl Failure {
    /// Builds a failure without a hint.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            hint: None,
            exit: EXIT_FAILED,
            code: None,
        }
    }

    /// Builds the failure of a lookup.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self {
            code: Some(ErrorCode::NotFound),
            ..Self::new(message)
        }
    }

    /// Builds the failure of an invalid command line.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self {
            exit: EXIT_USAGE,
            ..Self::new(message)
        }
    }

    /// Builds a failure whose message includes the chain of causes.
    pub(crate) fn caused(message: impl Into<String>, cause: &dyn std::error::Error) -> Self {
        let mut message = message.into();
        let mut next = Some(cause);
        while let Some(error) = next {
            message.push_str(": ");
            message.push_str(&error.to_string());
            next = error.source();
        }
        Self::new(message)
    }

    /// Sets the hint.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Sets the exit code.
    #[must_use]
    pub(crate) const fn exit(mut self, code: u8) -> Self {
        self.exit = code;
        self
    }

    /// Sets the exit code for a missing answer of the node.
    #[must_use]
    pub(crate) const fn unreachable(self) -> Self {
        self.exit(EXIT_UNREACHABLE)
    }

    /// Returns the failure as an error of the API.
    pub(crate) fn to_body(&self) -> ErrorBody {
        let code = match self.exit {
            EXIT_INTERRUPTED => ErrorCode::Interrupted,
            EXIT_UNREACHABLE => ErrorCode::Unreachable,
            EXIT_USAGE => self.code.unwrap_or(ErrorCode::Invalid),
            _ => self.code.unwrap_or(ErrorCode::Internal),
        };
        ErrorBody {
            code,
            message: self.message.clone(),
            hint: self.hint.clone(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl From<ErrorBody> for Failure {
    fn from(body: ErrorBody) -> Self {
        let hint = body
            .hint
            .or_else(|| default_hint(body.code).map(str::to_owned));
        Self {
            message: body.message,
            hint,
            exit: EXIT_FAILED,
            code: Some(body.code),
        }
    }
}

/// Returns the hint for an error that came without one.
const fn default_hint(code: ErrorCode) -> Option<&'static str> {
    match code {
        ErrorCode::Exists => Some("choose another name, or remove the disk: godwit disk rm NAME"),
        ErrorCode::UnknownPeer => {
            Some("see which peers the node was started with: godwit peer list")
        }
        ErrorCode::PeerUnreachable => {
            Some("is the other node running? See how it answers: godwit peer list")
        }
        ErrorCode::PeerIdentity => Some(
            "both nodes' certificates must come from the same authority, be valid today and bear \
             the nodes' names: godwit certs issue NAME",
        ),
        ErrorCode::PeerVersion => Some("upgrade the older of the two nodes"),
        ErrorCode::NoSpace => Some("free space, or choose a node that has it"),
        ErrorCode::Busy => Some("try again in a moment"),
        ErrorCode::ShuttingDown => Some("start the node again, then retry"),
        ErrorCode::Internal => Some("the node's log says more"),
        ErrorCode::Forbidden => {
            Some("the node does not say which certificate does: ask who runs it")
        }
        ErrorCode::Invalid
        | ErrorCode::NotFound
        | ErrorCode::Conflict
        | ErrorCode::PeerRefused
        | ErrorCode::Unreachable
        | ErrorCode::Interrupted => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_own_hint_wins_over_the_general_one() {
        let own = ErrorBody::new(ErrorCode::UnknownPeer, "no peer 'x'").hint("did you mean 'y'?");
        assert_eq!(
            Failure::from(own).to_string(),
            "error: no peer 'x'\nhint: did you mean 'y'?"
        );
        let bare = ErrorBody::new(ErrorCode::UnknownPeer, "no peer 'x'");
        let shown = Failure::from(bare).to_string();
        assert!(
            shown.contains("hint: ") && shown.contains("godwit peer list"),
            "{shown}"
        );
    }

    #[test]
    fn causes_are_told_in_order() {
        let cause = std::io::Error::other("inner");
        assert_eq!(
            Failure::caused("cannot open a", &cause).message,
            "cannot open a: inner"
        );
    }

    #[test]
    fn a_wrong_command_line_is_told_apart_by_its_exit_code() {
        assert_eq!(Failure::usage("x").exit, 2);
        assert_eq!(Failure::usage("x").to_body().code, ErrorCode::Invalid);
        assert_eq!(Failure::new("x").exit, 1);
    }

    #[test]
    fn programs_learn_that_nobody_answered_or_somebody_interrupted() {
        let code = |failure: Failure| failure.to_body().code;
        assert_eq!(code(Failure::new("x")), ErrorCode::Internal);
        assert_eq!(
            code(Failure::new("x").unreachable()),
            ErrorCode::Unreachable
        );
        let cancelled = ErrorBody::new(ErrorCode::Conflict, "it was cancelled");
        let cancelled = Failure::from(cancelled).exit(EXIT_INTERRUPTED);
        assert_eq!(code(cancelled), ErrorCode::Interrupted);
    }

    #[test]
    fn every_exit_code_is_documented() {
        let documents = include_str!("../../../docs/reference/exit-codes.md");
        let (_, table) = documents.split_once("| exit code |").expect("a table");
        let rows = table
            .lines()
            .skip(2)
            .take_while(|line| line.starts_with("| "));
        let documented: Vec<u8> = rows
            .filter_map(|row| row.split('|').nth(1)?.trim().parse().ok())
            .collect();
        assert_eq!(documented, EXIT_CODES.map(|(code, _)| code));
    }
}
