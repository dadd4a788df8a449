//! What the benchmarks share.
//!
//! - [`steady`] measures what a server of an image is worth.
//! - [`idle_copy`] moves a disk that nobody uses, and copies it in other ways.
//! - [`plain_copy`] copies an image and does nothing else.
//! - [`watched`] follows a migration to its end, and [`moved`] says whether it was right.
//! - [`cpu`] knows what everything on a host has used.
//! - [`chart`] draws.

pub mod chart;
pub mod cpu;
pub mod idle_copy;
pub mod moved;
pub mod plain_copy;
pub mod steady;
pub mod watched;
