//! NICs of virtual machines, served by this node to let the NICs move with their machines.
//!
//! - `request.rs`: requested NICs; `view.rs`: NICs in the API
//! - `uplinks.rs`: taps and bridges of the host
//! - `links.rs`: the kernel's view of the host's interfaces; `follow.rs`: uplinks made again
//! - `served.rs`: a NIC while served
//! - `named.rs`: NICs with names of their own, for machines started outside the node
//! - `pieces.rs`: a NIC's state as messages of a move

pub mod follow;
pub mod links;
pub mod named;
pub mod pieces;
pub mod request;
pub mod served;
pub mod uplinks;
pub mod view;
