//! Which pages of its memory a process has written, found from outside while it runs: what a checkpoint has to copy.
//!
//! The agent inside QEMU registers the memory for asynchronous write protection ([`Agent::track`]): the first write to a
//! protected page lifts its protection and goes on, and nobody waits. This side asks the kernel through the process's
//! `pagemap` which pages are not protected any more, and protects them again in the same step, so that no write is
//! missed between. This needs Linux 6.7.
//!
//! What is not seen: writes through another mapping of the same file. So devices that other processes serve over
//! vhost-user need logs of their own, and this node's disks have one.
//!
//! Some ranges would report nothing, as if nothing had been written: those that nobody registered, those that were
//! remapped or unmapped since, those that the mover holds, and those of a process that has ended. All of them are
//! errors here.
//!
//! - [`pages`]: runs of pages. Pure.
//! - [`scan`]: one look at the process.
//!
//! [`Agent::track`]: crate::mover::agent::Agent::track

pub mod pages;
pub mod scan;
