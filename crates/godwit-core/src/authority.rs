//! Who owns a disk: the protocol that moves it from one node to another exactly once.
//!
//! ```text
//!  source                                   destination
//!  Serving(e)                               Vacant, receiving
//!    │── Prepare(m, e+1) ─────────────────────► │ flush the disk, store Accepted(m, e+1)
//!    │ ◄─────────────────────────── Prepared(m)─│
//!    │ store Relinquished(m, e+1)               │
//!    │── Commit(m, e+1) ──────────────────────► │ serve, store Serving(e+1)
//!    │ ◄────────────────────────── Committed(m)─│
//!    │ store Departed(m, e+1)                   │
//! ```
//!
//! Each record is durable before anything that follows from it is said or done. Until the source
//! stores `Relinquished` it may abort, and its abort is final, because a migration's id is never
//! used again. From `Accepted` on the destination cannot know the outcome by itself: it holds I/O
//! and asks ([`Message::Query`]); the source always knows the answer.
//!
//! The guest waits from the last write to the source until the destination serves, so nothing waits
//! in between that need not:
//!
//! - The flush and `Accepted` are on their way to stable storage together; `Prepared` follows both.
//!   `Accepted` alone, as a crash may leave it, therefore says nothing about the disk, and needs to
//!   say nothing: the source, which was not told, has not given the disk away.
//! - The destination serves as soon as it hears `Commit`. Its epoch is durable, in `Accepted`, and so
//!   is that the source has left it. A crash before `Serving` is stored leaves a doubt that the source
//!   resolves as it did before, because it has not heard `Committed`.
//!
//! The machine is driven by [`Controller`](crate::Controller), and by a model checker in
//! `tests/authority_model.rs`.

use crate::event::AbortReason;
use crate::units::{Epoch, MigrationId};
use crate::wire::Message;

/// What a node durably knows about its right to serve a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AuthorityRecord {
    /// The highest epoch this node has taken part in: the one it serves, will serve, or gave away.
    pub epoch: Epoch,
    /// Its part in it.
    pub ownership: Ownership,
}

/// A node's part in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// Not the owner, and no claim to become it.
    Vacant,
    /// The owner.
    Serving,
    /// Accepted the disk and waits to hear whether the source gave it away. Holds I/O until then.
    Accepted {
        /// By which migration.
        migration: MigrationId,
    },
    /// Gave the disk away and waits for the destination's confirmation. Holds I/O that it cannot
    /// forward.
    Relinquished {
        /// By which migration.
        migration: MigrationId,
    },
    /// Gave the disk away, confirmed.
    Departed {
        /// By which migration.
        migration: MigrationId,
    },
}

impl AuthorityRecord {
    /// Bytes that [`AuthorityRecord::to_bytes`] takes.
    pub const SIZE: usize = 25;

    /// The record of a disk that was created on this node.
    pub const fn created() -> Self {
        Self {
            epoch: Epoch(1),
            ownership: Ownership::Serving,
        }
    }

    /// The record of a disk that this node is about to receive for the first time.
    pub const fn vacant() -> Self {
        Self {
            epoch: Epoch(0),
            ownership: Ownership::Vacant,
        }
    }

    /// The form in which it is stored.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let (code, migration) = match self.ownership {
            Ownership::Vacant => (0, MigrationId::default()),
            Ownership::Serving => (1, MigrationId::default()),
            Ownership::Accepted { migration } => (2, migration),
            Ownership::Relinquished { migration } => (3, migration),
            Ownership::Departed { migration } => (4, migration),
        };
        let mut bytes = [0; Self::SIZE];
        bytes[0] = code;
        bytes[1..9].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[9..].copy_from_slice(&migration.0);
        bytes
    }

    /// Reads the stored form; `None` when it is not one.
    pub fn from_bytes(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        let epoch = Epoch(u64::from_le_bytes(*bytes[1..].first_chunk()?));
        let migration = MigrationId(*bytes[9..].first_chunk()?);
        let ownership = match bytes[0] {
            0 => Ownership::Vacant,
            1 => Ownership::Serving,
            2 => Ownership::Accepted { migration },
            3 => Ownership::Relinquished { migration },
            4 => Ownership::Departed { migration },
            _ => return None,
        };
        Some(Self { epoch, ownership })
    }
}

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
}

/// How far this node is in a migration that is not decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Attempt {
    None,
    /// Source: asked the destination to accept.
    Preparing {
        migration: MigrationId,
    },
    /// Destination: takes copies and double writes.
    Receiving {
        migration: MigrationId,
    },
    /// Destination: makes what it received durable, and stores that it accepts.
    Accepting {
        migration: MigrationId,
        flushed: bool,
        /// The record that this one replaces.
        before: AuthorityRecord,
    },
    /// Destination: takes back an acceptance that it has not told anybody, or that was refused.
    Withdrawing {
        migration: MigrationId,
        reason: AbortReason,
        /// The record that takes the acceptance's place.
        before: AuthorityRecord,
    },
}

/// The authority machine of one disk on one node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Authority {
    record: AuthorityRecord,
    storing: Option<AuthorityRecord>,
    attempt: Attempt,
    confirmed: bool,
}

impl Authority {
    /// The machine of a node that starts (again) with this record.
    pub const fn new(record: AuthorityRecord) -> Self {
        let confirmed = matches!(record.ownership, Ownership::Departed { .. });
        Self {
            record,
            storing: None,
            attempt: Attempt::None,
            confirmed,
        }
    }

    /// What is durable.
    pub const fn record(&self) -> AuthorityRecord {
        self.record
    }

    /// Whether guest I/O may be served here: the owner, and not giving the disk away.
    pub const fn may_serve(&self) -> bool {
        self.is_settled() || self.is_committed()
    }

    /// Whether this node has durably stored that it is the owner, and is not giving the disk away:
    /// only then may it begin to.
    pub const fn is_settled(&self) -> bool {
        matches!(self.record.ownership, Ownership::Serving) && self.storing.is_none()
    }

    /// Destination: whether it has heard that the source gave the disk away, and stores that it owns
    /// it.
    const fn is_committed(&self) -> bool {
        let storing = matches!(
            self.storing,
            Some(AuthorityRecord {
                ownership: Ownership::Serving,
                ..
            })
        );
        storing && matches!(self.record.ownership, Ownership::Accepted { .. })
    }

    /// Whether this node cannot know by itself who owns the disk, or has not been told that the
    /// new owner knows.
    pub const fn in_doubt(&self) -> Option<MigrationId> {
        match self.record.ownership {
            Ownership::Accepted { migration } if !self.is_committed() => Some(migration),
            Ownership::Relinquished { migration } if !self.confirmed => Some(migration),
            _ => None,
        }
    }

    /// Whether another node is known to own the disk.
    pub const fn is_elsewhere(&self) -> bool {
        match self.record.ownership {
            Ownership::Vacant | Ownership::Departed { .. } => true,
            Ownership::Relinquished { .. } => self.confirmed,
            Ownership::Serving | Ownership::Accepted { .. } => false,
        }
    }

    /// Whether this node has durably given the disk away, so that only another one can serve it, now
    /// or soon.
    pub const fn gave_away(&self) -> bool {
        matches!(self.record.ownership, Ownership::Relinquished { .. })
    }

    /// Source: asks the destination to accept. Does nothing unless this node is durably the owner
    /// and no other attempt is under way.
    pub fn prepare(&mut self, migration: MigrationId) -> Vec<Effect> {
        if !self.is_settled() || self.attempt != Attempt::None {
            return Vec::new();
        }
        self.attempt = Attempt::Preparing { migration };
        vec![Effect::Send(Message::Prepare {
            migration,
            epoch: self.record.epoch.next(),
            shared: false,
        })]
    }

    /// Source: gives the attempt up. False once the decision to give the disk away is being
    /// stored: from then on the migration can only succeed.
    pub fn cancel(&mut self) -> bool {
        if self.storing.is_some() || !matches!(self.record.ownership, Ownership::Serving) {
            return false;
        }
        self.attempt = Attempt::None;
        true
    }

    /// Source: the decision to give the disk away was not stored and never will be. False when it
    /// was not being stored.
    pub fn keep(&mut self) -> bool {
        let undecided = matches!(
            self.storing,
            Some(AuthorityRecord {
                ownership: Ownership::Relinquished { .. },
                ..
            })
        );
        if undecided {
            self.storing = None;
            self.attempt = Attempt::None;
        }
        undecided
    }

    /// Destination: starts to take copies. False unless the disk is known to be elsewhere.
    pub fn receive(&mut self, migration: MigrationId) -> bool {
        let free = self.is_elsewhere() && self.storing.is_none() && self.attempt == Attempt::None;
        if free {
            self.attempt = Attempt::Receiving { migration };
        }
        free
    }

    /// Destination: the migration that is being received, before the source is told that it is
    /// accepted.
    pub const fn receiving(&self) -> Option<MigrationId> {
        match self.attempt {
            Attempt::Receiving { migration } | Attempt::Accepting { migration, .. } => {
                Some(migration)
            }
            _ => None,
        }
    }

    /// Destination: whether the source has asked for acceptance, which has not been answered. Nothing
    /// that it sends from then on is part of the disk.
    pub const fn is_accepting(&self) -> bool {
        matches!(self.attempt, Attempt::Accepting { .. })
    }

    /// Destination: stops receiving for a reason found here or because the source is gone. Has no
    /// effect unless something is being received ([`Authority::receiving`]): once the source was told
    /// that it is accepted only the source knows. What was stored of the acceptance is taken back
    /// before [`Effect::ReceiveAborted`].
    pub fn stop_receiving(&mut self, reason: AbortReason) -> Vec<Effect> {
        match self.attempt {
            Attempt::Receiving { migration } => {
                self.attempt = Attempt::None;
                vec![Effect::ReceiveAborted(migration, reason)]
            }
            Attempt::Accepting {
                migration, before, ..
            } => {
                self.attempt = Attempt::Withdrawing {
                    migration,
                    reason,
                    before,
                };
                if self.storing.is_some() {
                    return Vec::new();
                }
                self.store(before.epoch, before.ownership)
            }
            _ => Vec::new(),
        }
    }

    /// Destination: what was received is durable.
    pub fn flushed(&mut self) -> Vec<Effect> {
        match &mut self.attempt {
            Attempt::Accepting { flushed, .. } => *flushed = true,
            _ => return Vec::new(),
        }
        self.accept()
    }

    /// Destination: says that it has accepted once both the disk and the record are durable.
    fn accept(&mut self) -> Vec<Effect> {
        match self.attempt {
            Attempt::Accepting {
                migration,
                flushed: true,
                ..
            } if self.storing.is_none() => {
                self.attempt = Attempt::None;
                vec![Effect::Send(Message::Prepared { migration })]
            }
            _ => Vec::new(),
        }
    }

    /// The record given with the last [`Effect::Persist`] is durable.
    pub fn persisted(&mut self) -> Vec<Effect> {
        let Some(record) = self.storing.take() else {
            return Vec::new();
        };
        let before = core::mem::replace(&mut self.record, record);
        if let Attempt::Withdrawing {
            migration,
            reason,
            before,
        } = self.attempt
        {
            if record.ownership == (Ownership::Accepted { migration }) {
                return self.store(before.epoch, before.ownership);
            }
            self.attempt = Attempt::None;
            return vec![Effect::ReceiveAborted(migration, reason)];
        }
        match (before.ownership, record.ownership) {
            (_, Ownership::Relinquished { migration }) => {
                self.attempt = Attempt::None;
                self.confirmed = false;
                vec![
                    Effect::Relinquished(migration),
                    Effect::Send(Message::Commit {
                        migration,
                        epoch: record.epoch,
                    }),
                ]
            }
            (_, Ownership::Accepted { .. }) => self.accept(),
            (Ownership::Accepted { migration }, Ownership::Serving) => {
                vec![Effect::Send(Message::Committed { migration })]
            }
            _ => Vec::new(),
        }
    }

    /// A frame of this protocol from the other node of the migration; others are ignored.
    pub fn handle(&mut self, message: &Message) -> Vec<Effect> {
        match *message {
            Message::Prepare {
                migration, epoch, ..
            } => self.handle_prepare(migration, epoch),
            Message::Prepared { migration } => {
                if self.attempt == (Attempt::Preparing { migration }) && self.is_settled() {
                    self.store(
                        self.record.epoch.next(),
                        Ownership::Relinquished { migration },
                    )
                } else {
                    Vec::new()
                }
            }
            Message::Commit { migration, epoch } => self.handle_commit(migration, epoch),
            Message::Committed { migration } => {
                if self.record.ownership != (Ownership::Relinquished { migration })
                    || self.confirmed
                {
                    return Vec::new();
                }
                self.confirmed = true;
                let mut effects = self.store(self.record.epoch, Ownership::Departed { migration });
                effects.push(Effect::Departed(migration));
                effects
            }
            Message::Query { migration } => self.handle_query(migration),
            Message::Abort { migration, reason } => self.handle_abort(migration, reason),
            _ => Vec::new(),
        }
    }

    /// What to say again while the outcome is open: called when a control connection is up, and
    /// from time to time while it is.
    pub fn remind(&self) -> Option<Message> {
        if self.storing.is_some() {
            return None;
        }
        match self.record.ownership {
            Ownership::Accepted { migration } => Some(Message::Query { migration }),
            Ownership::Relinquished { migration } if !self.confirmed => Some(Message::Commit {
                migration,
                epoch: self.record.epoch,
            }),
            _ => None,
        }
    }

    fn handle_prepare(&mut self, migration: MigrationId, epoch: Epoch) -> Vec<Effect> {
        // It is not answered again from a stored acceptance: after a crash that does not say that the
        // disk was flushed.
        if self.attempt != (Attempt::Receiving { migration }) {
            return Vec::new();
        }
        // No epoch follows the last one: a node that entered it could never give the disk away.
        if epoch <= self.record.epoch || epoch == Epoch(u64::MAX) {
            self.attempt = Attempt::None;
            let reason = AbortReason::Protocol;
            return vec![
                Effect::ReceiveAborted(migration, reason),
                Effect::Send(Message::Abort { migration, reason }),
            ];
        }
        self.attempt = Attempt::Accepting {
            migration,
            flushed: false,
            before: self.record,
        };
        let mut effects = vec![Effect::Flush];
        effects.extend(self.store(epoch, Ownership::Accepted { migration }));
        effects
    }

    fn handle_commit(&mut self, migration: MigrationId, epoch: Epoch) -> Vec<Effect> {
        if self.storing.is_some() {
            return Vec::new();
        }
        if self.record.ownership == (Ownership::Accepted { migration }) {
            // The source commits only what it was told of.
            if self.attempt != Attempt::None {
                return Vec::new();
            }
            let mut effects = self.store(self.record.epoch, Ownership::Serving);
            effects.push(Effect::Owner(migration));
            return effects;
        }
        // The source commits only what this node accepted, so this is a repetition: the epoch was
        // entered here, whatever happened since.
        if self.record.epoch >= epoch && self.attempt == Attempt::None {
            return vec![Effect::Send(Message::Committed { migration })];
        }
        Vec::new()
    }

    fn handle_query(&mut self, migration: MigrationId) -> Vec<Effect> {
        let gave_away = matches!(self.record.ownership,
            Ownership::Relinquished { migration: m } | Ownership::Departed { migration: m }
                if m == migration);
        if gave_away {
            return vec![Effect::Send(Message::Commit {
                migration,
                epoch: self.record.epoch,
            })];
        }
        if self.attempt == (Attempt::Preparing { migration }) {
            return Vec::new();
        }
        vec![Effect::Send(Message::Abort {
            migration,
            reason: AbortReason::Cancelled,
        })]
    }

    fn handle_abort(&mut self, migration: MigrationId, reason: AbortReason) -> Vec<Effect> {
        if self.receiving() == Some(migration) {
            return self.stop_receiving(reason);
        }
        if self.record.ownership == (Ownership::Accepted { migration }) && self.storing.is_none() {
            // The epoch goes back with it: the source still serves the one before, and may offer this
            // one again under another migration.
            let before = AuthorityRecord {
                epoch: Epoch(self.record.epoch.0 - 1),
                ownership: Ownership::Vacant,
            };
            self.attempt = Attempt::Withdrawing {
                migration,
                reason,
                before,
            };
            return self.store(before.epoch, before.ownership);
        }
        Vec::new()
    }

    fn store(&mut self, epoch: Epoch, ownership: Ownership) -> Vec<Effect> {
        let record = AuthorityRecord { epoch, ownership };
        self.storing = Some(record);
        vec![Effect::Persist(record)]
    }
}
