//! The table of moves, stored and shown.

pub(in crate::outgoing) mod shown;
pub(in crate::outgoing) mod stored;
pub mod table;
