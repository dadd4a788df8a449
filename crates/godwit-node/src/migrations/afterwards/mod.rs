//! What is left to do once a disk has changed hands, or nobody is sure whose it is.

pub(crate) mod forward;
pub(crate) mod pulling;
pub(crate) mod resolve;
