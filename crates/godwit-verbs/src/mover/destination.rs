//! What the destination stores about a process that comes, so that it never runs at two places.

use serde::{Deserialize, Serialize};

/// How far a process that comes is. Stored before what it says is begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// Its image comes, and it was not restored.
    Coming,
    /// It is being restored.
    Restoring,
    /// It runs here.
    Here,
    /// It does not run here and never will.
    Never,
}

impl Arrival {
    /// Whether it may be restored now.
    pub const fn may_restore(self) -> bool {
        matches!(self, Arrival::Coming)
    }

    /// The answer to whether the process runs here, once no restore is under way. What is given has to be stored before
    /// it is told; of what [`Arrival::Never`] comes of, nothing may be left. `lives`: the process of the image runs here.
    pub const fn settled(self, lives: bool) -> Self {
        match self {
            Arrival::Restoring if lives => Arrival::Here,
            Arrival::Coming | Arrival::Restoring | Arrival::Never => Arrival::Never,
            Arrival::Here => Arrival::Here,
        }
    }
}
