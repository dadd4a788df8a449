//! The traffic between the hosts.

mod forwarding;
pub(super) mod frames;
pub(super) mod network;
pub(crate) mod pulling;
