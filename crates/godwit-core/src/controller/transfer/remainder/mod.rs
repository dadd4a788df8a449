//! The remainder of a disk after the switchover: the owner lacks and pulls it, the node that gave the disk away owes
//! and sends it (Alg. 3 and 4 of the hybrid storage-transfer paper).

pub(in crate::controller) mod lacking;
pub(in crate::controller) mod missing;
pub(in crate::controller) mod owing;

use core::time::Duration;

/// Silence after which the other end of the pull connection counts as stalled: the node, its host or its link. Either
/// end gives a sign of life every half second.
const SILENT_AFTER: Duration = Duration::from_secs(4);

/// The connection on which an owner pulls from a node that owes, at either end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum PullLink {
    /// None.
    Down,
    /// This node dialled: this node owes, and its peer does not.
    Dialled,
    /// The peer dialled: the peer owes.
    Accepted {
        /// True if the peer takes signs of life.
        shows_life: bool,
    },
}

impl PullLink {
    /// Returns true while the connection is up.
    pub(in crate::controller) fn is_up(self) -> bool {
        self != Self::Down
    }
}
