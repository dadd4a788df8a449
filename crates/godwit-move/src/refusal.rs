//! Reasons for a move that does not go on.

use serde::{Deserialize, Serialize};

/// The kind of a refusal, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// An operator cancelled the move.
    Cancelled,
    /// A node ended or restarted during the move.
    Interrupted,
    /// The subject, or a node, does not allow the step.
    Refused,
    /// A node is unreachable or silent.
    Unreachable,
    /// The subject has ended.
    Ended,
    /// The state of the move cannot be stored.
    NotStored,
}

/// A reason for a move that does not go on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Refusal {
    /// The kind.
    pub kind: Kind,
    /// One sentence or more, without a final dot.
    pub what: String,
    /// Advice for an operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Refusal {
    /// Returns a refusal without a hint.
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            hint: None,
        }
    }

    /// Returns this refusal as a consequence of an earlier one.
    pub(crate) fn after(mut self, first: Option<Self>) -> Self {
        if let Some(first) = first {
            self.what = format!("{}; {}", first.what, self.what);
        }
        self
    }
}
