//! Virtual machines: runs QEMU on this node's disks, or takes over one that runs.

mod adopt;
mod convergence;
mod debugger;
mod decide;
mod giving;
mod incoming;
mod inspect;
mod link;
pub(crate) mod machine;
mod memory;
pub(crate) mod migrations;
mod orders;
mod outgoing;
mod plugged;
mod preflight;
mod process;
mod pulling;
mod qmp;
pub(crate) mod recover;
mod run;
mod sandbox;
mod spare;
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
pub(crate) use run::run;
pub(crate) use stop::{forget, stop};
pub(crate) use vm::{VmEntry, Vms};
