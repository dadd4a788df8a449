//! Carries out what the authority machine decides, and keeps asking while it cannot.

use core::num::NonZeroU64;
use core::time::Duration;

use crate::action::Action;
use crate::authority::{Effect, Ownership};
use crate::controller::requests::forwarding::ForwardLink;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::{Controller, MAX_PULLED, Written};
use crate::event::{AbortReason, Event, Phase};
use crate::units::Time;
use crate::wire::{Message, TrafficClass};

/// How often an undecided node repeats its question.
const REMIND_EVERY: Duration = Duration::from_millis(500);

impl Controller {
    /// A connection of the current migration (any class) ended, except the one that carries
    /// forwarded I/O ([`Self::handle_forward_lost`]). Before the point of no return the migration
    /// aborts: copies and double writes that were not acknowledged are given up.
    pub fn handle_connection_lost(&mut self, now: Time, class: TrafficClass) {
        self.now = now;
        if class == TrafficClass::Control {
            self.control_up = false;
        }
        if self.source.is_some() && !self.abort_source(AbortReason::PeerLost) {
            // The disk is given away: what is left is to hear it confirmed.
            if class == TrafficClass::Sync
                && let Some(source) = &mut self.source
            {
                source.sync_up = false;
                if self.forward_link.is_there() {
                    self.forward_link = ForwardLink::Down;
                }
            }
        }
        let effects = self.authority.stop_receiving(AbortReason::PeerLost);
        self.apply(effects);
        self.run_ready();
    }

    /// A control connection to the other node of an undecided migration is up (again): see
    /// [`Event::NeedPeer`].
    pub fn handle_control_up(&mut self, now: Time) {
        self.now = now;
        self.control_up = true;
        self.remind();
        self.run_ready();
    }

    pub(super) fn authority_message(&mut self, message: &Message) {
        self.heard();
        if matches!(message, Message::Prepare { .. })
            && self.authority.receiving().is_some()
            && self.owes_answers()
        {
            self.cancel(self.now, AbortReason::Protocol);
            return;
        }
        if let Message::Abort { migration, reason } = *message
            && self
                .source
                .as_ref()
                .is_some_and(|source| source.options.migration == migration)
        {
            self.abort_source(reason);
            return;
        }
        if let Message::Prepare {
            shared,
            lacks,
            migration,
            ..
        } = *message
            && self.authority.receiving() == Some(migration)
            && !self.authority.is_accepting()
        {
            self.disk_comes(shared);
            if !self.comes_without(migration, lacks) {
                self.cancel(self.now, AbortReason::Protocol);
                return;
            }
        }
        if let Message::Prepared { migration } = *message
            && self.flushing_owed
            && let Some(source) = &mut self.source
        {
            // What this node will owe is not durable yet.
            source.accepted |= source.options.migration == migration;
            return;
        }
        let effects = self.authority.handle(message);
        if self.authority.in_doubt().is_some() && self.remind_at.is_none() {
            self.remind_at = Some(self.now.after(REMIND_EVERY));
        }
        self.apply(effects);
    }

    /// Another node's record shows that this node is the owner no more
    /// ([`AuthorityRecord::is_surpassed_by`](crate::authority::AuthorityRecord::is_surpassed_by)): clients' requests are held
    /// from now on, and a departure ends.
    pub fn surpass(&mut self, now: Time) {
        self.cancel(now, AbortReason::Cancelled);
        self.authority.surpass();
    }

    pub(super) fn apply(&mut self, effects: Vec<Effect>) {
        let mut committing = false;
        for effect in effects {
            match effect {
                Effect::Send(mut message) => {
                    if let Message::Prepare { shared, .. } = &mut message {
                        *shared = self.forwarding.is_shared();
                    }
                    self.send(TrafficClass::Control, message);
                }
                Effect::Flush => self.issue_barrier(),
                Effect::Persist(record) => {
                    if matches!(record.ownership, Ownership::Relinquished { .. }) {
                        self.enter_stage(Stage::Decided(Phase::Relinquishing));
                    }
                    self.act(Action::Persist { record });
                    #[cfg(feature = "planted-bugs")]
                    if self.has_bug(crate::PlantedBug::PersistAfterUse) {
                        self.used_early += 1;
                        let effects = self.authority.persisted();
                        self.apply(effects);
                    }
                }
                Effect::Relinquished(migration) => {
                    if self.authority.owes().is_some() {
                        let bound = self.source.as_ref().map(|it| it.options.max_bandwidth);
                        self.bound_owed(bound.flatten());
                        self.notify(Event::Owes { migration });
                    }
                    self.enter_stage(Stage::Decided(Phase::Committing));
                    self.remind_at = Some(self.now.after(REMIND_EVERY));
                    self.forwarding.gave_away();
                    self.leave_image();
                    committing = true;
                }
                Effect::Departed(migration) => {
                    let sync_up = self.follow_the_disk();
                    self.enter_stage(Stage::Decided(Phase::Completed));
                    // Otherwise this process may have come after a power loss, and the image have lost what was not
                    // flushed.
                    let was_here = self.source.is_some() && self.authority.owes().is_none();
                    self.complete_source();
                    self.written = None;
                    if was_here {
                        self.keep_as_base(migration);
                    }
                    self.notify(Event::MigrationCompleted { migration });
                    if !sync_up {
                        self.notify(Event::OwnerMoved);
                    }
                    self.release_held();
                }
                Effect::Whole(migration) => self.became_whole(migration),
                Effect::OwesNothing(migration) => {
                    self.owes_at = None;
                    self.notify(Event::OwesNothing { migration });
                    // It was flushed before the disk was given away.
                    self.keep_as_base(migration);
                }
                Effect::Owner(migration) => {
                    // An earlier process may have served the disk before it stored that it does.
                    let came_here = self.destination.take().is_some();
                    let fits = self.capacity.bytes() <= MAX_PULLED;
                    self.written =
                        (came_here && fits).then(|| Written::nothing(migration, self.capacity));
                    self.notify(Event::ReceiveCompleted { migration });
                    self.serves_clients();
                    self.pull();
                    if self.forward_link != ForwardLink::Up {
                        self.forward_link = ForwardLink::Absent;
                        self.take_back_forwarded();
                    }
                    // The one before does nothing more of what it was sent, and may never say so: what nobody
                    // waits for must not hold back what comes now.
                    self.give_up_abandoned();
                    self.release_held();
                }
                Effect::ReceiveAborted(migration, reason) => {
                    self.lacking = None;
                    self.notify(Event::ReceiveAborted { migration, reason });
                    self.release_held();
                }
            }
        }
        // After the word that makes the destination the owner, so that it has to hold nothing.
        if committing && self.follow_the_disk() {
            self.may_forward(false);
            self.release_held();
        }
        if self.authority.in_doubt().is_none() {
            self.remind_at = None;
        } else if self.remind_at.is_none() {
            self.remind_at = Some(self.now.after(REMIND_EVERY));
        }
    }

    /// The sync connection of the migration, if it is still up, carries clients' requests to the new
    /// owner. Whether it is.
    fn follow_the_disk(&mut self) -> bool {
        let sync_up = self.source.as_ref().is_some_and(|source| source.sync_up);
        self.forward_link = if sync_up {
            ForwardLink::Up
        } else {
            ForwardLink::Down
        };
        sync_up
    }

    /// The owner may pull at most so many bytes per second of what this node owes: what the migration was bound to. For a
    /// process that starts; a migration that ends in this one says so itself.
    pub fn bound_owed(&mut self, bytes_per_second: Option<u64>) {
        self.owed_bandwidth = bytes_per_second.and_then(NonZeroU64::new);
    }

    /// Tells the owner that this node owes a part of the disk, and does so again until the owner has it.
    pub(super) fn tell_of_debt(&mut self) {
        // One that was accepted leads to a node that owes by itself: what this node owes is owed to another.
        let leads_to_owner = self.pull_is_up && self.pull_dialled;
        let owed = self.authority.owes().filter(|_| leads_to_owner);
        self.owes_at = owed.map(|_| self.now.after(REMIND_EVERY));
        if let Some(migration) = owed {
            let max_bandwidth = self.owed_bandwidth;
            let owes = Message::Owes {
                migration,
                max_bandwidth,
            };
            self.send(TrafficClass::Pull, owes);
        }
    }

    pub(super) fn remind(&mut self) {
        let Some(migration) = self.authority.in_doubt() else {
            self.remind_at = None;
            return;
        };
        self.remind_at = Some(self.now.after(REMIND_EVERY));
        if !self.control_up {
            self.notify(Event::NeedPeer { migration });
        } else if let Some(message) = self.authority.remind() {
            self.send(TrafficClass::Control, message);
        }
    }
}
