//! Virtual machines, their consoles, NICs and memory.

mod console;
pub(crate) mod memory_pool;
pub(crate) mod nic;
mod protection;
pub(crate) mod vm;
