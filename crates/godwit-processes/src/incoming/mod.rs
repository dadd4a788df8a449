//! The requests of other nodes (`serve.rs`): find and hold partners (`partners.rs`), make objects ahead of a process
//! (`holder.rs`), receive the process (`arrivals.rs`), and receive memory in advance (`rounds.rs`).

pub mod arrivals;
mod holder;
pub mod partners;
pub mod rounds;
pub mod serve;
