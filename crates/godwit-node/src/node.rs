//! The parts of a running node.

use std::ops::Deref;
use std::sync::Arc;

use crate::context::Context;
use crate::disks::Disks;
use crate::images::Images;
use crate::migrations::Migrations;
use crate::nics::named::NamedNics;
use crate::processes::Processes;
use crate::vms::Vms;

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
    pub(crate) processes: Processes,
}

impl Deref for Node {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}
