//! Calls for each request and completion: no lock of this library, no allocation, no system call, except for requests
//! about memory windows, which take a lock.

pub(super) mod doorbell;
pub(super) mod extended;
pub(super) mod gate;
mod keeping;
pub(super) mod lists;
pub(super) mod polling;
pub(super) mod posting;
pub(super) mod windows;
