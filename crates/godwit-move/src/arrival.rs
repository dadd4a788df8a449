//! The destination's end, which keeps the subject from running at two places.

use serde::{Deserialize, Serialize};

use crate::message::{Answer, Order, Word};
use crate::subject::Decider;

/// The durable state of an arriving subject. Stored before the [`Act`] that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// The state is arriving. Nothing of the subject has run here.
    Coming,
    /// The subject is being started.
    #[serde(alias = "restoring")]
    Starting,
    /// The start has failed, and a part of the subject may run, which is only to be ended. Only where the destination
    /// decides.
    Failed,
    /// The subject runs here.
    Here,
    /// The subject does not run here and never will by this move.
    Never,
}

/// The next action of the destination's node, after storing the [`Arrival`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Act {
    /// Nothing to do.
    Nothing,
    /// Start the subject, and report with [`Arrival::started`].
    Start,
    /// Find out if the subject runs, once no start is under way, and report with [`Arrival::looked`].
    Look,
    /// End all that runs of the subject, and report with [`Arrival::cleared`].
    Clear,
    /// Tell the source.
    Say(Answer),
    /// Remove all that is stored of the move.
    Forget,
}

/// The outcome of [`Act::Start`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Started {
    /// The subject runs.
    Runs,
    /// Nothing of the subject runs.
    Nothing,
    /// A part of the subject may run.
    Rest,
}

impl Arrival {
    /// Takes an order of the source.
    pub fn ordered(&mut self, order: Order, decider: Decider) -> Act {
        match (*self, order) {
            (Arrival::Here | Arrival::Never, Order::Over) => Act::Forget,
            (Arrival::Here, _) => Act::Say(Answer::Here),
            (Arrival::Never, _) => Act::Say(Answer::NotHere),
            (Arrival::Coming, Order::Run | Order::Word(Word::Given)) => {
                *self = Arrival::Starting;
                Act::Start
            }
            (Arrival::Coming, Order::Settle | Order::Word(Word::Kept)) => {
                *self = Arrival::Never;
                Act::Say(Answer::NotHere)
            }
            (Arrival::Coming, Order::Word(Word::Undecided)) => Act::Nothing,
            (Arrival::Coming | Arrival::Starting | Arrival::Failed, _) => self.recover(decider),
        }
    }

    /// Takes the outcome of [`Act::Start`]. A subject given away by the source is never given up: the next order or
    /// [`Arrival::recover`] tries again.
    pub fn started(&mut self, outcome: Started, decider: Decider) -> Act {
        match (outcome, decider) {
            (Started::Runs, _) => {
                *self = Arrival::Here;
                Act::Say(Answer::Here)
            }
            (Started::Nothing, Decider::Destination) => {
                *self = Arrival::Never;
                Act::Say(Answer::NotHere)
            }
            (Started::Rest, Decider::Destination) => {
                *self = Arrival::Failed;
                Act::Nothing
            }
            (Started::Nothing | Started::Rest, Decider::Source) => Act::Nothing,
        }
    }

    /// Takes the finding of [`Act::Look`].
    pub fn looked(&mut self, lives: bool, decider: Decider) -> Act {
        match (*self, decider) {
            (Arrival::Starting, _) if lives => {
                *self = Arrival::Here;
                Act::Say(Answer::Here)
            }
            (_, Decider::Source) => Act::Start,
            (_, Decider::Destination) => Act::Clear,
        }
    }

    /// Records that nothing of the subject runs.
    pub fn cleared(&mut self) -> Act {
        *self = Arrival::Never;
        Act::Say(Answer::NotHere)
    }

    /// Continues after a restart of the destination's node, or after the loss of the connection to a source that
    /// decides.
    pub const fn recover(self, decider: Decider) -> Act {
        match (self, decider) {
            // The source may have given the subject away.
            (Arrival::Coming, Decider::Source) => Act::Say(Answer::Ask),
            // Without a record the answer is that the subject does not run here.
            (Arrival::Coming, Decider::Destination) => Act::Forget,
            (Arrival::Starting, _) => Act::Look,
            (Arrival::Failed, _) => Act::Clear,
            (Arrival::Here | Arrival::Never, _) => Act::Nothing,
        }
    }
}
