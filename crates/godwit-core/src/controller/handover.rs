//! Carries out the authority machine's effects, and reminds the other node of an undecided migration.

use core::num::NonZeroU64;
use core::time::Duration;

use crate::action::Action;
use crate::authority::{Authority, Effect, Ownership};
use crate::controller::cx::Cx;
use crate::controller::requests::Answers;
use crate::controller::requests::forwarding::ForwardLink;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::transfer::remainder::PullLink;
use crate::controller::{Controller, MAX_PULLED, Written};
use crate::event::{AbortReason, Event, Phase};
use crate::units::{MigrationId, Time};
use crate::wire::{Message, TrafficClass};

/// Time between two reminders of an undecided node.
const REMIND_EVERY: Duration = Duration::from_millis(500);

/// Reminders of an undecided migration.
#[derive(Debug)]
pub(super) struct Doubt {
    /// True while a control connection is up.
    pub(super) control_up: bool,
    /// Time of the next reminder.
    pub(super) remind_at: Option<Time>,
}

impl Doubt {
    pub(super) fn new(authority: &Authority) -> Self {
        Self {
            control_up: false,
            remind_at: authority.in_doubt().map(|_| Time(0)),
        }
    }

    pub(super) fn remind(&mut self, cx: &mut Cx) {
        let Some(migration) = cx.authority.in_doubt() else {
            self.remind_at = None;
            return;
        };
        self.remind_at = Some(cx.now.after(REMIND_EVERY));
        if !self.control_up {
            cx.notify(Event::NeedPeer { migration });
        } else if let Some(message) = cx.authority.remind() {
            cx.send(TrafficClass::Control, message);
        }
    }
}

impl Controller {
    /// Handles the end of a connection of the current migration (any class) other than the connection for forwarded I/O
    /// ([`Self::handle_forward_lost`]). Before the point of no return the migration aborts: unacknowledged copies and
    /// double writes are given up.
    pub fn handle_connection_lost(&mut self, now: Time, class: TrafficClass) {
        self.cx.now = now;
        if class == TrafficClass::Control {
            self.doubt.control_up = false;
        }
        if self.outgoing.source.is_some() && !self.abort_source(AbortReason::PeerLost) {
            // The disk is given away: only the confirmation is missing.
            if class == TrafficClass::Sync
                && let Some(source) = &mut self.outgoing.source
            {
                source.peer.sync_up = false;
                if self.forwarding.link.is_there() {
                    self.forwarding.link = ForwardLink::Down;
                }
            }
        }
        if !self.follows() {
            let effects = self.cx.authority.stop_receiving(AbortReason::PeerLost);
            self.apply(effects);
        }
        self.run_ready();
    }

    /// Notes that a control connection to the other node of an undecided migration is up (again): see
    /// [`Event::NeedPeer`].
    pub fn handle_control_up(&mut self, now: Time) {
        self.cx.now = now;
        self.doubt.control_up = true;
        self.doubt.remind(&mut self.cx);
        self.run_ready();
    }

    pub(super) fn authority_message(&mut self, message: &Message) {
        self.heard();
        if matches!(message, Message::Prepare { .. })
            && self.cx.authority.receiving().is_some()
            && (self.owes_answers() || self.follows())
        {
            self.cancel(self.cx.now, AbortReason::Protocol);
            return;
        }
        if let Message::Abort { migration, reason } = *message
            && self
                .outgoing
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
            && self.cx.authority.receiving() == Some(migration)
            && !self.cx.authority.is_accepting()
        {
            self.forwarding.disk_comes(&mut self.cx, shared);
            if !self.comes_without(migration, lacks) {
                self.cancel(self.cx.now, AbortReason::Protocol);
                return;
            }
        }
        if let Message::Prepared { migration } = *message
            && self.outgoing.flushing_owed
            && let Some(source) = &mut self.outgoing.source
        {
            // This node's debt is not durable yet.
            source.handover.accepted |= source.options.migration == migration;
            return;
        }
        let effects = self.cx.authority.handle(message);
        if self.cx.authority.in_doubt().is_some() && self.doubt.remind_at.is_none() {
            self.doubt.remind_at = Some(self.cx.now.after(REMIND_EVERY));
        }
        self.apply(effects);
    }

    /// Notes that this node is no longer the owner according to another node's record
    /// ([`AuthorityRecord::is_surpassed_by`](crate::authority::AuthorityRecord::is_surpassed_by)). From now on clients'
    /// requests are held, and a departure ends.
    pub fn surpass(&mut self, now: Time) {
        self.cancel(now, AbortReason::Cancelled);
        self.cx.authority.surpass();
    }

    pub(super) fn apply(&mut self, effects: Vec<Effect>) {
        let mut committing = false;
        for effect in effects {
            match effect {
                Effect::Send(mut message) => {
                    if let Message::Prepare { shared, .. } = &mut message {
                        *shared = self.forwarding.is_shared();
                    }
                    self.cx.send(TrafficClass::Control, message);
                }
                Effect::Flush => self.issue_barrier(),
                Effect::Persist(record) => {
                    if matches!(record.ownership, Ownership::Relinquished { .. }) {
                        self.outgoing
                            .enter_stage(&mut self.cx, Stage::Decided(Phase::Relinquishing));
                    }
                    self.cx.act(Action::Persist { record });
                    #[cfg(feature = "planted-bugs")]
                    if self.cx.has_bug(crate::PlantedBug::PersistAfterUse) {
                        self.cx.used_early += 1;
                        let effects = self.cx.authority.persisted();
                        self.apply(effects);
                    }
                }
                Effect::Relinquished(migration) => {
                    self.relinquished(migration);
                    committing = true;
                }
                Effect::Departed(migration) => self.departed(migration),
                Effect::Whole(migration) => self.became_whole(migration),
                Effect::OwesNothing(migration) => {
                    self.owing.tell_at = None;
                    self.cx.notify(Event::OwesNothing { migration });
                    // The image was flushed before the disk was given away.
                    self.differences.base.keep_as_base(&mut self.cx, migration);
                }
                Effect::Owner(migration) => self.became_owner(migration),
                Effect::ReceiveAborted(migration, reason) => {
                    self.lacking = None;
                    self.drop_kept();
                    self.cx.notify(Event::ReceiveAborted { migration, reason });
                    self.release_held();
                }
            }
        }
        // The destination has received `Commit` before the first forwarded request, so the destination holds no
        // request.
        if committing && self.follow_the_disk() {
            self.forwarding.may_forward(&mut self.cx, false);
            self.release_held();
        }
        if self.cx.authority.in_doubt().is_none() {
            self.doubt.remind_at = None;
        } else if self.doubt.remind_at.is_none() {
            self.doubt.remind_at = Some(self.cx.now.after(REMIND_EVERY));
        }
    }

    /// Notes that the stored record gives the disk away.
    fn relinquished(&mut self, migration: MigrationId) {
        if self.cx.authority.owes().is_some() {
            let bound = self
                .outgoing
                .source
                .as_ref()
                .map(|it| it.options.max_bandwidth);
            self.bound_owed(bound.flatten());
            self.cx.notify(Event::Owes { migration });
        }
        self.outgoing
            .enter_stage(&mut self.cx, Stage::Decided(Phase::Committing));
        self.doubt.remind_at = Some(self.cx.now.after(REMIND_EVERY));
        self.forwarding.gave_away();
        self.leave_image();
    }

    /// Ends a migration whose destination serves the disk.
    fn departed(&mut self, migration: MigrationId) {
        let sync_up = self.follow_the_disk();
        self.outgoing
            .enter_stage(&mut self.cx, Stage::Decided(Phase::Completed));
        // Otherwise this process may have started after a power loss, and the image may have lost unflushed data.
        let was_here = self.outgoing.source.is_some() && self.cx.authority.owes().is_none();
        self.outgoing.complete_source(&mut self.cx);
        self.differences.written = None;
        if was_here {
            self.differences.base.keep_as_base(&mut self.cx, migration);
        }
        self.cx.notify(Event::MigrationCompleted { migration });
        if !sync_up {
            self.cx.notify(Event::OwnerMoved);
        }
        self.release_held();
    }

    /// Begins to serve a disk that this migration brought.
    fn became_owner(&mut self, migration: MigrationId) {
        self.requests.answers = Answers::Flow;
        // An earlier process may have served the disk before storing this fact.
        let came_here = self.destination.take().is_some();
        let fits = self.cx.capacity.bytes() <= MAX_PULLED;
        self.differences.written =
            (came_here && fits).then(|| Written::nothing(migration, self.cx.capacity));
        self.cx.notify(Event::ReceiveCompleted { migration });
        self.forwarding.serves_clients(&mut self.cx);
        self.pull();
        if self.forwarding.link != ForwardLink::Up {
            self.forwarding.link = ForwardLink::Absent;
            self.take_back_forwarded();
        }
        // The previous owner carries out no more of the requests sent to it, and may never say so. Requests that nobody
        // waits for must not hold back new requests.
        self.give_up_abandoned();
        self.release_held();
    }

    /// Lets the migration's sync connection, if still up, carry clients' requests to the new owner. Returns true if the
    /// connection is up.
    fn follow_the_disk(&mut self) -> bool {
        let sync_up = self
            .outgoing
            .source
            .as_ref()
            .is_some_and(|source| source.peer.sync_up);
        self.forwarding.link = if sync_up {
            ForwardLink::Up
        } else {
            ForwardLink::Down
        };
        sync_up
    }

    /// Bounds the bytes per second that the owner may pull of this node's debt: the migration's own bound. For a
    /// process that starts; a migration that ends in this process sets the bound itself.
    pub fn bound_owed(&mut self, bytes_per_second: Option<u64>) {
        self.owing.bandwidth = bytes_per_second.and_then(NonZeroU64::new);
    }

    /// Tells the owner that this node owes a part of the disk. Repeated until the owner has the part.
    pub(super) fn tell_of_debt(&mut self) {
        // An accepted connection leads to a node that owes. This node's debt is owed to another node.
        let owed = self.cx.authority.owes();
        let owed = owed.filter(|_| self.pull_link == PullLink::Dialled);
        self.owing.tell_at = owed.map(|_| self.cx.now.after(REMIND_EVERY));
        if let Some(migration) = owed {
            let max_bandwidth = self.owing.bandwidth;
            let owes = Message::Owes {
                migration,
                max_bandwidth,
            };
            self.cx.send(TrafficClass::Pull, owes);
        }
    }
}
