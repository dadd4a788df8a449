//! Moves of every kind.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::migration::Migration;
use crate::process::ProcessMigration;
use crate::vm::VmMigration;

/// A move of any kind, under way or ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Move {
    /// The moving disk, `vm/NAME`, `process/PID` or `container/ID`.
    pub subject: String,
    /// The move itself.
    #[serde(flatten)]
    pub of: MoveOf,
}

/// The kind of a move, with the fields of its kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MoveOf {
    /// A disk.
    Disk(Box<Migration>),
    /// A VM with its disks.
    Vm(VmMigration),
    /// A process.
    Process(ProcessMigration),
    /// A container with all of its processes.
    Container(ProcessMigration),
}

impl Move {
    /// Returns the id.
    pub fn id(&self) -> &str {
        match &self.of {
            MoveOf::Disk(of) => &of.id,
            MoveOf::Vm(of) => &of.id,
            MoveOf::Process(of) | MoveOf::Container(of) => &of.id,
        }
    }

    /// Returns the source and the destination.
    pub fn nodes(&self) -> (&str, &str) {
        match &self.of {
            MoveOf::Disk(of) => (&of.from, &of.to),
            MoveOf::Vm(of) => (&of.from, &of.to),
            MoveOf::Process(of) | MoveOf::Container(of) => (&of.from, &of.to),
        }
    }

    /// Returns the time of the request (RFC 3339).
    pub fn started_at(&self) -> &str {
        match &self.of {
            MoveOf::Disk(of) => &of.started_at,
            MoveOf::Vm(of) => &of.started_at,
            MoveOf::Process(of) | MoveOf::Container(of) => &of.started_at,
        }
    }
}

impl From<Migration> for Move {
    fn from(of: Migration) -> Self {
        Self {
            subject: of.disk.clone(),
            of: MoveOf::Disk(Box::new(of)),
        }
    }
}

impl From<VmMigration> for Move {
    fn from(of: VmMigration) -> Self {
        Self {
            subject: format!("vm/{}", of.vm),
            of: MoveOf::Vm(of),
        }
    }
}

impl From<ProcessMigration> for Move {
    fn from(of: ProcessMigration) -> Self {
        match &of.container {
            Some(id) => Self {
                subject: format!("container/{id}"),
                of: MoveOf::Container(of),
            },
            None => Self {
                subject: format!("process/{}", of.pid),
                of: MoveOf::Process(of),
            },
        }
    }
}
