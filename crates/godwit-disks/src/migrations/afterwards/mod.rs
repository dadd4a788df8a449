//! The work left after a disk has changed hands, or while its owner is in doubt.

pub mod forward;
pub mod pulling;
pub mod resolve;
