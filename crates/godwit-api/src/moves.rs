//! Moves of every kind.

use std::ops::Deref;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;
use crate::migration::{Migration, MigrationPhase};
use crate::process::{ProcessMigration, ProcessMigrationPhase};
use crate::vm::{VmMigration, VmMigrationPhase};

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

impl Deref for Move {
    type Target = dyn AnyMove;

    fn deref(&self) -> &Self::Target {
        match &self.of {
            MoveOf::Disk(of) => of.as_ref(),
            MoveOf::Vm(of) => of,
            MoveOf::Process(of) | MoveOf::Container(of) => of,
        }
    }
}

/// The part that moves of every kind have.
pub trait AnyMove {
    /// Returns the id.
    fn id(&self) -> &str;

    /// Returns the source and the destination.
    fn nodes(&self) -> (&str, &str);

    /// Returns the name of the current phase.
    fn phase(&self) -> &'static str;

    /// Returns true if the move has ended.
    fn ended(&self) -> bool;

    /// Returns the time of the request (RFC 3339).
    fn started_at(&self) -> &str;

    /// Returns the warnings for the user.
    fn warnings(&self) -> &[String];

    /// Returns the reason of an end without a move.
    fn error(&self) -> Option<&ErrorBody>;

    /// Ends the move at a time (RFC 3339). With an error the subject has not moved.
    fn end(&mut self, at: String, error: Option<ErrorBody>);
}

macro_rules! any_move {
    ($($of:ident: $phase:ident),*) => {$(
        impl AnyMove for $of {
            fn id(&self) -> &str {
                &self.id
            }

            fn nodes(&self) -> (&str, &str) {
                (&self.from, &self.to)
            }

            fn phase(&self) -> &'static str {
                self.phase.name()
            }

            fn ended(&self) -> bool {
                self.phase.ended()
            }

            fn started_at(&self) -> &str {
                &self.started_at
            }

            fn warnings(&self) -> &[String] {
                &self.warnings
            }

            fn error(&self) -> Option<&ErrorBody> {
                self.error.as_ref()
            }

            fn end(&mut self, at: String, error: Option<ErrorBody>) {
                self.phase = match error {
                    None => $phase::Completed,
                    Some(_) => $phase::Aborted,
                };
                self.ended_at = Some(at);
                self.error = error;
            }
        }
    )*};
}

any_move!(
    Migration: MigrationPhase,
    VmMigration: VmMigrationPhase,
    ProcessMigration: ProcessMigrationPhase
);

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
