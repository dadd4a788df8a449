//! A guest's rings: which requests are available, what they are made of, and which are in flight.

pub mod chain;
pub mod inflight;
pub mod split;
