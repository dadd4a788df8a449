//! A guest's rings: available requests, their parts, and the requests in flight.

pub mod chain;
pub mod inflight;
pub mod split;
