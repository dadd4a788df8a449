//! The destination's stored state of an arriving process, which keeps the process from running at two places.

use serde::{Deserialize, Serialize};

/// The state of an arriving process. Stored before the corresponding action begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// The image is arriving. The process was not restored.
    Coming,
    /// The process is being restored.
    Restoring,
    /// The process runs here.
    Here,
    /// The process does not run here and never will.
    Never,
}

impl Arrival {
    /// Returns true if the process may be restored now.
    pub const fn may_restore(self) -> bool {
        matches!(self, Arrival::Coming)
    }

    /// Decides, once no restore is under way, whether the process runs here; `lives` is true if the restored process
    /// exists. The result must be stored before the answer is sent. For [`Arrival::Never`], all remains of the process
    /// must be removed.
    pub const fn settled(self, lives: bool) -> Self {
        match self {
            Arrival::Restoring if lives => Arrival::Here,
            Arrival::Coming | Arrival::Restoring | Arrival::Never => Arrival::Never,
            Arrival::Here => Arrival::Here,
        }
    }
}
