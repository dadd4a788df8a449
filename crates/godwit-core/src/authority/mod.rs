//! Disk ownership: the protocol that moves a disk from one node to another exactly once.
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
//! Each record is durable before any consequence of the record is announced or carried out. Until the source stores
//! `Relinquished` the source may abort. An abort is final, because a migration's id is never reused. From `Accepted` on
//! the destination cannot know the outcome alone: the destination holds I/O and asks ([`Message::Query`]). The source
//! always knows the answer.
//!
//! The guest waits from the last write to the source until the destination serves. Two steps therefore overlap:
//!
//! - The flush and `Accepted` go to stable storage together; `Prepared` follows both. After a crash `Accepted` alone
//!   says nothing about the disk. The source has not given the disk away, because the source never received `Prepared`.
//! - The destination serves on receipt of `Commit`. The destination's epoch is already durable in `Accepted`, and the
//!   source's departure is durable at the source. A crash before `Serving` is stored leaves a doubt. The source
//!   resolves the doubt as before, because the source has not received `Committed`.
//!
//! A disk may change hands before the whole disk is at the destination. The missing part stays at the source, and both
//! records say so ([`AuthorityRecord::remainder`]): the destination serves but *lacks* the part, the source *owes* the
//! part. Only the destination knows when nothing is missing any more. The destination then stores this fact and answers
//! every [`Message::Owes`] with [`Message::Whole`].
//!
//! The machine is driven by [`Controller`](crate::Controller) and by a model checker in `tests/authority_model/`.

mod doubt;
mod effect;
mod record;
mod surpassed;
mod takeover;

pub use self::effect::Effect;
pub use self::record::{AuthorityRecord, Ownership};
use crate::event::AbortReason;
use crate::units::{Epoch, MigrationId};
use crate::wire::Message;

/// Progress of this node in an undecided migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Attempt {
    None,
    /// Source: asked the destination to accept.
    Preparing {
        migration: MigrationId,
        /// A part of the disk stays here.
        owes: bool,
        /// Any part missing at the destination is in an image.
        on_image: bool,
    },
    /// Destination: takes copies and double writes.
    Receiving {
        migration: MigrationId,
    },
    /// Destination: makes the received data durable and stores the acceptance.
    Accepting {
        migration: MigrationId,
        flushed: bool,
        /// The record that the acceptance replaces.
        before: AuthorityRecord,
    },
    /// Backup: makes the received data durable and stores its ownership in this epoch, without the source's word.
    Taking {
        migration: MigrationId,
        epoch: Epoch,
    },
    /// Destination: takes back an acceptance that is unannounced or was refused.
    Withdrawing {
        migration: MigrationId,
        reason: AbortReason,
        /// The record that replaces the acceptance.
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
    /// Another node's record shows that this node is no longer the owner.
    surpassed: bool,
}

impl Authority {
    /// Creates the machine of a node that starts or restarts with this record.
    pub const fn new(record: AuthorityRecord) -> Self {
        let confirmed = matches!(record.ownership, Ownership::Departed { .. });
        Self {
            record,
            storing: None,
            attempt: Attempt::None,
            confirmed,
            surpassed: false,
        }
    }

    /// Returns the durable record.
    pub const fn record(&self) -> AuthorityRecord {
        self.record
    }

    /// Notes that another node's record [surpasses](AuthorityRecord::is_surpassed_by) this node's record. From then on
    /// this node neither serves the disk nor gives the disk away until an operator decides.
    pub const fn surpass(&mut self) {
        self.surpassed = true;
    }

    /// Returns true if guest I/O may be served here: this node is the owner and is not giving the disk away.
    pub const fn may_serve(&self) -> bool {
        self.is_owner() || self.is_committed()
    }

    /// Returns true if this node is durably the owner and is not giving the disk away. The node may be storing the
    /// record of a whole disk.
    const fn is_owner(&self) -> bool {
        let keeps = match self.storing {
            None => true,
            Some(record) => matches!(record.ownership, Ownership::Serving),
        };
        matches!(self.record.ownership, Ownership::Serving) && keeps && !self.surpassed
    }

    /// Returns true if this node is the durable owner of the whole disk, and is not giving the disk away. Only such a
    /// node may begin to give the disk away.
    pub const fn is_settled(&self) -> bool {
        self.is_owner() && self.storing.is_none() && self.record.remainder.is_none()
    }

    /// Returns true if this node is the durable owner and is not giving the disk away. The disk may be whole, or lack a
    /// part held by an image: such a disk can move without this part.
    pub const fn may_leave_rest(&self) -> bool {
        self.is_owner() && self.storing.is_none()
    }

    /// Returns the migration whose source has a part of the disk that this node lacks, if this node serves or is about
    /// to serve.
    pub const fn lacks(&self) -> Option<MigrationId> {
        match self.storing {
            Some(record) if self.is_committed() => record.lacks(),
            _ => self.record.lacks(),
        }
    }

    /// Like [`Self::lacks`], but also covers a node that has accepted and awaits the decision.
    pub const fn lacks_or_will(&self) -> Option<MigrationId> {
        match self.record.ownership {
            Ownership::Serving | Ownership::Accepted { .. } => self.record.remainder,
            _ => None,
        }
    }

    /// Returns the migration whose destination lacks a part of the disk that this node has.
    pub const fn owes(&self) -> Option<MigrationId> {
        self.record.owes()
    }

    /// Destination: returns true once the source's decision is known and this node is storing its ownership.
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

    /// Returns the migration in doubt: this node cannot know alone who owns the disk, or has no confirmation from the
    /// new owner.
    pub const fn in_doubt(&self) -> Option<MigrationId> {
        match self.record.ownership {
            Ownership::Accepted { migration } if !self.is_committed() => Some(migration),
            Ownership::Relinquished { migration } if !self.confirmed => Some(migration),
            _ => None,
        }
    }

    /// Returns true if another node is known to own the disk.
    pub const fn is_elsewhere(&self) -> bool {
        match self.record.ownership {
            Ownership::Vacant | Ownership::Departed { .. } => true,
            Ownership::Relinquished { .. } => self.confirmed,
            Ownership::Serving | Ownership::Accepted { .. } => false,
        }
    }

    /// Returns true if this node has durably given the disk away, so that only another node can serve the disk, now or
    /// soon.
    pub const fn gave_away(&self) -> bool {
        matches!(self.record.ownership, Ownership::Relinquished { .. })
    }

    /// Source: asks the destination to accept the whole disk or, if the source `owes`, the disk without a part
    /// announced before. Does nothing unless this node is durably the owner and no other attempt is under way.
    pub fn prepare(&mut self, migration: MigrationId, owes: bool) -> Vec<Effect> {
        match self.is_settled() {
            true => self.ask(migration, owes, owes, false),
            false => Vec::new(),
        }
    }

    /// Source: like [`Self::prepare`], for a disk on an image. The destination `lacks` a part announced before and gets
    /// this part from the image, as this node may too. The source `owes` only the blocks announced as present here.
    pub fn prepare_on_image(
        &mut self,
        migration: MigrationId,
        lacks: bool,
        owes: bool,
    ) -> Vec<Effect> {
        match self.may_leave_rest() {
            true => self.ask(migration, lacks || owes, owes, true),
            false => Vec::new(),
        }
    }

    fn ask(
        &mut self,
        migration: MigrationId,
        lacks: bool,
        owes: bool,
        on_image: bool,
    ) -> Vec<Effect> {
        if self.attempt != Attempt::None {
            return Vec::new();
        }
        self.attempt = Attempt::Preparing {
            migration,
            owes,
            on_image,
        };
        vec![Effect::Send(Message::Prepare {
            migration,
            epoch: self.record.epoch.next(),
            shared: false,
            lacks,
        })]
    }

    /// Destination: notes that the whole disk is durably here. Does nothing unless this node is durably the owner and
    /// lacked a part.
    pub fn whole(&mut self) -> Vec<Effect> {
        if self.record.lacks().is_none() || self.storing.is_some() {
            return Vec::new();
        }
        self.store(self.record.epoch, Ownership::Serving, None)
    }

    /// Source: cancels the attempt. Returns false once the decision to give the disk away is being stored: from then on
    /// the migration can only succeed.
    pub fn cancel(&mut self) -> bool {
        if self.storing.is_some() || !matches!(self.record.ownership, Ownership::Serving) {
            return false;
        }
        self.attempt = Attempt::None;
        true
    }

    /// Source: notes that the decision to give the disk away was not stored and never will be. Returns false if the
    /// decision was not being stored.
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

    /// Destination: starts to take copies. Returns false unless the whole disk is known to be elsewhere.
    pub fn receive(&mut self, migration: MigrationId) -> bool {
        // A part owed by this node must stay unchanged.
        let free = self.is_elsewhere()
            && self.record.remainder.is_none()
            && self.storing.is_none()
            && self.attempt == Attempt::None;
        if free {
            self.attempt = Attempt::Receiving { migration };
        }
        free
    }

    /// Destination: returns the migration being received, until the source is told of the acceptance.
    pub const fn receiving(&self) -> Option<MigrationId> {
        match self.attempt {
            Attempt::Receiving { migration } | Attempt::Accepting { migration, .. } => {
                Some(migration)
            }
            _ => None,
        }
    }

    /// Destination: returns true if the source has asked for acceptance and has no answer yet. Nothing sent by the
    /// source from then on is part of the disk.
    pub const fn is_accepting(&self) -> bool {
        matches!(self.attempt, Attempt::Accepting { .. })
    }

    /// Destination: stops receiving for a local reason or because the source is gone. Has no effect unless a migration
    /// is being received ([`Authority::receiving`]): after the acceptance was announced only the source knows the
    /// outcome. A stored acceptance is taken back before [`Effect::ReceiveAborted`].
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
                self.restore(before)
            }
            _ => Vec::new(),
        }
    }

    /// Destination: notes that the received data is durable.
    pub fn flushed(&mut self) -> Vec<Effect> {
        match &mut self.attempt {
            Attempt::Accepting { flushed, .. } => *flushed = true,
            Attempt::Taking { epoch, .. } => {
                let epoch = *epoch;
                return self.store(epoch, Ownership::Serving, None);
            }
            _ => return Vec::new(),
        }
        self.accept()
    }

    /// Destination: announces the acceptance once both the disk and the record are durable.
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

    /// Notes that the record of the last [`Effect::Persist`] is durable.
    pub fn persisted(&mut self) -> Vec<Effect> {
        let Some(record) = self.storing.take() else {
            return Vec::new();
        };
        let before = core::mem::replace(&mut self.record, record);
        // Only an owner can be surpassed.
        self.surpassed &= record.ownership != Ownership::Vacant;
        if let Attempt::Withdrawing {
            migration,
            reason,
            before,
        } = self.attempt
        {
            if record.ownership == (Ownership::Accepted { migration }) {
                return self.restore(before);
            }
            self.attempt = Attempt::None;
            return vec![Effect::ReceiveAborted(migration, reason)];
        }
        if let Attempt::Taking { migration, .. } = self.attempt {
            self.attempt = Attempt::None;
            return vec![Effect::Owner(migration)];
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
            _ => match (before.remainder, record.remainder) {
                (Some(migration), None) if record.ownership == Ownership::Serving => {
                    vec![Effect::Whole(migration)]
                }
                (Some(migration), None) => vec![Effect::OwesNothing(migration)],
                _ => Vec::new(),
            },
        }
    }

    /// Handles a frame of this protocol from the other node of the migration. Other frames are ignored.
    pub fn handle(&mut self, message: &Message) -> Vec<Effect> {
        match *message {
            Message::Prepare {
                migration,
                epoch,
                lacks,
                ..
            } => self.handle_prepare(migration, epoch, lacks),
            Message::Prepared { migration } => match self.attempt {
                Attempt::Preparing {
                    migration: asked,
                    owes,
                    on_image,
                } if asked == migration
                    && (self.is_settled() || on_image && self.may_leave_rest()) =>
                {
                    self.store(
                        self.record.epoch.next(),
                        Ownership::Relinquished { migration },
                        owes.then_some(migration),
                    )
                }
                _ => Vec::new(),
            },
            Message::Commit { migration, epoch } => self.handle_commit(migration, epoch),
            Message::Committed { migration } => {
                if self.record.ownership != (Ownership::Relinquished { migration })
                    || self.confirmed
                {
                    return Vec::new();
                }
                self.confirmed = true;
                let mut effects = self.store(
                    self.record.epoch,
                    Ownership::Departed { migration },
                    self.record.remainder,
                );
                effects.push(Effect::Departed(migration));
                effects
            }
            Message::Owes { migration, .. } => self.handle_owes(migration),
            Message::Whole { migration } => {
                // The destination repeats `Whole`, so nothing is stored before this node has heard `Committed`.
                let departed = self.record.ownership == (Ownership::Departed { migration });
                if !departed || self.record.remainder.is_none() || self.storing.is_some() {
                    return Vec::new();
                }
                self.store(self.record.epoch, self.record.ownership, None)
            }
            Message::Query { migration } => self.handle_query(migration),
            Message::Abort { migration, reason } => self.handle_abort(migration, reason),
            _ => Vec::new(),
        }
    }

    /// Handles the source's claim to owe. If the claim is out of date, the source is told so.
    fn handle_owes(&self, migration: MigrationId) -> Vec<Effect> {
        let open = self.record.ownership == (Ownership::Accepted { migration });
        if open || self.storing.is_some() || self.record.remainder == Some(migration) {
            return Vec::new();
        }
        vec![Effect::Send(Message::Whole { migration })]
    }

    fn handle_prepare(&mut self, migration: MigrationId, epoch: Epoch, lacks: bool) -> Vec<Effect> {
        // A stored acceptance is not announced again: after a crash the stored acceptance does not imply a flushed
        // disk.
        if self.attempt != (Attempt::Receiving { migration }) {
            return Vec::new();
        }
        // No epoch follows the last epoch: a node that entered the last epoch could never give the disk away.
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
        effects.extend(self.store(
            epoch,
            Ownership::Accepted { migration },
            lacks.then_some(migration),
        ));
        effects
    }

    fn handle_commit(&mut self, migration: MigrationId, epoch: Epoch) -> Vec<Effect> {
        if self.storing.is_some() {
            return Vec::new();
        }
        if self.record.ownership == (Ownership::Accepted { migration }) {
            // The source commits only an announced acceptance.
            if self.attempt != Attempt::None {
                return Vec::new();
            }
            let mut effects =
                self.store(self.record.epoch, Ownership::Serving, self.record.remainder);
            effects.push(Effect::Owner(migration));
            return effects;
        }
        // The source commits only an acceptance of this node, so this frame is a repetition: this node has entered the
        // epoch, whatever happened since.
        if self.record.epoch >= epoch && self.attempt == Attempt::None {
            return vec![Effect::Send(Message::Committed { migration })];
        }
        Vec::new()
    }

    fn handle_abort(&mut self, migration: MigrationId, reason: AbortReason) -> Vec<Effect> {
        if self.receiving() == Some(migration) {
            return self.stop_receiving(reason);
        }
        if self.record.ownership == (Ownership::Accepted { migration }) && self.storing.is_none() {
            // The epoch goes back too: the source still serves the previous epoch, and may offer this epoch again under
            // another migration.
            let before = AuthorityRecord {
                epoch: Epoch(self.record.epoch.0 - 1),
                ownership: Ownership::Vacant,
                remainder: None,
            };
            self.attempt = Attempt::Withdrawing {
                migration,
                reason,
                before,
            };
            return self.restore(before);
        }
        Vec::new()
    }

    fn store(
        &mut self,
        epoch: Epoch,
        ownership: Ownership,
        remainder: Option<MigrationId>,
    ) -> Vec<Effect> {
        self.restore(AuthorityRecord {
            epoch,
            ownership,
            remainder,
        })
    }

    fn restore(&mut self, record: AuthorityRecord) -> Vec<Effect> {
        self.storing = Some(record);
        vec![Effect::Persist(record)]
    }
}
