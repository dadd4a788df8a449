//! The operator and the daemons: migrations, lost peers, clients that stayed.

use godwit_core::authority::Ownership;
use godwit_core::event::{AbortReason, Phase};
use godwit_core::{LinkSignal, MigrationOptions, OlderCopy};
use std::time::Duration;

use super::MICROSECOND;
use super::MILLISECOND;
use super::Occurrence;
use super::World;
use crate::run::coverage::Reached;
use crate::world::checks::promise::Promise;
use crate::world::wires::pulling::CHUNK_SECTORS;

/// Period of link signals in nanoseconds.
const SAMPLING: u64 = godwit_core::Controller::LINK_SAMPLING.as_nanos() as u64;

impl World {
    /// Returns the chunk size of the current or the last migration.
    pub(super) fn chunk_sectors(&self) -> Option<u64> {
        let last = self.next_migration.checked_sub(1)?;
        let chunk = self.plan.migrations[last].options.chunk_sectors;
        Some(u64::from(chunk))
    }

    /// Starts the next migration once the previous one is over.
    pub(super) fn operate(&mut self) {
        let Some(planned) = self.plan.migrations.get(self.next_migration).copied() else {
            return;
        };
        if self.settling {
            return;
        }
        let ready = self.migration_ended + planned.gap;
        let idle = self
            .nodes
            .iter()
            .all(|node| node.migration.is_none() && node.is_up());
        let source = (0..2).find(|node| self.nodes[*node].serves());
        let (Some(source), true, true) = (source, idle, self.now >= ready) else {
            return self.schedule(MILLISECOND / 2, Occurrence::Migrate);
        };
        let other = 1 - source;
        let on_image = self.leaves_image(source, &planned);
        if on_image && !self.is_compared(source) {
            return;
        }
        let options = match on_image {
            true => Self::options_on_image(planned.options),
            false => MigrationOptions {
                older_copy: self.older_copy(other, planned.older_copy),
                ..planned.options
            },
        };
        let accepted = self.with(other, |controller, now| {
            controller.start_destination(now, options.migration, options.peer_timeout)
        });
        let empties = on_image || options.older_copy == OlderCopy::Zeroes;
        if accepted != Some(Ok(())) || empties && !self.empty_for_image(other) {
            // No harm done: the destination is still busy with the last migration.
            return self.schedule(2 * MILLISECOND, Occurrence::Migrate);
        }
        self.on_image = on_image;
        self.comes_on_image(other, on_image.then_some(options.migration));
        self.nodes[other].base = None;
        let session = self.network.open();
        self.note(|| format!("   migration of session {session}: {options:?}"));
        self.forget_generation(other);
        self.nodes[source].migration = Some(session);
        self.nodes[other].migration = Some(session);
        self.source = source;
        self.paused = false;
        self.next_migration += 1;
        self.schedule(MILLISECOND, Occurrence::Migrate);
        self.nodes[source].outgoing = true;
        self.write_counts = vec![0; self.plan.sectors.div_ceil(CHUNK_SECTORS) as usize];
        let started = self.with(source, |controller, now| {
            controller.start_source(now, options)
        });
        if started != Some(Ok(())) {
            self.nodes[source].outgoing = false;
            self.forget_comparison(source);
            return self.cut(session, MILLISECOND);
        }
        self.count_policy(&options);
        if on_image {
            self.reached(Reached::LeavesImage);
        }
        if let Some(planned) = planned.change {
            self.schedule(planned.after, Occurrence::Change(self.next_migration - 1));
        }
        let promised = self.nodes[source]
            .controller
            .as_ref()
            .and_then(|controller| controller.progress()?.promise.limit);
        self.promise = promised
            .filter(|_| options.delayed_writes && options.deadline.is_none())
            .filter(|_| !self.guest.is_stuck() && self.plan.guest.steady.is_none())
            // Fetches from the image make the guest wait.
            .filter(|_| self.plan.image.is_none())
            .map(|limit| {
                let allowed = options.sla.map_or(0, |sla| sla.allowed_per_million);
                let spared = u64::from(allowed) * u64::from(self.plan.requests) / 1_000_000;
                Promise::new(limit, options.guest_load.is_none(), spared > 0, self.now)
            });
    }

    /// Schedules the order for the switchover, after the guest's host has seen the convergence.
    pub(super) fn schedule_switchover(&mut self) {
        let Some(last) = self.next_migration.checked_sub(1) else {
            return;
        };
        let delay = self.plan.migrations[last].ordered_after;
        self.schedule(delay, Occurrence::SwitchOver(last));
    }

    /// Orders the switchover. Unlike a real host, this one lets its guest go on with requests.
    pub(super) fn switch_over(&mut self, number: usize) {
        if self.next_migration != number + 1 || !self.nodes[self.source].outgoing {
            return;
        }
        self.promise = None;
        if self.paused {
            self.reached(Reached::OrderedWhilePaused);
        }
        if self.plan.migrations[number].ordered_there {
            self.reached(Reached::OrderedThere);
            self.with(1 - self.source, |controller, now| {
                controller.handle_guest_here(now)
            });
        } else {
            self.with(self.source, |controller, now| controller.switch_over(now));
        }
    }

    /// Changes the options of a migration still in progress.
    pub(super) fn change(&mut self, number: usize) {
        let Some(planned) = self.plan.migrations[number].change else {
            return;
        };
        if self.next_migration != number + 1 || !self.nodes[self.source].outgoing {
            return;
        }
        let changed = self.with(self.source, |controller, now| {
            controller.change_migration(now, &planned.change)
        });
        if changed != Some(Ok(())) {
            return;
        }
        self.reached(Reached::Changed);
        if planned.change.sla.is_some() || planned.change.deadline.is_some() {
            // The check knows only the first promise.
            self.promise = None;
        }
    }

    /// Resets the counts of the guest's writes after a change of policy.
    pub(super) fn policy_switched(&mut self, node: usize) {
        self.give_double_writes_up(node);
        self.reached(Reached::Switched);
        self.write_counts.fill(0);
        self.promise = None;
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
            self.coverage.add(state, u64::from(chosen));
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
        self.last_move = self.now;
        self.ended();
        self.forward_on_migration(node);
        let session = self.nodes[node].migration.take();
        if self.nodes[1 - node].migration == session {
            self.nodes[1 - node].migration = None;
        }
        if self.nodes[node].forward.is_none() {
            self.schedule_reconnect(node);
        }
        let planned = self.next_migration.checked_sub(1);
        if let Some(delay) = planned.and_then(|last| self.plan.migrations[last].client_follows) {
            self.schedule(delay, Occurrence::Follow);
        }
    }

    /// Lets forwarded requests use the migration's connection while up.
    pub(super) fn forward_on_migration(&mut self, node: usize) {
        let session = self.nodes[node].migration;
        self.nodes[node].forward =
            session.filter(|&session| !self.network.sessions[session].noticed[node]);
    }

    pub(super) fn migration_aborted(&mut self, node: usize, reason: AbortReason) {
        self.harvest(node);
        self.give_double_writes_up(node);
        self.nodes[node].outgoing = false;
        self.phase = Some(Phase::Aborted);
        self.ended();
        match reason {
            AbortReason::Cancelled => self.reached(Reached::AbortCancelled),
            AbortReason::PeerLost => self.reached(Reached::AbortPeerLost),
            AbortReason::PeerTimeout => self.reached(Reached::AbortPeerTimeout),
            AbortReason::SourceDisk => self.reached(Reached::AbortSourceDisk),
            AbortReason::DestinationDisk => self.reached(Reached::AbortDestinationDisk),
            AbortReason::DestinationNoSpace => self.reached(Reached::AbortDestinationNoSpace),
            AbortReason::VerifyMismatch => {}
            AbortReason::Protocol | AbortReason::Refused => {
                self.fail("neither side breaks the protocol", || format!("{reason:?}"));
            }
        }
        if let Some(session) = self.nodes[node].migration.take() {
            self.close(session, node);
        }
    }

    /// Records the end of a migration, whatever its outcome.
    pub(super) fn ended(&mut self) {
        self.migration_ended = self.now;
        self.promise = None;
        self.paused = false;
    }

    /// Counts the states in the outgoing migration's progress.
    fn harvest(&mut self, node: usize) {
        let Some(progress) = self.nodes[node]
            .controller
            .as_ref()
            .and_then(|controller| controller.progress())
        else {
            return;
        };
        let capacity = self.plan.sectors * 512;
        let promise = progress.promise;
        for (seen, state) in [
            (promise.delayed_bytes > 0, Reached::DelayedRecorded),
            (
                promise.delayed_bytes_cancelled > 0,
                Reached::DelayedCancelled,
            ),
            (progress.verified, Reached::Verified),
            (
                progress.verified && progress.bytes_verified > capacity,
                Reached::VerifiedAgain,
            ),
        ] {
            self.coverage.add(state, u64::from(seen));
        }
    }

    /// Does the bodies' periodic work: reports the link, looks for an owner.
    pub(super) fn sample(&mut self) {
        self.schedule(SAMPLING, Occurrence::Sample);
        for node in 0..2 {
            let carried = std::mem::take(&mut self.network.directions[node].carried);
            if self.nodes[node].outgoing
                && let Some(session) = self.nodes[node].migration
            {
                let signal = self.link_signal(node, session, carried);
                self.harvest(node);
                self.note(|| format!("{}  {signal:?}", super::name(node)));
                self.with(node, |controller, now| {
                    controller.handle_link_signal(now, signal)
                });
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
        let pipe = self.network.pipe(session, 1, node);
        let delivered = std::mem::take(&mut pipe.delivered);
        let queued = pipe.unacknowledged;
        let planned = self.next_migration.checked_sub(1);
        let watched = planned.is_some_and(|last| {
            self.plan.migrations[last]
                .options
                .interface_budget
                .is_some()
        });
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
        if !self.nodes[node].is_undecided() || !self.nodes.iter().all(|node| node.is_up()) {
            return;
        }
        self.reached(Reached::Resolved);
        for each in 0..2 {
            if let Some(old) = self.nodes[each].migration {
                self.cut(old, MICROSECOND + 1);
                self.notice_loss(old, each);
            }
        }
        let session = self.network.open();
        self.schedule(2 * MILLISECOND, Occurrence::HangUp(session));
        for each in [node, 1 - node] {
            self.nodes[each].migration = Some(session);
        }
        for each in [node, 1 - node] {
            self.with(each, |controller, now| controller.handle_control_up(now));
        }
    }

    /// Closes a resolver's session once both nodes know the owner of the disk.
    pub(super) fn hang_up(&mut self, session: usize) {
        if !self.network.sessions[session].alive {
            return;
        }
        if self
            .nodes
            .iter()
            .any(|node| node.is_up() && node.is_undecided())
        {
            return self.schedule(2 * MILLISECOND, Occurrence::HangUp(session));
        }
        // The source may have made the session its forwarding connection.
        for node in 0..2 {
            self.nodes[node]
                .migration
                .take_if(|current| *current == session);
        }
        if self.nodes.iter().all(|node| node.forward != Some(session)) {
            self.network.end(session, false);
        }
    }

    pub(super) fn schedule_reconnect(&mut self, node: usize) {
        let delay = self
            .link_random
            .magnitude(20 * MICROSECOND, 40 * MILLISECOND);
        self.nodes[node].reconnects_at = self.now + delay;
        self.schedule(delay, Occurrence::Reconnect(node));
    }

    /// Reconnects to the owner, if the connection is lost and clients are left.
    pub(super) fn reconnect(&mut self, node: usize) {
        let needs = self.nodes[node].forward.is_none()
            && self.now >= self.nodes[node].reconnects_at
            && self.nodes[node]
                .controller
                .as_ref()
                .is_some_and(|controller| {
                    matches!(
                        controller.record().ownership,
                        Ownership::Vacant | Ownership::Departed { .. }
                    ) && controller.requests_in_flight() > 0
                });
        if needs && self.nodes[1 - node].serves() {
            self.reached(Reached::ForwardedAgain);
            let session = self.network.open();
            self.nodes[node].forward = Some(session);
            self.with(node, |controller, now| controller.handle_forward_up(now));
        }
    }
}
