//! Messages of a connection about a grant: one question and its answer, in JSON.

use std::time::Duration;

use godwit_protect::Grant;
use serde::{Deserialize, Serialize};

use super::{Change, WitnessError};

/// Longest message in bytes.
pub(super) const LONGEST: u32 = 4096;
/// Time limit for a question, and for its answer.
pub(super) const WITHIN: Duration = Duration::from_secs(5);

/// A question about a grant. The protection's id stands in the hello.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Question {
    /// The two nodes of the protection.
    pub(super) nodes: [String; 2],
    pub(super) ask: Wish,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Wish {
    /// The present grant.
    Read,
    /// A compare-and-swap.
    Swap(Change),
    /// Both nodes of a protection without a third place are to store the newer one of both grants.
    Meet(Option<Grant>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    /// The grant afterwards, changed or not.
    Grant(Option<Grant>),
    /// Nothing was changed: the question is wrong.
    Refused(String),
    /// Nothing was changed: there is no answer now.
    Busy(String),
    /// The store failed, and the change may be durable.
    Unknown(String),
}

/// Returns the grant that both nodes of a protection store after a meeting. Of two grants of one term, the first node's
/// has no effect yet: the first node stores its own changes before it has the other node's agreement, and the second
/// node stores afterwards.
pub(super) fn merge(first: Option<Grant>, second: Option<Grant>) -> Option<Grant> {
    match (first, second) {
        (Some(one), Some(two)) if one.term > two.term => first,
        (Some(_), Some(_)) | (None, _) => second,
        (Some(_), None) => first,
    }
}

impl Reply {
    /// Returns the grant, if the reply has one.
    pub(super) fn into_grant(self) -> Result<Option<Grant>, WitnessError> {
        Err(match self {
            Self::Grant(grant) => return Ok(grant),
            Self::Refused(why) => WitnessError::Unusable(why),
            Self::Busy(why) => WitnessError::Unreachable(why),
            Self::Unknown(why) => WitnessError::Unknown(why),
        })
    }
}
