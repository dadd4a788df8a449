//! Every decision of the NIC, without I/O.
//!
//! - `nic.rs`: the NIC with the modes of the ReNIC paper, section 3.1
//! - `gate.rs`: packets of a protected machine that wait for their checkpoint
//! - `held.rs`: packets waiting for the guest, in order and bounded
//! - `stations.rs`: MAC addresses from which the guest sent lately
//! - `pace.rs`: a limit on packets not yet processed by the guest
//! - `twins.rs`: packets for many that a move brings to both nodes
//! - `counters.rs`: packets and bytes

pub mod counters;
pub mod gate;
pub mod held;
pub mod nic;
pub mod pace;
pub mod stations;
pub mod twins;
