//! Hosts of their own on one machine: network namespaces, the link between two of them, and other
//! traffic on that link. All of it needs root.

mod link;
mod namespace;
mod traffic;

pub use link::Link;
pub use namespace::Namespace;
pub use traffic::{Priority, Traffic};
