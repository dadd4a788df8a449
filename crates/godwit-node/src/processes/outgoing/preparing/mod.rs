//! Work before a process stops.

pub(in crate::processes::outgoing) mod ahead;
pub(in crate::processes::outgoing) mod chosen;
pub(in crate::processes::outgoing) mod preflight;
pub(in crate::processes::outgoing) mod reach;
