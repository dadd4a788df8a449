//! Separate hosts on one machine: network namespaces, the link between two of them, and other traffic on the link. All
//! of this needs root.

mod beats;
mod capture;
mod lan;
mod link;
mod namespace;
mod ping;
mod requests;
mod talk;
mod testpmd;
mod traffic;

pub use capture::Capture;
pub use lan::Lan;
pub use link::Link;
pub use namespace::{Namespace, inside};
pub use ping::{Ping, Pinger};
pub use requests::{Answer, Requests, Service};
pub use talk::{Talk, Talked};
pub use testpmd::Testpmd;
pub use traffic::{Priority, Traffic};
