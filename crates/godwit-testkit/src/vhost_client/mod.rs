//! A virtual machine without one: a vhost-user-blk front end that shares memory with the server of
//! a disk and drives virtqueues in it, as a guest's driver does.
//!
//! It also works against other servers than Godwit's, to compare them.

mod client;
mod memory;
mod post_copy;
mod queue;

pub use client::{BASE, Client, Options, Status};
pub use memory::SharedMemory;
pub use post_copy::{Faults, may_wait_for_pages, wait_for_pages};
pub use queue::{Done, INDIRECT, NEXT, Part, QUEUE_BYTES, Queue, WRITE, readable};
