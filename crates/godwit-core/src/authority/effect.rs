//! What the authority machine wants done.

use crate::authority::AuthorityRecord;
use crate::event::AbortReason;
use crate::units::MigrationId;
use crate::wire::Message;

/// What the machine wants done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Send to the other node.
    Send(Message),
    /// Make every received write durable, then call [`Authority::flushed`]. A record may be on its way
    /// to stable storage at the same time.
    Flush,
    /// Make the record durable, then call [`Authority::persisted`].
    Persist(AuthorityRecord),
    /// This node gave the disk away, durably.
    Relinquished(MigrationId),
    /// The destination serves; this node may forward to it.
    Departed(MigrationId),
    /// This node owns the disk: the other one has durably given it away.
    Owner(MigrationId),
    /// The incoming migration ended without this node becoming the owner.
    ReceiveAborted(MigrationId, AbortReason),
    /// All of the disk is here, durably: nothing is needed from the source of this migration any more.
    Whole(MigrationId),
    /// The destination of this migration has all of the disk: nothing of it is needed here.
    OwesNothing(MigrationId),
}
