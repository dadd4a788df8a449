//! Moves of disks, VMs, processes and containers: start, follow, cancel.

mod cgroup;
mod disk;
pub(crate) mod follow;
pub(crate) mod migrate;
pub(crate) mod migration;
mod process;
mod vm;

use godwit_api::{AnyMove, Move, MoveOf};

use crate::failure::Failure;
use crate::show::progress::Status;

/// Digits of a migration's id in lists.
const SHORT_ID: usize = 8;

/// A move of one kind.
trait Moving: AnyMove {
    /// Returns the progress.
    fn status(&self) -> Status;

    /// Returns the finished part and the whole of the current step of a running move, if known.
    fn done(&self) -> Option<(u64, u64)> {
        self.status().done
    }

    /// Returns a note for the list, other than an error.
    fn note(&self) -> Option<String> {
        None
    }

    /// Returns the failure of an ended move; `None` if the move succeeded.
    fn failure(&self, cancelled: bool) -> Option<Failure>;

    /// Returns a summary of a completed move in two lines.
    fn summary(&self) -> String;

    /// Returns a sentence about data still at the source after a completed move; `None` once the source is no longer
    /// needed.
    fn owed(&self) -> Option<String> {
        None
    }

    /// Returns everything that is known about the move.
    fn show(&self) -> String;
}

fn moving(migration: &Move) -> &dyn Moving {
    match &migration.of {
        MoveOf::Disk(of) => of.as_ref(),
        MoveOf::Vm(of) => of,
        MoveOf::Process(of) | MoveOf::Container(of) => of,
    }
}
