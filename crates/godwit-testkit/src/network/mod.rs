//! Separate hosts on one machine: network namespaces, the link between two of them, and other traffic on the link. All
//! of this needs root.

mod capture;
mod lan;
mod link;
mod load;
mod namespace;
mod testpmd;

pub use capture::Capture;
pub use lan::Lan;
pub use link::Link;
pub use load::answers::Service;
pub use load::ping::{Ping, Pinger};
pub use load::postgres::Postgres;
pub use load::records::{Records, Stored};
pub use load::redis::Redis;
pub use load::requests::Requests;
pub use load::talk::{Talk, Talked};
pub use load::traffic::{Priority, Traffic};
pub use namespace::{Namespace, inside};
pub use testpmd::Testpmd;
