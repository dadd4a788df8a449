//! The table of moves, stored and shown.

pub(in crate::processes::outgoing) mod shown;
pub(in crate::processes::outgoing) mod stored;
pub(crate) mod table;
