//! What is called for each request and completion: no lock of ours, no allocation, no system call.

pub(super) mod doorbell;
pub(super) mod gate;
pub(super) mod polling;
pub(super) mod posting;
