//! Progress and milestones, for people and metrics.

use crate::authority::AuthorityRecord;
use crate::request::RequestError;
use crate::units::{Epoch, Extent, MigrationId};

/// Phase of a migration as seen by its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The first pass: every chunk goes to the destination once.
    Copying,
    /// Both images are read again, chunk by chunk, and their hashes compared.
    Verifying,
    /// The destination has everything except frames in flight: double writes go on until the body reports that the
    /// guest has stopped ([`Switchover::WhenTold`](crate::Switchover)).
    Converged,
    /// The disk stays here, and the destination follows: no write is acknowledged before the destination has the write.
    Following,
    /// New guest I/O is held while operations in flight finish.
    Draining,
    /// The destination is asked to accept the next epoch.
    Preparing,
    /// The destination accepted; the source is storing that the disk is given away.
    Relinquishing,
    /// The source gave the disk away and waits for the destination to confirm.
    Committing,
    /// The destination serves.
    Completed,
    /// The migration ended and the source still serves.
    Aborted,
}

impl Phase {
    /// Returns the phase's name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::Verifying => "verifying",
            Self::Converged => "converged",
            Self::Following => "following",
            Self::Draining => "draining",
            Self::Preparing => "preparing",
            Self::Relinquishing => "relinquishing",
            Self::Committing => "committing",
            Self::Completed => "completed",
            Self::Aborted => "aborted",
        }
    }
}

/// Reason why a migration ended without moving the disk. The source continues to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum AbortReason {
    /// The migration was cancelled on request.
    #[error("it was cancelled")]
    Cancelled,
    /// The connection to the other node ended.
    #[error("the connection to the other node was lost")]
    PeerLost,
    /// The other node did not answer in time.
    #[error("the other node did not answer in time")]
    PeerTimeout,
    /// The source's disk failed.
    #[error("the source's disk reported an I/O error")]
    SourceDisk,
    /// The destination's disk failed.
    #[error("the destination's disk reported an I/O error")]
    DestinationDisk,
    /// The destination's file system is full.
    #[error("no space is left at the destination")]
    DestinationNoSpace,
    /// The images differ.
    #[error("verification found that the images differ")]
    VerifyMismatch,
    /// A frame broke the protocol.
    #[error("the other node broke the protocol")]
    Protocol,
    /// The other node ended the migration for a reason of its own.
    #[error("the other node ended it")]
    Refused,
}

impl AbortReason {
    /// Returns the reason's number in an abort frame.
    pub const fn code(self) -> u16 {
        match self {
            Self::Cancelled => 1,
            Self::PeerLost => 2,
            Self::PeerTimeout => 3,
            Self::SourceDisk => 4,
            Self::DestinationDisk => 5,
            Self::DestinationNoSpace => 6,
            Self::VerifyMismatch => 7,
            Self::Protocol => 8,
            Self::Refused => 9,
        }
    }

    /// Returns the reason for a destination that answered with this error.
    pub(crate) const fn of_destination(error: RequestError) -> Self {
        match error {
            RequestError::NoSpace => Self::DestinationNoSpace,
            _ => Self::DestinationDisk,
        }
    }

    /// Returns the reason with this number; unknown numbers are [`Self::Refused`].
    pub const fn from_code(code: u16) -> Self {
        match code {
            1 => Self::Cancelled,
            2 => Self::PeerLost,
            3 => Self::PeerTimeout,
            4 => Self::SourceDisk,
            5 => Self::DestinationDisk,
            6 => Self::DestinationNoSpace,
            7 => Self::VerifyMismatch,
            8 => Self::Protocol,
            _ => Self::Refused,
        }
    }
}

/// Reason for a pause of an outgoing migration (Alg. 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PauseReason {
    /// A request of the guest waited for the migration for almost the promised latency (`PAUSE_TH`).
    GuestLatency,
    /// The sync connection's queue would take about the same time to be delivered.
    LinkQueue,
    /// The interface carries more than its budget.
    InterfaceBudget,
}

impl PauseReason {
    /// All reasons.
    pub const ALL: [Self; 3] = [Self::GuestLatency, Self::LinkQueue, Self::InterfaceBudget];

    /// Returns the reason's name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GuestLatency => "guest-latency",
            Self::LinkQueue => "link-queue",
            Self::InterfaceBudget => "interface-budget",
        }
    }
}

/// Obstacle between an outgoing migration and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Obstacle {
    /// Whenever the migration resumes, the guest's latency comes near the promise.
    Promise,
    /// The guest writes as fast as delayed writes can be sent.
    WriteRate,
    /// The interface's other traffic leaves nothing of its budget.
    InterfaceBudget,
    /// The guest's writes alone take the migration's bandwidth.
    Bandwidth,
    /// At this rate the deadline will be missed.
    Deadline,
}

impl Obstacle {
    /// Returns the obstacle's name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Promise => "promise",
            Self::WriteRate => "write-rate",
            Self::InterfaceBudget => "interface-budget",
            Self::Bandwidth => "bandwidth",
            Self::Deadline => "deadline",
        }
    }
}

/// An event for people or the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The outgoing migration entered a phase.
    PhaseEntered {
        /// The migration.
        migration: MigrationId,
        /// The new phase.
        phase: Phase,
    },
    /// The outgoing migration pauses: the window is given up, copies stop, and with delayed writes double writes stop
    /// too.
    Paused {
        /// The migration.
        migration: MigrationId,
        /// Reason for the pause.
        reason: PauseReason,
    },
    /// The outgoing migration resumes.
    Resumed {
        /// The migration.
        migration: MigrationId,
    },
    /// The outgoing migration continues by push and pull, as ordered.
    PolicySwitched {
        /// The migration.
        migration: MigrationId,
    },
    /// The outgoing migration stopped approaching its end, or resumed the approach.
    Obstructed {
        /// The migration.
        migration: MigrationId,
        /// The obstacle, or `None` if there is none any more.
        obstacle: Option<Obstacle>,
    },
    /// The outgoing migration ended; this node continues to serve.
    MigrationAborted {
        /// The migration.
        migration: MigrationId,
        /// Reason for the end.
        reason: AbortReason,
        /// The differing extent, if the images differ.
        mismatch: Option<Extent>,
    },
    /// The outgoing migration is done: the destination serves. The body keeps the sync connection, which now carries
    /// forwarded I/O.
    MigrationCompleted {
        /// The migration.
        migration: MigrationId,
    },
    /// The destination follows a disk that stays here. From now on a write is acknowledged only once the destination has
    /// the write, and a loss of the destination is [`Event::Severed`].
    Followed {
        /// The migration.
        migration: MigrationId,
    },
    /// The destination that followed is lost. No request is answered until [`Controller::go_alone`] or
    /// [`Controller::yield_to`](crate::Controller::yield_to).
    ///
    /// [`Controller::go_alone`]: crate::Controller::go_alone
    Severed {
        /// The migration.
        migration: MigrationId,
        /// Reason for the loss.
        reason: AbortReason,
    },
    /// The disk follows here: this node has every write that the source has acknowledged so far. The end of a connection
    /// no longer ends the incoming migration: the body decides ([`Controller::take`](crate::Controller::take)).
    Follows {
        /// The migration.
        migration: MigrationId,
        /// The epoch in which the source serves.
        epoch: Epoch,
    },
    /// Every write of the source before the mark of this checkpoint is here, of a disk that follows with checkpoints.
    /// Later writes are kept apart until the body orders otherwise
    /// ([`Controller::apply_checkpoints`](crate::Controller::apply_checkpoints)).
    CheckpointMarked {
        /// The migration.
        migration: MigrationId,
        /// Number of the checkpoint.
        number: u64,
    },
    /// The incoming migration ended without this node becoming the owner. The image here is worthless.
    ReceiveAborted {
        /// The migration.
        migration: MigrationId,
        /// Reason for the end.
        reason: AbortReason,
    },
    /// The incoming migration is done: this node serves.
    ReceiveCompleted {
        /// The migration.
        migration: MigrationId,
    },
    /// The stored record of ownership changed, durably.
    AuthorityChanged {
        /// The new record.
        record: AuthorityRecord,
    },
    /// The sharing of the disk changed. The body stores the new value before any record that
    /// [`Action::Persist`](crate::action::Action::Persist) asks for later, gives the value to
    /// [`Controller::resume_forwarding`](crate::Controller::resume_forwarding) after a restart, and calls
    /// [`Controller::handle_sharing_stored`](crate::Controller::handle_sharing_stored).
    SharingChanged {
        /// True if more than one party may have written to the disk since its arrival here.
        shared: bool,
    },
    /// This node has given the disk away, and owes a part that the destination lacks. Until [`Event::OwesNothing`] the
    /// body keeps the disk unchanged and a connection to the owner up
    /// ([`Controller::handle_pull_up`](crate::Controller::handle_pull_up)).
    Owes {
        /// The migration.
        migration: MigrationId,
    },
    /// The owner has the whole disk: nothing more is needed from this node.
    OwesNothing {
        /// The migration.
        migration: MigrationId,
    },
    /// The whole disk is here: the source of the migration that brought the disk is no longer needed. The stored list
    /// of missing blocks can be removed.
    Whole {
        /// The migration.
        migration: MigrationId,
    },
    /// This node's image of the departed disk is durably the disk as of the switchover. The body may remember this base
    /// while nobody writes to the image, and has to forget the base durably before
    /// [`Controller::start_destination`](crate::Controller::start_destination). If the disk comes back, the base can be
    /// announced to the sending node ([`OlderCopy::Since`](crate::OlderCopy::Since)).
    BecameBase {
        /// The migration.
        migration: MigrationId,
    },
    /// The disk has left this node, which never had the whole image of the disk. The stored list of missing blocks can
    /// be removed.
    LeftImage {
        /// The id of the image in the disk's record.
        migration: MigrationId,
    },
    /// The node to which this node forwards no longer owns the disk. The body should close the forwarding connection,
    /// find the owner and call [`Controller::handle_forward_up`](crate::Controller::handle_forward_up).
    OwnerMoved,
    /// The controller needs a control connection to the other node of this migration to determine the owner of the
    /// disk. Repeated while needed.
    NeedPeer {
        /// The migration.
        migration: MigrationId,
    },
}
