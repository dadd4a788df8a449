//! The operator and the daemons: migrations, lost peers, clients that stayed.

use std::time::Duration;

use godwit_core::authority::Ownership;
use godwit_core::event::{AbortReason, Phase};
use godwit_core::units::Extent;
use godwit_core::{DeltaBy, LinkSignal, MigrationOptions, OlderCopy};

use super::checks::promise::Promise;
use super::node::{Node, Seen};
use super::wires::network::Way;
use super::{MICROSECOND, MILLISECOND, World};
use crate::plan::{OlderCopyPlan, PlannedChange};
use crate::run::coverage::Reached;

/// Period of link signals in nanoseconds.
const SAMPLING: u64 = godwit_core::Controller::LINK_SAMPLING.as_nanos() as u64;

impl World {
    /// Returns the chunk size of the current or the last migration.
    pub(super) fn chunk_sectors(&self) -> Option<u64> {
        Some(u64::from(self.planned()?.options.chunk_sectors))
    }

    /// Starts the next migration once the previous one is over.
    pub(super) fn operate(&mut self) {
        let Some(planned) = self.plan.migrations.get(self.course.begun).copied() else {
            return;
        };
        if self.settling {
            return;
        }
        let mut nodes = self.nodes.iter();
        let idle = nodes.all(|node| node.sessions.migration.is_none() && node.is_up());
        let due = self.now >= self.course.ended + planned.gap;
        let source = (0..2).find(|node| self.nodes[*node].serves());
        let (Some(source), true, true) = (source, idle, due) else {
            return self.schedule(MILLISECOND / 2, Self::operate);
        };
        if !self.may_sync(source) {
            return self.schedule(MILLISECOND, Self::operate);
        }
        let on_image = self.leaves_image(source, &planned);
        if on_image && !self.is_compared(source) {
            return;
        }
        let options = match on_image {
            true => Self::options_on_image(planned.options),
            false => MigrationOptions {
                older_copy: self.older_copy(1 - source, planned.older_copy),
                ..planned.options
            },
        };
        if !self.prepare_destination(1 - source, &options, on_image) {
            // No harm done: the destination is still busy with the last migration.
            return self.schedule(2 * MILLISECOND, Self::operate);
        }
        let session = self.network.open();
        self.note(|| format!("   migration of session {session}: {options:?}"));
        for node in &mut self.nodes {
            node.sessions.migration = Some(session);
        }
        self.course.begin(source, on_image, self.plan.sectors);
        self.schedule(MILLISECOND, Self::operate);
        self.nodes[source].outgoing = true;
        let started = self.with(source, |c, now| c.start_source(now, options));
        if started != Some(Ok(())) {
            self.nodes[source].outgoing = false;
            self.forget_comparison(source);
            return self.cut(session, MILLISECOND);
        }
        self.count_policy(&options);
        if on_image {
            self.reached(Reached::LeavesImage);
        }
        if let Some(change) = planned.change {
            let number = self.course.begun - 1;
            self.schedule(change.after, move |world| world.change(number));
        }
        self.course.promise = self.promise_of(source, &options);
    }

    /// Lets the destination expect the disk. Returns false if the destination refuses.
    fn prepare_destination(
        &mut self,
        node: usize,
        options: &MigrationOptions,
        on_image: bool,
    ) -> bool {
        let accepted = self.with(node, |c, now| {
            c.start_destination(now, options.migration, options.peer_timeout)
        });
        let empties = on_image || options.older_copy == OlderCopy::Zeroes;
        if accepted != Some(Ok(())) || empties && !self.empty_for_image(node) {
            return false;
        }
        let it = &mut self.nodes[node];
        it.image.fetch = on_image.then_some(options.migration);
        (it.store.base, it.store.activity) = (None, None);
        it.seen = Seen::default();
        true
    }

    /// Returns the promise that a new migration is held to.
    fn promise_of(&self, source: usize, options: &MigrationOptions) -> Option<Promise> {
        let limit = self.nodes[source].progress()?.promise.limit?;
        let is_checked = options.delayed_writes
            && options.deadline.is_none()
            && !self.guest.is_stuck()
            && self.plan.guest.steady.is_none()
            // Fetches from the image make the guest wait.
            && self.plan.image.is_none();
        is_checked.then(|| {
            let allowed = options.sla.map_or(0, |sla| sla.allowed_per_million);
            let spared = u64::from(allowed) * self.plan.requests / 1_000_000;
            let stated = options.guest_load.is_none();
            Promise::new(limit, stated, spared > 0, self.now)
        })
    }

    /// Returns the description of a node's older copy, for a disk about to come.
    fn older_copy(&mut self, node: usize, planned: OlderCopyPlan) -> OlderCopy {
        if planned == OlderCopyPlan::Use && self.protection.is_some() {
            return self.copy_by_log(node);
        }
        let it = &self.nodes[node];
        let had_it = matches!(it.store.record.ownership, Ownership::Departed { .. });
        match (planned, it.store.base) {
            (OlderCopyPlan::Compare, _) if self.protection.is_some() => OlderCopy::Unknown,
            (OlderCopyPlan::Use, Some(migration)) => OlderCopy::Since(migration),
            (OlderCopyPlan::Use | OlderCopyPlan::Compare, _) if had_it => OlderCopy::Unknown,
            (OlderCopyPlan::Ignore, _) => OlderCopy::Zeroes,
            _ if it.disk.current.iter().all(|value| *value == 0) => OlderCopy::Zeroes,
            _ => OlderCopy::None,
        }
    }

    /// Schedules the order for the switchover, after the guest's host has seen the convergence.
    pub(super) fn schedule_switchover(&mut self) {
        if let Some(last) = self.course.number() {
            let delay = self.plan.migrations[last].ordered_after;
            self.schedule(delay, move |world| world.switch_over(last));
        }
    }

    /// Returns the source's node while the migration of this number goes on.
    fn source_of(&self, number: usize) -> Option<usize> {
        let is_current = self.course.number() == Some(number);
        let source = Some(self.course.source).filter(|_| is_current);
        source.filter(|source| self.nodes[*source].outgoing)
    }

    /// Orders the switchover. Unlike a real host, this one lets its guest go on with requests.
    pub(super) fn switch_over(&mut self, number: usize) {
        let Some(source) = self.source_of(number) else {
            return;
        };
        self.course.promise = None;
        if self.course.paused {
            self.reached(Reached::OrderedWhilePaused);
        }
        if self.plan.migrations[number].ordered_there {
            self.reached(Reached::OrderedThere);
            self.with(1 - source, |c, now| c.handle_guest_here(now));
        } else {
            self.with(source, |c, now| c.switch_over(now));
        }
    }

    /// Changes the options of a migration still in progress.
    pub(super) fn change(&mut self, number: usize) {
        let planned = self.plan.migrations[number].change;
        let (Some(PlannedChange { change, .. }), Some(source)) = (planned, self.source_of(number))
        else {
            return;
        };
        if self.with(source, |c, now| c.change_migration(now, &change)) != Some(Ok(())) {
            return;
        }
        self.reached(Reached::Changed);
        if change.sla.is_some() || change.deadline.is_some() {
            // The check knows only the first promise.
            self.course.promise = None;
        }
    }

    /// Resets the counts of the guest's writes after a change of policy.
    pub(super) fn policy_switched(&mut self, node: usize) {
        self.give_double_writes_up(node);
        self.reached(Reached::Switched);
        self.course.forget_writes();
        self.course.promise = None;
    }

    fn count_policy(&mut self, options: &MigrationOptions) {
        for (policy, state) in Reached::BY_POLICY {
            if policy == options.policy.description() {
                self.reached(state);
            }
        }
        self.reached(match (options.sla, options.delayed_writes) {
            (None, _) => Reached::WindowOnly,
            (Some(_), false) => Reached::Backpressure,
            (Some(_), true) => Reached::Delayed,
        });
        for (chosen, state) in [
            (options.interface_budget.is_some(), Reached::Budget),
            (options.deadline.is_some(), Reached::Deadline),
            (options.verify, Reached::Verify),
            (options.max_bandwidth.is_some(), Reached::RateLimit),
        ] {
            self.count(state, u64::from(chosen));
        }
    }

    pub(super) fn migration_completed(&mut self, node: usize) {
        self.harvest(node);
        self.count_delta(node);
        self.nodes[node].outgoing = false;
        self.reached(if node == 0 {
            Reached::Moved
        } else {
            Reached::MovedBack
        });
        self.course.last_move = self.now;
        self.course.end(self.now);
        self.forward_on_migration(node);
        let session = self.nodes[node].sessions.migration.take();
        let theirs = &mut self.nodes[1 - node].sessions.migration;
        if *theirs == session {
            *theirs = None;
        }
        if self.nodes[node].sessions.forward.is_none() {
            self.schedule_reconnect(node);
        }
        if let Some(delay) = self.planned().and_then(|planned| planned.client_follows) {
            self.schedule(delay, Self::follow);
        }
    }

    /// Lets forwarded requests use the migration's connection while up.
    pub(super) fn forward_on_migration(&mut self, node: usize) {
        let sessions = &mut self.nodes[node].sessions;
        sessions.forward = sessions
            .migration
            .filter(|&session| !self.network.sessions[session].noticed[node]);
    }

    pub(super) fn migration_aborted(
        &mut self,
        node: usize,
        reason: AbortReason,
        mismatch: Option<Extent>,
    ) {
        self.harvest(node);
        self.give_double_writes_up(node);
        self.nodes[node].outgoing = false;
        self.course.phase = Some(Phase::Aborted);
        self.course.end(self.now);
        match reason {
            AbortReason::Cancelled => self.reached(Reached::AbortCancelled),
            AbortReason::PeerLost => self.reached(Reached::AbortPeerLost),
            AbortReason::PeerTimeout => self.reached(Reached::AbortPeerTimeout),
            AbortReason::SourceDisk => self.reached(Reached::AbortSourceDisk),
            AbortReason::DestinationDisk => self.reached(Reached::AbortDestinationDisk),
            AbortReason::DestinationNoSpace => self.reached(Reached::AbortDestinationNoSpace),
            AbortReason::VerifyMismatch => {
                let claim = "the images are equal where verification looks";
                self.fail(claim, || format!("{mismatch:?}"));
            }
            AbortReason::Protocol | AbortReason::Refused => {
                self.fail("neither side breaks the protocol", || format!("{reason:?}"));
            }
        }
        if let Some(session) = self.nodes[node].sessions.migration.take() {
            self.close(session, node);
        }
    }

    /// Counts the states in the outgoing migration's progress.
    fn harvest(&mut self, node: usize) {
        let Some(progress) = self.nodes[node].progress() else {
            return;
        };
        let capacity = self.plan.sectors * 512;
        let (promise, verified) = (progress.promise, progress.verified);
        let again = verified && progress.bytes_verified > capacity;
        let cancelled = promise.delayed_bytes_cancelled > 0;
        for (seen, state) in [
            (promise.delayed_bytes > 0, Reached::DelayedRecorded),
            (cancelled, Reached::DelayedCancelled),
            (verified, Reached::Verified),
            (again, Reached::VerifiedAgain),
        ] {
            self.count(state, u64::from(seen));
        }
    }

    /// Counts the migration's use of an older copy.
    fn count_delta(&mut self, node: usize) {
        let delta = self.nodes[node].progress().and_then(|it| it.delta);
        if let Some(delta) = delta.filter(|delta| delta.bytes_skipped > 0) {
            self.reached(match delta.by {
                DeltaBy::Written => Reached::DeltaByWritten,
                DeltaBy::Compared => Reached::DeltaByCompared,
            });
        }
    }

    /// Does the bodies' periodic work: reports the link, looks for an owner.
    pub(super) fn sample(&mut self) {
        self.schedule(SAMPLING, Self::sample);
        for node in 0..2 {
            let carried = std::mem::take(&mut self.network.directions[node].carried);
            let migration = self.nodes[node].sessions.migration;
            if let (Some(session), true) = (migration, self.nodes[node].outgoing) {
                let signal = self.link_signal(node, session, carried);
                self.harvest(node);
                self.note(|| format!("{}  {signal:?}", super::name(node)));
                self.with(node, |c, now| c.handle_link_signal(now, signal));
            }
            self.reconnect(node);
            self.connect_pull(node);
            self.connect_image(node);
        }
    }

    fn link_signal(&mut self, node: usize, session: usize, carried: u64) -> LinkSignal {
        let plan = self.network.plan;
        let bandwidth = self.network.bandwidth(node, self.now);
        let direction = &self.network.directions[node];
        let others = if self.now < direction.traffic.1 {
            plan.bandwidth / 100 * direction.traffic.0
        } else {
            0
        };
        let pipe = self.network.pipe(Way::new(session, 1, node));
        let delivered = std::mem::take(&mut pipe.delivered);
        let queued = pipe.unacknowledged;
        let planned = self.planned();
        let watched = planned.is_some_and(|it| it.options.interface_budget.is_some());
        let per_second = |bytes: u64| bytes * 1_000_000_000 / SAMPLING;
        LinkSignal {
            queued,
            round_trip: Duration::from_nanos(2 * plan.delay + 2 * plan.jitter),
            // A seldom full socket measures the speed of single frames.
            delivery_rate: match (delivered, queued) {
                (0, 0) => 0,
                (_, 0) => bandwidth,
                _ => per_second(delivered),
            },
            interface_rate: watched.then(|| per_second(carried) + others),
        }
    }

    /// Dials the other node of an undecided migration, like a node's resolver.
    pub(super) fn dial(&mut self, node: usize) {
        if !self.nodes[node].store.is_undecided() || !self.nodes.iter().all(Node::is_up) {
            return;
        }
        self.reached(Reached::Resolved);
        for each in 0..2 {
            if let Some(old) = self.nodes[each].sessions.migration {
                self.cut(old, MICROSECOND + 1);
                self.notice_loss(old, each);
            }
        }
        let session = self.network.open();
        self.schedule(2 * MILLISECOND, move |world| world.hang_up(session));
        for it in &mut self.nodes {
            it.sessions.migration = Some(session);
        }
        for each in [node, 1 - node] {
            self.with(each, |c, now| c.handle_control_up(now));
        }
    }

    /// Closes a resolver's session once both nodes know the owner of the disk.
    pub(super) fn hang_up(&mut self, session: usize) {
        if !self.network.sessions[session].alive {
            return;
        }
        let mut nodes = self.nodes.iter();
        if nodes.any(|node| node.is_up() && node.store.is_undecided()) {
            return self.schedule(2 * MILLISECOND, move |world| world.hang_up(session));
        }
        // The source may have made the session its forwarding connection.
        let mut forwards = false;
        for node in &mut self.nodes {
            let sessions = &mut node.sessions;
            sessions.migration.take_if(|current| *current == session);
            forwards |= sessions.forward == Some(session);
        }
        if !forwards {
            self.network.end(session, false);
        }
    }

    /// Returns the time until a node looks again for a lost owner.
    pub(super) fn retry_delay(&mut self) -> u64 {
        let link = &mut self.random.link;
        link.magnitude(20 * MICROSECOND, 40 * MILLISECOND)
    }

    pub(super) fn schedule_reconnect(&mut self, node: usize) {
        let delay = self.retry_delay();
        self.nodes[node].sessions.reconnects_at = self.now + delay;
        self.schedule(delay, move |world| world.reconnect(node));
    }

    /// Reconnects to the owner, if the connection is lost and clients are left.
    pub(super) fn reconnect(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        let has_clients = it.controller.as_ref().is_some_and(|controller| {
            matches!(
                controller.record().ownership,
                Ownership::Vacant | Ownership::Departed { .. }
            ) && controller.requests_in_flight() > 0
        });
        let is_due = it.sessions.forward.is_none() && self.now >= it.sessions.reconnects_at;
        if has_clients && is_due && self.nodes[1 - node].serves() {
            self.reached(Reached::ForwardedAgain);
            self.nodes[node].sessions.forward = Some(self.network.open());
            self.with(node, |c, now| c.handle_forward_up(now));
        }
    }
}
