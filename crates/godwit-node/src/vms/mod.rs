//! Virtual machines: runs QEMU on this node's disks, or takes over one that runs.

mod adopt;
mod convergence;
mod decide;
mod giving;
mod incoming;
mod link;
pub(crate) mod migrations;
mod orders;
mod outgoing;
mod preflight;
mod pulling;
pub(crate) mod recover;
pub(crate) mod room;
mod run;
mod steps;
mod stop;
mod take_back;
pub(crate) mod tunnel;
pub(crate) mod view;
pub(crate) mod vm;
mod watch;

pub(crate) use adopt::adopt;
pub(crate) use incoming::take_machine;
pub(crate) use outgoing::{cancel, migrate};
pub(crate) use room::resume;
pub(crate) use run::run;
pub(crate) use stop::{forget, stop};
pub(crate) use vm::{VmEntry, Vms};
