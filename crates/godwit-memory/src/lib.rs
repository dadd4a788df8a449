//! The memory of virtual machines where two hosts can map the same bytes: a CXL pool, memory that another host
//! lends, or a file that two nodes of one host share (the zero-copy migration paper).
//!
//! - [`ownership`]: who may run a guest on a segment. Pure.
//! - [`pool`]: folders of segments, and devices with a table of them; [`pool::segment`]: one guest's memory with its header; [`pool::proof`]: how two
//!   nodes prove to each other that they see the same bytes.
//! - [`mover`]: moves the memory of a guest that runs from one file to another.
//! - [`mapping`]: shared memory of which pages may be lost, without the process's end.
//! - [`dirty`]: which pages of its memory a process has written.

pub mod dax;
pub mod dirty;
pub mod mapping;
pub mod mover;
pub mod ownership;
pub mod pool;
