//! The device around the state: a thread that serves the rings and reads the uplink.
//!
//! - `handle.rs`: what the rest of the process asks of the thread
//! - `worker.rs`: the thread's loop; `traffic.rs`: which packets it moves; `session.rs`: the front end, as far as the protocol has come
//! - `queues/`: packets through the rings
//! - `uplink/`: the tap

pub mod handle;
mod queues;
mod session;
#[cfg(test)]
mod test_guest;
mod traffic;
pub mod uplink;
mod wake;
mod worker;
