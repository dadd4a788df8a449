//! What other nodes ask for (`serve.rs`): to find and hold partners, to make objects ahead of a process (`holder.rs`), to
//! take it (`arrivals.rs`), and its memory before it (`rounds.rs`).

pub(crate) mod arrivals;
mod holder;
pub(crate) mod partners;
pub(crate) mod rounds;
pub(crate) mod serve;
