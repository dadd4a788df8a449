//! How a process moves: the order of the steps, and what becomes of the process when one fails or somebody dies.
//!
//! Decisions only. Who carries the steps out keeps the [`Move`] durably, does [`Move::step`], and says what
//! [`Happened`], until it is [`Step::End`]. After a death [`Move::recover`] says where to go on.

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
