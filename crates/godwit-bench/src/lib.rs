//! Common parts of the benchmarks.
//!
//! - [`steady`] measures a server of an image.
//! - [`idle_copy`] moves a disk that no guest uses, and copies it in other ways.
//! - [`plain_copy`] copies an image and does nothing else.
//! - [`watched`] follows a migration to its end, and [`moved`] verifies its result.
//! - [`environment`] describes the machine and its programs, and [`cpu`] measures the CPU time of hosts.
//! - [`interrupt`] lets a run end at a safe place.
//! - [`spread`] summarizes several runs of a figure, and [`chart`] draws.

pub mod chart;
pub mod cpu;
pub mod environment;
pub mod idle_copy;
pub mod interrupt;
pub mod moved;
pub mod plain_copy;
pub mod spread;
pub mod steady;
pub mod watched;
