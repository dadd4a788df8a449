//! Performance of one server of an image: a client keeps requests in flight and measures the CPU use of the server's
//! process meanwhile.
//!
//! - [`Server`] serves an image: godwit, or one of its peers.
//! - [`Workload`] sends requests of one kind and measures.
//! - [`Stamps`] holds the expected content of every block, during the measurement and after.

mod device;
mod nbd;
mod server;
mod stamps;
mod vhost;
mod workload;

pub(crate) use server::{FrontEnd, Kind, Server};
pub(crate) use stamps::Stamps;
pub(crate) use workload::Workload;
