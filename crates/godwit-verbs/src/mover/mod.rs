//! The move of a process: the order of the steps, and the fate of the process after a failure or a death.
//!
//! This module only decides. The caller stores the [`Move`] durably, carries out [`Move::step`] and reports the outcome
//! with [`Happened`] until [`Step::End`]. After a death [`Move::recover`] returns to a safe step.

mod claims;
mod course;
mod destination;
mod links;
#[cfg(test)]
mod model;
mod rounds;
#[cfg(test)]
mod several;

pub use claims::{Claims, Taking, Wanted};
pub use course::{Ahead, Ending, Happened, MAX_TRIES, Move, Step};
pub use destination::Arrival;
pub use links::{
    Link, Party, ahead_at_holder, ahead_at_partner, at_moved, at_partner, ends_of, peer_sent,
};
pub use rounds::{MOST_ROUNDS, another_round, is_worth_copying};
