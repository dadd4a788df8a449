//! Two hosts around the real [`godwit_core::Controller`], in virtual time: disks with a volatile write cache, links
//! with queues, slowdowns and failures, stores with latency, diverging clocks, a guest, an operator, and faults. One
//! seed is one run; the same seed gives the same run.
//!
//! After every step the run is checked against the invariants (ARCHITECTURE.md): the serving node, the results of
//! reads, the images at switchover, the latency of the guest. A failing run reports its seed and is cut down to the
//! decisions needed to fail.

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
pub use choice::{Choice, Move, choices, moves};
pub use run::report::Report;
pub use run::shrink::{Reproduction, reproduce};
pub use run::soak::{Soak, soak};
pub use world::Violation;
pub use world::measuring::{Figures, Waits};
