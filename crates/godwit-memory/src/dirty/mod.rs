//! Tracks from outside which pages a running process writes, for incremental checkpoints.
//!
//! The agent inside QEMU registers the memory for asynchronous write protection ([`Agent::track`]). The first write to
//! a protected page lifts the protection and continues without a wait. This side asks the kernel through the process's
//! `pagemap` for the unprotected pages. The same call protects them again, so no write in between is missed.
//! `PAGEMAP_SCAN` needs Linux 6.7.
//!
//! Writes through another mapping of the same file are not seen. Devices that other processes serve over vhost-user
//! therefore need logs of their own; the disks of this node have one.
//!
//! The kernel would report no writes for some ranges: ranges never registered, remapped or unmapped since, held by the
//! mover, or of a process that has ended. All of these are errors here.
//!
//! - [`pages`]: runs of pages. Pure.
//! - [`scan`]: one scan of the process.
//!
//! [`Agent::track`]: crate::mover::agent::Agent::track

pub mod pages;
pub mod scan;
