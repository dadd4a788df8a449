//! The messages between the ends that concern the decision. The planes' own messages travel beside them.

use serde::{Deserialize, Serialize};

/// A message from the source's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Run the subject, and decide by that. Sent only where the destination decides.
    Run,
    /// Decide for good if the subject runs at your node. Sent only where the destination decides.
    Settle,
    /// The source's decision, unasked or on [`Answer::Ask`].
    Word(Word),
    /// Forget the move, which has ended.
    Over,
}

/// A message from the destination's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The subject runs here.
    Here,
    /// The subject does not run here and never will by this move.
    NotHere,
    /// The destination asks for the source's word.
    Ask,
}

/// The source's durable decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    /// The subject belongs to the destination.
    Given,
    /// The subject does not belong to the destination and never will by this move.
    Kept,
    /// The source has not decided.
    Undecided,
}
