//! Two hosts around the real [`godwit_core::Controller`], in virtual time: disks with a volatile
//! write cache, links that queue, slow down and break, stores that take their time, clocks that
//! disagree, a guest, an operator, and faults. One seed is one run; the same seed is the same run.
//!
//! After every step the run is held against what must always hold (ARCHITECTURE.md): who serves,
//! what a read may return, what the images are at switchover, how long the guest may wait. A failing
//! run names the seed and is cut down to the decisions that it takes to fail.

#![forbid(unsafe_code)]

mod bug;
mod choice;
mod disk;
mod history;
mod plan;
mod random;
mod run;
mod world;

pub use bug::Bug;
pub use choice::{Choice, Figure, choices};
pub use run::report::Report;
pub use run::shrink::{Reproduction, reproduce};
pub use run::soak::{Failure, Soak, soak};
