//! A library in front of libibverbs (`LD_PRELOAD`) that lets unmodified RDMA applications move between hosts, after the
//! RDMA live-migration paper.
//!
//! The application holds *shadow* objects (`shim::objects`) in the layout of libibverbs' own. Behind each stands the
//! device's object, which can be closed and made again, here or on another host, while the application keeps the
//! shadow. `tables` decides. `shim` has the functions that applications call. Through `control`, a mover on the same
//! host asks a process to suspend, release and recreate. `mover` has claims, connections and rounds. `preflight` finds the
//! obstacles to a process's move to a host, given the host's resources from `offer`.

pub mod abi;
pub mod control;
pub mod mover;
pub mod offer;
pub mod preflight;
pub mod shim;
pub mod tables;
