//! A library in front of libibverbs (`LD_PRELOAD`) that lets unmodified RDMA applications move
//! between hosts, after the RDMA live-migration paper.
//!
//! The application holds *shadow* objects (`shim::objects`) in the layout of libibverbs' own. Behind
//! each stands the device's object, which can be closed and made again, here or on another host, while
//! the application goes on holding the shadow. `tables` decides, `shim` is what applications call,
//! `control` is how a mover on the same host asks a process to suspend, release and recreate.
//! `mover` is the order of a move's steps. `preflight` says what keeps a process from moving to what a host has (`offer`).

pub mod abi;
pub mod control;
pub mod mover;
pub mod offer;
pub mod preflight;
pub mod shim;
pub mod tables;
