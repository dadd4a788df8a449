//! The witness's record of a protected machine.

use serde::{Deserialize, Serialize};

use crate::Order;

/// Number of a grant. Each change of the grant begins the next term.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Term(pub u64);

/// One of the two nodes of a protection. The nodes keep their names when their roles change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Member {
    /// The node that ran the machine when the protection began.
    First,
    /// The other node.
    Second,
}

impl Member {
    /// Returns the other node.
    pub const fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}

/// The right to run a protected machine, as the witness stores the right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Grant {
    /// Number of this grant.
    pub term: Term,
    /// The node that may run the machine.
    pub owner: Member,
    /// True if the other node has every acknowledged write, and may take the machine.
    pub paired: bool,
}

impl Grant {
    /// The grant of a new protection.
    pub const FIRST: Self = Self {
        term: Term(1),
        owner: Member::First,
        paired: false,
    };

    /// Returns the next grant, or `None` after the last term.
    const fn next(self, owner: Member, paired: bool) -> Option<Self> {
        match self.term.0.checked_add(1) {
            Some(term) => Some(Self {
                term: Term(term),
                owner,
                paired,
            }),
            None => None,
        }
    }

    /// Returns the grant after this compare-and-swap. The witness stores a changed grant durably before its answer,
    /// which is the grant afterwards, changed or not.
    #[must_use]
    pub fn after(self, ask: &Ask) -> Self {
        match self == ask.expected {
            true => ask.wanted,
            false => self,
        }
    }
}

/// A request to the witness: a compare-and-swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Ask {
    /// The grant to replace.
    pub expected: Grant,
    /// The grant of the next term, or the expected one: the request then changes nothing.
    pub wanted: Grant,
}

/// The requests of one node to the witness.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Asking {
    pub(crate) me: Member,
    /// The newest grant that this node has seen.
    pub(crate) known: Grant,
    /// The last request, until an answer has come.
    open: Option<Ask>,
}

impl Asking {
    pub(crate) const fn new(me: Member, known: Grant) -> Self {
        Self {
            me,
            known,
            open: None,
        }
    }

    /// Asks to replace the known grant.
    pub(crate) fn ask(&mut self, owner: Member, paired: bool) -> Vec<Order> {
        let expected = self.known;
        let wanted = expected.next(owner, paired);
        self.open = wanted.map(|wanted| Ask { expected, wanted });
        self.again()
    }

    /// Asks for the present grant, and changes nothing.
    pub(crate) fn look(&mut self) -> Vec<Order> {
        let (expected, wanted) = (self.known, self.known);
        self.open = Some(Ask { expected, wanted });
        self.again()
    }

    /// Repeats the request without an answer.
    pub(crate) fn again(&self) -> Vec<Order> {
        self.open.map(Order::Ask).into_iter().collect()
    }

    /// Gives the last request up: an answer is void.
    pub(crate) const fn forget(&mut self) {
        self.open = None;
    }

    /// Takes the witness's answer to a request. Returns false if the answer is void.
    pub(crate) fn answered(&mut self, ask: &Ask, current: Grant) -> bool {
        let counts = self.open == Some(*ask) && current.term >= self.known.term;
        if counts {
            self.open = None;
            self.known = current;
        }
        counts
    }
}
