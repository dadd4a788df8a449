//! The part of a process's move that concerns RDMA: claims on the processes, connections between queue pairs, rounds of
//! memory. `godwit-move` has the order of the steps.

mod claims;
mod links;
#[cfg(test)]
mod model;
mod rounds;
#[cfg(test)]
mod several;

pub use claims::{Claims, Taking, Wanted};
pub use links::{
    Link, Party, ahead_at_holder, ahead_at_partner, at_moved, at_partner, ends_of, peer_sent,
};
pub use rounds::{MOST_ROUNDS, another_round, is_worth_copying};
