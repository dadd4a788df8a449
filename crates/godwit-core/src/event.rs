//! Progress and milestones, for people and metrics.

use crate::authority::AuthorityRecord;
use crate::request::RequestError;
use crate::units::{Extent, MigrationId};

/// What a migration is doing, as its source sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The first pass: every chunk goes to the destination once.
    Copying,
    /// Both images are read again, chunk by chunk, and their hashes compared.
    Verifying,
    /// The destination has everything but what is in flight: only double writes go on, until the
    /// body says that the guest has stopped ([`Switchover::WhenTold`](crate::Switchover)).
    Converged,
    /// New guest I/O is held while what is in flight finishes.
    Draining,
    /// The destination is asked to accept the next epoch.
    Preparing,
    /// The destination accepted; the source is storing that it gave the disk away.
    Relinquishing,
    /// The source gave the disk away and waits for the destination to confirm.
    Committing,
    /// The destination serves.
    Completed,
    /// The migration ended and the source still serves.
    Aborted,
}

impl Phase {
    /// The phase's name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copying => "copying",
            Self::Verifying => "verifying",
            Self::Converged => "converged",
            Self::Draining => "draining",
            Self::Preparing => "preparing",
            Self::Relinquishing => "relinquishing",
            Self::Committing => "committing",
            Self::Completed => "completed",
            Self::Aborted => "aborted",
        }
    }
}

/// Why a migration ended without moving the disk. The source serves on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum AbortReason {
    /// Somebody asked for it.
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
    /// The other node ended it for a reason of its own.
    #[error("the other node ended it")]
    Refused,
}

impl AbortReason {
    /// The number that stands for the reason in an abort frame.
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

    /// Why a migration ends whose destination answered with this error.
    pub(crate) const fn of_destination(error: RequestError) -> Self {
        match error {
            RequestError::NoSpace => Self::DestinationNoSpace,
            _ => Self::DestinationDisk,
        }
    }

    /// The reason that a frame's number stands for; unknown numbers are [`Self::Refused`].
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

/// Why an outgoing migration pauses (Alg. 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PauseReason {
    /// A request of the guest waited for the migration about as long as it was promised to take
    /// (`PAUSE_TH`).
    GuestLatency,
    /// What is queued on the sync connection would take that long to be delivered.
    LinkQueue,
    /// The interface carries more than its budget.
    InterfaceBudget,
}

impl PauseReason {
    /// All reasons.
    pub const ALL: [Self; 3] = [Self::GuestLatency, Self::LinkQueue, Self::InterfaceBudget];

    /// The reason's name in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GuestLatency => "guest-latency",
            Self::LinkQueue => "link-queue",
            Self::InterfaceBudget => "interface-budget",
        }
    }
}

/// What keeps an outgoing migration from coming to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Obstacle {
    /// Whenever it goes on, the guest's latency comes near what was promised.
    Promise,
    /// The guest writes as fast as delayed writes can be sent.
    WriteRate,
    /// The rest of the interface's traffic leaves nothing of its budget.
    InterfaceBudget,
    /// The guest's writes alone take the bandwidth that the migration may take.
    Bandwidth,
    /// At this rate the deadline will be missed.
    Deadline,
}

impl Obstacle {
    /// The obstacle's name in lower case.
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

/// Something happened that people or the node want to know of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The outgoing migration entered a phase.
    PhaseEntered {
        /// Which migration.
        migration: MigrationId,
        /// What it does now.
        phase: Phase,
    },
    /// The outgoing migration pauses: the window is given up, copies stop, and with delayed writes
    /// so do double writes.
    Paused {
        /// Which migration.
        migration: MigrationId,
        /// Why.
        reason: PauseReason,
    },
    /// The outgoing migration goes on.
    Resumed {
        /// Which migration.
        migration: MigrationId,
    },
    /// The outgoing migration goes on by push and pull, as it was told.
    PolicySwitched {
        /// Which migration.
        migration: MigrationId,
    },
    /// The outgoing migration stopped coming nearer to its end, or does again.
    Obstructed {
        /// Which migration.
        migration: MigrationId,
        /// What keeps it, or nothing any more.
        obstacle: Option<Obstacle>,
    },
    /// The outgoing migration ended; this node serves on.
    MigrationAborted {
        /// Which migration.
        migration: MigrationId,
        /// Why.
        reason: AbortReason,
        /// Where the images differ, when that is the reason.
        mismatch: Option<Extent>,
    },
    /// The outgoing migration is done: the destination serves. The body keeps the sync connection,
    /// which now carries forwarded I/O.
    MigrationCompleted {
        /// Which migration.
        migration: MigrationId,
    },
    /// The incoming migration ended without this node becoming the owner. The image here is
    /// worthless.
    ReceiveAborted {
        /// Which migration.
        migration: MigrationId,
        /// Why.
        reason: AbortReason,
    },
    /// The incoming migration is done: this node serves.
    ReceiveCompleted {
        /// Which migration.
        migration: MigrationId,
    },
    /// What is stored about who owns the disk changed, durably.
    AuthorityChanged {
        /// What is stored now.
        record: AuthorityRecord,
    },
    /// Whether more than one party may have written to the disk since it came here. The body stores it,
    /// before any record that [`Action::Persist`](crate::action::Action::Persist) asks for later, gives it
    /// to [`Controller::resume_forwarding`](crate::Controller::resume_forwarding) when it starts again, and
    /// calls [`Controller::handle_sharing_stored`](crate::Controller::handle_sharing_stored).
    SharingChanged {
        /// It is so.
        shared: bool,
    },
    /// This node has given the disk away, and the destination lacks a part of it, which this node owes: until
    /// [`Event::OwesNothing`] the body keeps the disk as it is, and a connection to the owner up
    /// ([`Controller::handle_pull_up`](crate::Controller::handle_pull_up)).
    Owes {
        /// Which migration.
        migration: MigrationId,
    },
    /// The owner has all of the disk: nothing of it is needed here.
    OwesNothing {
        /// Which migration.
        migration: MigrationId,
    },
    /// All of the disk is here: the source of the migration that brought it is not needed any more. What was stored
    /// of what the disk lacks can be removed.
    Whole {
        /// Which migration.
        migration: MigrationId,
    },
    /// This node's image of the disk, which has left, is durably what the disk was when it changed hands by this
    /// migration. The body may remember that as long as nobody writes to the image, and has to forget it durably before
    /// [`Controller::start_destination`](crate::Controller::start_destination). If the disk comes back it can be told
    /// to the node that sends it ([`OlderCopy::Since`](crate::OlderCopy::Since)).
    BecameBase {
        /// Which migration.
        migration: MigrationId,
    },
    /// The disk has left this node and did not have all of the image that it was created from. What was stored of what
    /// it lacked can be removed.
    LeftImage {
        /// What stood for the image in the disk's record.
        migration: MigrationId,
    },
    /// The node to which this one forwards does not own the disk any more: the body should close
    /// the forwarding connection, find the owner and call
    /// [`Controller::handle_forward_up`](crate::Controller::handle_forward_up).
    OwnerMoved,
    /// The controller needs a control connection to the other node of this migration to find out
    /// who owns the disk. Repeated while it is needed.
    NeedPeer {
        /// Which migration.
        migration: MigrationId,
    },
}
