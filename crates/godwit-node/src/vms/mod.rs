//! Virtual machines: runs QEMU on this node's disks, or takes over one that runs.

mod adopt;
mod inspect;
pub(crate) mod machine;
mod process;
mod qmp;
pub(crate) mod recover;
mod run;
mod stop;
pub(crate) mod view;
pub(crate) mod vm;
mod watch;

pub(crate) use adopt::adopt;
pub(crate) use run::run;
pub(crate) use stop::stop;
pub(crate) use vm::{VmEntry, Vms};
