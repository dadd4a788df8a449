//! The part of a disk that has not come with it: what the owner lacks and pulls, and what the node that gave the
//! disk away owes and sends (Alg. 3 and 4 of the hybrid storage-transfer paper).

pub(in crate::controller) mod lacking;
pub(in crate::controller) mod missing;
pub(in crate::controller) mod owing;

use core::time::Duration;

/// Either end of the connection on which a disk's owner pulls shows every half second that it lives: one of which nothing
/// is heard for so long stands still, or its host or link does.
const SILENT_AFTER: Duration = Duration::from_secs(4);
