//! Effects of the authority machine.

use crate::authority::AuthorityRecord;
use crate::event::AbortReason;
use crate::units::MigrationId;
use crate::wire::Message;

/// An effect that the authority machine requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Send to the other node.
    Send(Message),
    /// Make every received write durable, then call [`Authority::flushed`]. A record may be on its way to stable
    /// storage at the same time.
    Flush,
    /// Make the record durable, then call [`Authority::persisted`].
    Persist(AuthorityRecord),
    /// This node has durably given the disk away.
    Relinquished(MigrationId),
    /// The destination serves; this node may forward to the destination.
    Departed(MigrationId),
    /// This node owns the disk: the other node has durably given the disk away.
    Owner(MigrationId),
    /// The incoming migration ended without this node becoming the owner.
    ReceiveAborted(MigrationId, AbortReason),
    /// The whole disk is durably on this node. Nothing more is needed from the source of this migration.
    Whole(MigrationId),
    /// The destination of this migration has the whole disk. Nothing more is needed from this node.
    OwesNothing(MigrationId),
}
