//! The parts of a running node.

use std::sync::Arc;

use godwit_context::Context;
use godwit_disks::disks::Disks;
use godwit_disks::images::Images;
use godwit_disks::migrations::Migrations;
use godwit_machines::nics::named::NamedNics;
use godwit_machines::vms::Vms;
use godwit_processes::Processes;

/// A running node.
#[derive(Debug)]
pub(crate) struct Node {
    /// The start time, as the API shows it.
    pub(crate) started_at: String,
    pub(crate) context: Arc<Context>,
    pub(crate) disks: Arc<Disks>,
    /// The images that disks are created from.
    pub(crate) images: Arc<Images>,
    /// The disks' moves.
    pub(crate) migrations: Arc<Migrations>,
    /// NICs with names of their own.
    pub(crate) nics: Arc<NamedNics>,
    pub(crate) vms: Arc<Vms>,
    /// Processes with RDMA connections.
    pub(crate) processes: Arc<Processes>,
}
