//! The node as a process: start and end, data directory, recovery after a restart.

pub(crate) mod data_dir;
mod disk_users;
pub(crate) mod notify;
pub(crate) mod open_files;
pub(crate) mod recover;
pub(crate) mod run;
