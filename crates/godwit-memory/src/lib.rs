//! The memory of VMs whose hosts can map the same bytes: a CXL pool, memory lent by another host, or a file shared by
//! two nodes of one host (the zero-copy migration paper).
//!
//! - [`ownership`]: the right to run a guest on a segment. Pure.
//! - [`pool`]: folders of segments, and devices with a table of segments; [`pool::segment`]: one guest's memory with a
//!   header; [`pool::proof`]: a proof between two nodes of seeing the same bytes.
//! - [`mover`]: moves the memory of a running guest from one file to another.
//! - [`mapping`]: shared mappings whose pages may be lost without ending the process.
//! - [`dirty`]: tracks the pages that a process has written.

pub mod dax;
pub mod dirty;
pub mod mapping;
pub mod mover;
pub mod ownership;
pub mod pool;
