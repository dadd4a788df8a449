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
//! A disk may change hands before all of it is at the destination. What the destination then lacks stays at the
//! source, and both records say so ([`AuthorityRecord::remainder`]): the destination serves, but *lacks*; the source
//! *owes*. It is the destination that knows when it lacks nothing any more. It stores so, and says [`Message::Whole`]
//! as often as the source says [`Message::Owes`].
//!
//! The machine is driven by [`Controller`](crate::Controller), and by a model checker in
//! `tests/authority_model/`.

mod effect;
mod record;
mod surpassed;

pub use self::effect::Effect;
pub use self::record::{AuthorityRecord, Ownership};
use crate::event::AbortReason;
use crate::units::{Epoch, MigrationId};
use crate::wire::Message;

/// How far this node is in a migration that is not decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Attempt {
    None,
    /// Source: asked the destination to accept.
    Preparing {
        migration: MigrationId,
        /// A part of the disk stays here.
        owes: bool,
        /// What the destination will lack, if it lacks anything, is in an image.
        on_image: bool,
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
    /// Another node's record shows that this node is the owner no more.
    surpassed: bool,
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
            surpassed: false,
        }
    }

    /// What is durable.
    pub const fn record(&self) -> AuthorityRecord {
        self.record
    }

    /// Another node's record [surpasses](AuthorityRecord::is_surpassed_by) this one's: nothing is served here any more, or
    /// given away, until an operator decides.
    pub const fn surpass(&mut self) {
        self.surpassed = true;
    }

    /// Whether guest I/O may be served here: the owner, and not giving the disk away.
    pub const fn may_serve(&self) -> bool {
        self.is_owner() || self.is_committed()
    }

    /// Whether this node is durably the owner, and is not giving the disk away. It may be storing that the disk is
    /// whole.
    const fn is_owner(&self) -> bool {
        let keeps = match self.storing {
            None => true,
            Some(record) => matches!(record.ownership, Ownership::Serving),
        };
        matches!(self.record.ownership, Ownership::Serving) && keeps && !self.surpassed
    }

    /// Whether this node has durably stored that it is the owner of the whole disk, and is not giving the disk
    /// away: only then may it begin to.
    pub const fn is_settled(&self) -> bool {
        self.is_owner() && self.storing.is_none() && self.record.remainder.is_none()
    }

    /// Whether this node has durably stored that it is the owner, of the whole disk or of one of which the rest is in
    /// an image, and is not giving the disk away: such a disk can move without that.
    pub const fn may_leave_rest(&self) -> bool {
        self.is_owner() && self.storing.is_none()
    }

    /// The migration whose source has a part of the disk that this node, which serves or is about to, lacks.
    pub const fn lacks(&self) -> Option<MigrationId> {
        match self.storing {
            Some(record) if self.is_committed() => record.lacks(),
            _ => self.record.lacks(),
        }
    }

    /// The same, also for a node that has accepted and waits to hear whether the disk is its own.
    pub const fn lacks_or_will(&self) -> Option<MigrationId> {
        match self.record.ownership {
            Ownership::Serving | Ownership::Accepted { .. } => self.record.remainder,
            _ => None,
        }
    }

    /// The migration whose destination lacks a part of the disk that this node has.
    pub const fn owes(&self) -> Option<MigrationId> {
        self.record.owes()
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

    /// Source: asks the destination to accept, all of the disk or, if the source `owes`, without a part of it that
    /// the destination was told of. Does nothing unless this node is durably the owner and no other attempt is
    /// under way.
    pub fn prepare(&mut self, migration: MigrationId, owes: bool) -> Vec<Effect> {
        match self.is_settled() {
            true => self.ask(migration, owes, owes, false),
            false => Vec::new(),
        }
    }

    /// Source: the same for a disk on an image, of which the destination `lacks` a part that it was told of and gets
    /// from the image, as this node may. The source `owes` what it has told to be here, and nothing else.
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

    /// Destination: all of the disk is here, durably, and stays so. Does nothing unless this node is durably the
    /// owner and lacked a part.
    pub fn whole(&mut self) -> Vec<Effect> {
        if self.record.lacks().is_none() || self.storing.is_some() {
            return Vec::new();
        }
        self.store(self.record.epoch, Ownership::Serving, None)
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

    /// Destination: starts to take copies. False unless the disk is known to be elsewhere, all of it.
    pub fn receive(&mut self, migration: MigrationId) -> bool {
        // What this node owes must stay as it is.
        let free = self.is_elsewhere()
            && self.record.remainder.is_none()
            && self.storing.is_none()
            && self.attempt == Attempt::None;
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
                self.restore(before)
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
                return self.restore(before);
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
            _ => match (before.remainder, record.remainder) {
                (Some(migration), None) if record.ownership == Ownership::Serving => {
                    vec![Effect::Whole(migration)]
                }
                (Some(migration), None) => vec![Effect::OwesNothing(migration)],
                _ => Vec::new(),
            },
        }
    }

    /// A frame of this protocol from the other node of the migration; others are ignored.
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
                // Before this node has heard that the destination serves, which will be repeated, there is nothing
                // to be stored.
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

    /// The source says that it owes. It is told if that is no longer so.
    fn handle_owes(&self, migration: MigrationId) -> Vec<Effect> {
        let open = self.record.ownership == (Ownership::Accepted { migration });
        if open || self.storing.is_some() || self.record.remainder == Some(migration) {
            return Vec::new();
        }
        vec![Effect::Send(Message::Whole { migration })]
    }

    fn handle_prepare(&mut self, migration: MigrationId, epoch: Epoch, lacks: bool) -> Vec<Effect> {
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
            // The source commits only what it was told of.
            if self.attempt != Attempt::None {
                return Vec::new();
            }
            let mut effects =
                self.store(self.record.epoch, Ownership::Serving, self.record.remainder);
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
        if matches!(self.attempt, Attempt::Preparing { migration: asked, .. } if asked == migration)
        {
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
