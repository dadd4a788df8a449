//! The node as a process: its start and end, its data directory, what a restart finds.

pub(crate) mod data_dir;
mod disk_events;
pub(crate) mod notify;
pub(crate) mod open_files;
pub(crate) mod recover;
pub(crate) mod run;
