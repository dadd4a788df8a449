//! Moves the memory of a guest that runs from one file to another, chunk by chunk (the zero-copy migration paper, section 4.2 and
//! figure 4): a chunk's pages are write-protected, copied, remapped, and let go.
//!
//! - [`plan`]: which chunk is next and how long to wait before it. Pure.
//! - [`agent`]: the part that runs inside QEMU, and how it is asked.
//! - [`mappings`]: where a process has a file mapped.

pub mod agent;
pub mod mappings;
pub mod plan;
mod protocol;

pub use protocol::Run;
