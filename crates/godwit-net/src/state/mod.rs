//! Every decision of the NIC, without I/O.
//!
//! - `nic.rs`: the NIC, whose modes are those of the ReNIC paper, section 3.1
//! - `held.rs`: packets that wait for the guest, in order and bounded
//! - `stations.rs`: from which MAC addresses the guest sent lately
//! - `pace.rs`: how many packets the guest is given before it has come to those that it has
//! - `twins.rs`: which packets for many a move brought to both nodes
//! - `counters.rs`: what happened

pub mod counters;
pub mod held;
pub mod nic;
pub mod pace;
pub mod stations;
pub mod twins;
