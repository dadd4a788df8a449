//! A vhost-user-blk front end without a virtual machine. The front end shares memory with the server of a disk and
//! drives virtqueues there, as a guest's driver does.
//!
//! Other servers than Godwit's work, too, for comparisons.

mod client;
mod memory;
mod post_copy;
mod queue;

pub use client::{BASE, Client, Options, Status};
pub use memory::SharedMemory;
pub use post_copy::{Faults, may_wait_for_pages, wait_for_pages};
pub use queue::{Done, INDIRECT, NEXT, Part, QUEUE_BYTES, Queue, WRITE, readable};
