//! Decisions without I/O: translations of keys and numbers, objects to make again, requests in flight.

mod drain;
mod local_keys;
mod numbers;
mod receives;
mod recent;
mod remote;
mod roadmap;
mod shared_receives;
mod windows;

pub use drain::{Drain, Verdict};
pub use local_keys::LocalKeys;
pub use numbers::make_allowed;
pub use receives::{Receive, ReceiveQueue};
pub use recent::Recent;
pub use remote::{Gid, RemoteKey, RemoteKeys};
pub use roadmap::{Broken, Call, ObjectId, Roadmap};
pub use shared_receives::SharedReceives;
pub(crate) use windows::TAG_BITS;
pub use windows::{Binding, Bound, Window, WindowAddress, WindowType, Windows};
