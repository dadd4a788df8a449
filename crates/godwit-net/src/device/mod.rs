//! The device around the state: a thread that serves the rings and reads the uplink.
//!
//! - `handle.rs`: commands from the rest of the process
//! - `worker.rs`: the thread's loop; `traffic.rs`: the packets of each turn; `session.rs`: the front end's protocol
//!   state
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
