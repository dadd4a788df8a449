//! The witness of a protected machine: a third node, etcd, or a command that fences. A witness stores one grant for each
//! protection and changes the grant by compare-and-swap alone.

mod command;
mod etcd;
mod fence;
mod messages;
mod node;
pub mod serve;
pub mod spec;

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::Context;
use godwit_core::units::ProtectionId;
use godwit_protect::{Ask, Grant, Member};
use serde::{Deserialize, Serialize};

use self::etcd::EtcdWitness;
use self::fence::FenceWitness;
use self::node::NodeWitness;
use self::spec::WitnessSpec;

/// A protection, as its witness knows the protection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protection {
    /// The id, chosen at random by [`godwit_context::ids::random_id`].
    pub id: ProtectionId,
    /// The names of [`Member::First`] and [`Member::Second`].
    pub nodes: [String; 2],
}

impl Protection {
    /// Returns the part of a node and the name of the other node.
    fn role_of(&self, node: &str) -> Result<(Member, &str), WitnessError> {
        match &self.nodes {
            [first, second] if first == node => Ok((Member::First, second)),
            [first, second] if second == node => Ok((Member::Second, first)),
            [first, second] => Err(WitnessError::Unusable(format!(
                "node '{node}' has no part in the protection by '{first}' and '{second}'"
            ))),
        }
    }
}

/// A change of a grant; `None` where the witness has no grant before or afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The grant to replace.
    pub expected: Option<Grant>,
    /// The grant to be stored.
    pub wanted: Option<Grant>,
}

impl Change {
    /// The change that begins a protection.
    pub const BEGIN: Self = Self {
        expected: None,
        wanted: Some(Grant::FIRST),
    };

    /// Returns the change that ends a protection. Only an unpaired grant may end: the other node could take the machine
    /// otherwise.
    pub const fn end(grant: Grant) -> Self {
        Self {
            expected: Some(grant),
            wanted: None,
        }
    }

    /// Returns true if the change begins a protection, ends one, or begins the next term.
    fn is_possible(&self) -> bool {
        match (self.expected, self.wanted) {
            (None, wanted) => wanted == Some(Grant::FIRST),
            (Some(expected), None) => !expected.paired,
            (Some(expected), Some(wanted)) => expected.term.0.checked_add(1) == Some(wanted.term.0),
        }
    }

    /// Returns true if the change lets this node run the machine without the other node.
    fn goes_alone(&self, node: Member) -> bool {
        let goes = |wanted: Grant| wanted.owner == node && !wanted.paired;
        self.expected.is_some() && self.wanted.is_some_and(goes)
    }

    /// Refuses an impossible change before any witness is asked.
    fn check(&self) -> Result<(), WitnessError> {
        match self.is_possible() {
            true => Ok(()),
            false => Err(WitnessError::Unusable(format!(
                "a grant cannot become {:?} after {:?}",
                self.wanted, self.expected
            ))),
        }
    }

    /// Returns the grant after this change.
    fn apply(&self, present: Option<Grant>) -> Option<Grant> {
        match present == self.expected {
            true => self.wanted,
            false => present,
        }
    }

    /// Returns the outcome by the grant afterwards.
    fn outcome(&self, afterwards: Option<Grant>) -> Swap {
        match afterwards == self.wanted {
            true => Swap::Done,
            false => Swap::Stands(afterwards),
        }
    }
}

/// The outcome of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swap {
    /// The wanted grant stands, by this request or by an earlier one without an answer.
    Done,
    /// Another grant stands, and nothing was changed.
    Stands(Option<Grant>),
}

/// The reason why a witness gave no answer. None of the reasons is a refusal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WitnessError {
    /// The change may have been made, or may still be made: the caller reads the grant again.
    #[error("it is unknown if the grant was changed: {0}")]
    Unknown(String),
    /// Nothing was changed, and a later request may succeed.
    #[error("{0}")]
    Unreachable(String),
    /// Nothing was changed, and the same request fails again until an operator changes something.
    #[error("{0}")]
    Unusable(String),
}

/// The answer of a witness, within a bounded time.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, WitnessError>>;

/// Stores a grant for each protection.
pub trait Witness: fmt::Debug + Send + Sync {
    /// Returns the present grant, or `None` if the protection has not begun, has ended, or the witness lost its data. No
    /// node may go on without a grant.
    fn grant<'a>(&'a self, of: &'a Protection) -> Answer<'a, Option<Grant>>;

    /// Replaces a grant by compare-and-swap, durably before the answer.
    fn swap<'a>(&'a self, of: &'a Protection, change: Change) -> Answer<'a, Swap>;
}

/// Returns the grant after a node's request, as [`godwit_protect::Order::Ask`] needs the grant.
///
/// # Errors
/// The witness gave no answer or has no grant.
pub async fn answer(
    witness: &dyn Witness,
    of: &Protection,
    ask: &Ask,
) -> Result<Grant, WitnessError> {
    let afterwards = if ask.expected == ask.wanted {
        witness.grant(of).await?
    } else {
        let change = Change {
            expected: Some(ask.expected),
            wanted: Some(ask.wanted),
        };
        match witness.swap(of, change).await? {
            Swap::Done => Some(ask.wanted),
            Swap::Stands(grant) => grant,
        }
    };
    afterwards.ok_or_else(|| {
        let [first, second] = &of.nodes;
        WitnessError::Unusable(format!(
            "the witness has no grant of the protection by '{first}' and '{second}': the protection has ended, or the \
             witness lost its data"
        ))
    })
}

/// Returns the witness of a spec. Asks nobody yet.
///
/// # Errors
/// The node knows no such peer, or the options for etcd cannot be used.
pub fn connect(spec: &WitnessSpec, context: &Arc<Context>) -> Result<Arc<dyn Witness>, ErrorBody> {
    let context = Arc::clone(context);
    Ok(match spec {
        WitnessSpec::Node(name) => Arc::new(NodeWitness::new(context, name)?),
        WitnessSpec::Etcd { endpoints, prefix } => {
            let options = context.config.etcd_options.as_deref();
            let witness = EtcdWitness::new(endpoints, prefix, options);
            let unusable = |why| ErrorBody::new(ErrorCode::Invalid, why);
            Arc::new(witness.map_err(unusable)?)
        }
        WitnessSpec::Fence => {
            let node = &context.config.name;
            let unusable = |why| ErrorBody::new(ErrorCode::Invalid, why);
            let Some(command) = &context.config.fence_with else {
                let why = format!("node '{node}' has no command that fences");
                return Err(unusable(why).hint("start both nodes with --fence-with 'COMMAND'"));
            };
            let words = godwit_context::fencing::words(command);
            let words =
                words.map_err(|why| unusable(format!("--fence-with of node '{node}': {why}")))?;
            Arc::new(FenceWitness::new(context, words))
        }
    })
}
