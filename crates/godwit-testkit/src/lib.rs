//! Shared code of the system tests, the demos and the benchmarks. Nodes run as real processes, disks are reached over
//! real sockets, and every byte promised to a guest is checked.
//!
//! - [`VerifyingClient`] is a guest: a client that keeps many requests in flight on a disk and knows, for every sector,
//!   the contents that a read may return.
//! - [`Cluster`] runs `godwit node` processes with their own certificates on loopback, and the `godwit` command against
//!   them.
//! - [`proxy`] and [`network`] put a link between nodes that is slow, shared with other traffic, stalled or cut.
//! - [`vm`] runs virtual machines whose guest checks its disks and its memory.
//! - [`rdma`] runs virtual machines with soft-RoCE on one network.
//! - [`vhost_client`] is a front end without a virtual machine: a client that shares memory with a vhost-user-blk
//!   server and drives virtqueues there.
//! - [`small_fs`] is a file system with little room.
//! - [`tls`] sets up two sides that trust each other.
//! - [`fio`] runs fio against a disk and turns its latency logs into percentiles per time window.
//!
//! An error names the program, the file or the socket that failed. A call that only a mistake in a test can fail panics.

#![allow(missing_docs, reason = "a comment that repeats a name is no help")]

pub mod client;
pub mod cluster;
pub mod fio;
pub mod image;
pub mod nbd;
pub mod network;
pub mod process;
pub mod proxy;
pub mod random;
pub mod rdma;
pub mod report;
pub mod scenario;
pub mod small_fs;
pub mod tls;
pub mod vhost_client;
pub mod vm;

pub use client::{Model, VerifyingClient, Workload};

pub use cluster::{Cluster, Node};
pub use nbd::NbdTarget;

/// Bytes in a sector: the unit in which disks are addressed and checked.
pub const SECTOR: usize = 512;
