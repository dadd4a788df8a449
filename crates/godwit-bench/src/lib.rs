//! What the benchmarks share.
//!
//! - [`steady`] measures what a server of an image is worth.
//! - [`idle_copy`] moves a disk that nobody uses, and copies it in other ways.
//! - [`plain_copy`] copies an image and does nothing else.
//! - [`watched`] follows a migration to its end, and [`moved`] says whether it was right.
//! - [`environment`] tells what everything was measured on, and [`cpu`] what all
//!   on a host has used.
//! - [`interrupt`] lets a run end at a safe place.
//! - [`spread`] is what several runs say of a figure, and [`chart`] draws.

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
