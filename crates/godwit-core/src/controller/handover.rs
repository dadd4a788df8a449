//! Carries out the authority machine's effects, and reminds the other node of an undecided migration.

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

/// Time between two reminders of an undecided node.
const REMIND_EVERY: Duration = Duration::from_millis(500);

impl Controller {
    /// Handles the end of a connection of the current migration (any class) other than the connection for forwarded I/O
    /// ([`Self::handle_forward_lost`]). Before the point of no return the migration aborts: unacknowledged copies and
    /// double writes are given up.
    pub fn handle_connection_lost(&mut self, now: Time, class: TrafficClass) {
        self.now = now;
        if class == TrafficClass::Control {
            self.control_up = false;
        }
        if self.source.is_some() && !self.abort_source(AbortReason::PeerLost) {
            // The disk is given away: only the confirmation is missing.
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

    /// Notes that a control connection to the other node of an undecided migration is up (again): see
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
            // This node's debt is not durable yet.
            source.accepted |= source.options.migration == migration;
            return;
        }
        let effects = self.authority.handle(message);
        if self.authority.in_doubt().is_some() && self.remind_at.is_none() {
            self.remind_at = Some(self.now.after(REMIND_EVERY));
        }
        self.apply(effects);
    }

    /// Notes that this node is no longer the owner according to another node's record
    /// ([`AuthorityRecord::is_surpassed_by`](crate::authority::AuthorityRecord::is_surpassed_by)). From now on clients'
    /// requests are held, and a departure ends.
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
                    // Otherwise this process may have started after a power loss, and the image may have lost unflushed
                    // data.
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
                    // The image was flushed before the disk was given away.
                    self.keep_as_base(migration);
                }
                Effect::Owner(migration) => {
                    // An earlier process may have served the disk before storing this fact.
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
                    // The previous owner carries out no more of the requests sent to it, and may never say so. Requests
                    // that nobody waits for must not hold back new requests.
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
        // The destination has received `Commit` before the first forwarded request, so the destination holds no
        // request.
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

    /// Lets the migration's sync connection, if still up, carry clients' requests to the new owner. Returns true if the
    /// connection is up.
    fn follow_the_disk(&mut self) -> bool {
        let sync_up = self.source.as_ref().is_some_and(|source| source.sync_up);
        self.forward_link = if sync_up {
            ForwardLink::Up
        } else {
            ForwardLink::Down
        };
        sync_up
    }

    /// Bounds the bytes per second that the owner may pull of this node's debt: the migration's own bound. For a
    /// process that starts; a migration that ends in this process sets the bound itself.
    pub fn bound_owed(&mut self, bytes_per_second: Option<u64>) {
        self.owed_bandwidth = bytes_per_second.and_then(NonZeroU64::new);
    }

    /// Tells the owner that this node owes a part of the disk. Repeated until the owner has the part.
    pub(super) fn tell_of_debt(&mut self) {
        // An accepted connection leads to a node that owes. This node's debt is owed to another node.
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
