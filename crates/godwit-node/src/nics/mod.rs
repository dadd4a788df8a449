//! NICs of virtual machines, which this node serves so that they move with their machines.
//!
//! - `request.rs`: what is asked for; `view.rs`: what the API shows
//! - `uplinks.rs`: taps and bridges of the host
//! - `links.rs`: what the kernel tells of the host's interfaces; `follow.rs`: uplinks that are made again
//! - `served.rs`: a NIC that is served, and when
//! - `named.rs`: NICs with names of their own, for machines that somebody else starts
//! - `pieces.rs`: a NIC's state as messages of a move

pub(crate) mod follow;
pub(crate) mod links;
pub(crate) mod named;
pub(crate) mod pieces;
pub(crate) mod request;
pub(crate) mod served;
pub(crate) mod uplinks;
pub(crate) mod view;
