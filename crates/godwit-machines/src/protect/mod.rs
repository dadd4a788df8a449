//! The protection of a machine by a second node.

pub mod witness;
