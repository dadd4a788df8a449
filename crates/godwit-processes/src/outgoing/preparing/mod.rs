//! Work before a process stops.

pub(in crate::outgoing) mod ahead;
pub(in crate::outgoing) mod chosen;
pub(in crate::outgoing) mod preflight;
pub(in crate::outgoing) mod reach;
