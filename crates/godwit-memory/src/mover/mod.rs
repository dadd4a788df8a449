//! Moves the memory of a running guest from one file to another, chunk by chunk (the zero-copy migration paper, section
//! 4.2 and figure 4). The pages of a chunk are write-protected, copied, remapped and released.
//!
//! - [`plan`]: order, size and pacing of chunks. Pure.
//! - [`agent`]: the agent inside QEMU, and its client.
//! - [`mappings`]: mappings of files by a process.

pub mod agent;
pub mod mappings;
pub mod plan;
mod protocol;

pub use protocol::Run;
