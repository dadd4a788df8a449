//! What one server of an image is worth: a client keeps requests in flight and looks at what the
//! server's process uses meanwhile.
//!
//! - [`Server`] serves an image: godwit, or one of its peers.
//! - [`Workload`] asks it for requests of one kind and measures.
//! - [`Stamps`] knows what every block must hold, while it is measured and afterwards.

mod device;
mod nbd;
mod server;
mod stamps;
mod vhost;
mod workload;

pub use device::Device;
pub use server::{FrontEnd, Kind, Server};
pub use stamps::Stamps;
pub use workload::{Access, Measured, Workload};
