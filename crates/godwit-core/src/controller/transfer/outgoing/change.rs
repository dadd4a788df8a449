//! Changes of a running migration: its bounds, and its policy, which may become push and pull.

use core::time::Duration;

use crate::controller::governor::obstacles::Obstacles;
use crate::controller::governor::token_bucket::TokenBucket;
use crate::controller::governor::{JudgedPeriods, governor};
use crate::controller::policy::Policy;
use crate::controller::transfer::outgoing::freeze::FIRST_FREEZE;
use crate::controller::transfer::outgoing::{MAX_PULLED, Source};
use crate::controller::transfer::pass::Pass;
use crate::controller::{Controller, ImageOffer, PushOptions};
use crate::event::Event;
use crate::planted::PlantedBug;
use crate::sla::LatencyTarget;
use crate::units::{Generation, Time};
use crate::wire::{Message, TrafficClass};

/// Changes to an outgoing migration from now on. `None` leaves a setting unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MigrationChange {
    /// [`MigrationOptions::max_bandwidth`](crate::MigrationOptions::max_bandwidth): at least 1 byte per second, or no
    /// bound any more.
    pub max_bandwidth: Option<Option<u64>>,
    /// [`MigrationOptions::sla`](crate::MigrationOptions::sla), as an explicit promise: the guest's load before the
    /// migration no longer counts.
    pub sla: Option<Option<LatencyTarget>>,
    /// [`MigrationOptions::deadline`](crate::MigrationOptions::deadline), from the migration's start.
    pub deadline: Option<Option<Duration>>,
    /// Continue by push and pull. The destination keeps its data; the disk is not compared.
    pub policy: Option<PushOptions>,
}

/// Reason why nothing of a migration was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// No migration leaves this node.
    #[error("no migration of the disk leaves this node")]
    NoMigration,
    /// The disk is changing hands.
    #[error("the disk is changing hands already")]
    TooLate,
    /// The disk leaves its image behind, and the destination does not support a disk that lacks blocks in two places.
    #[error(
        "the other node is older, and serves no disk of which a part is in its image and another at the node that gave \
         it away"
    )]
    OnePlace,
    /// An option is out of its range.
    #[error("the {0} is out of range")]
    Option(&'static str),
}

impl Source {
    /// Applies new bounds.
    fn change_bounds(&mut self, change: &MigrationChange, now: Time) {
        if let Some(bandwidth) = change.max_bandwidth {
            self.options.max_bandwidth = bandwidth;
            self.rate.bucket = bandwidth.map(|limit| TokenBucket::new(limit, now));
            self.rate.copies_wait = None;
            self.rate.delayed_wait = None;
            self.obstacles = Obstacles::new(now, bandwidth);
        }
        if let Some(sla) = change.sla {
            self.options.sla = sla;
            self.options.guest_load = None;
            let promised = sla.map_or(FIRST_FREEZE, |target| target.limit);
            self.handover.allowance = promised.max(FIRST_FREEZE);
        }
        if let Some(deadline) = change.deadline {
            self.options.deadline = deadline;
        }
        // The governor's knowledge does not hold under another promise or beside another bound.
        if change.sla.is_some() || change.max_bandwidth.is_some() {
            let before = self.promise(now);
            let judged = JudgedPeriods {
                all: before.periods,
                breached: before.breached_periods,
            };
            self.governor = governor(&self.options, judged, now);
        }
    }

    /// Returns true if the policy changes now: no chunk is in flight.
    pub(super) fn switches_now(&self) -> bool {
        self.is_switching() && self.window.is_empty()
    }

    /// Returns true if no further chunk may be locked, because the policy is to change behind the chunks in flight.
    pub(super) const fn is_switching(&self) -> bool {
        self.change.to.is_some() && self.runs()
    }

    /// Switches to push and pull with the blocks that the destination lacks. Returns the pass that follows.
    ///
    /// A chunk with newer data could overtake double writes in flight. Such double writes therefore count as left, and
    /// nothing is pushed before the destination has all frames sent so far.
    fn switch_policy(&mut self, push: PushOptions, forgets_delayed: bool, now: Time) -> Pass {
        self.generation = Generation(self.generation.0.wrapping_add(1));
        let head = self.window.pointers.read_head;
        self.policy.become_push_pull(
            self.pass,
            push,
            head,
            self.wanted.blocks(),
            self.capacity,
            now,
        );
        let Self {
            delayed, policy, ..
        } = self;
        // Delayed writes are pushed or pulled instead.
        delayed.take_rest(|extent| {
            if !forgets_delayed {
                policy.give_up(Pass::Copy, core::iter::once(extent), head);
            }
        });
        self.options.verify = false;
        self.dirty = None;
        match self.pass {
            Pass::Copy | Pass::Compare => Pass::Copy,
            _ => Pass::Resend {
                round: self.round() + 1,
            },
        }
    }
}

impl Controller {
    /// Changes the migration that leaves this node. A change of the policy is carried out once the chunks in flight
    /// have arrived; [`Event::PolicySwitched`] reports the change.
    ///
    /// # Errors
    /// [`ChangeError`]; nothing has changed then.
    pub fn change_migration(
        &mut self,
        now: Time,
        change: &MigrationChange,
    ) -> Result<(), ChangeError> {
        self.cx.now = now;
        let too_large = self.cx.capacity.bytes() > MAX_PULLED;
        let Some(source) = &mut self.outgoing.source else {
            return Err(ChangeError::NoMigration);
        };
        let stays = source.options.switchover.is_never() && change.policy.is_some();
        if !source.may_pause() || stays {
            return Err(ChangeError::TooLate);
        }
        if change.max_bandwidth == Some(Some(0)) {
            return Err(ChangeError::Option("bandwidth"));
        }
        if change.policy.is_some() && too_large {
            return Err(ChangeError::Option("size of a disk that is pulled"));
        }
        if change.policy.is_some() && source.options.image == ImageOffer::OnePlace {
            // Blocks missing at the destination must be either in the image or here.
            return Err(ChangeError::OnePlace);
        }
        source.change_bounds(change, now);
        source.change.to = change.policy.or(source.change.to);
        self.resume_if_unpromised();
        self.outgoing.flush_delayed(&mut self.cx);
        self.pump();
        self.run_ready();
        Ok(())
    }

    /// Carries out a change of the policy.
    pub(super) fn switch_policy(&mut self) {
        let forgets_delayed = self.cx.has_bug(PlantedBug::SwitchForgetsDelayed);
        let overtakes = self.cx.has_bug(PlantedBug::SwitchOvertakes);
        let now = self.cx.now;
        self.outgoing.delay_posted_writes(&mut self.cx);
        self.delay_double_writes();
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let Some(push) = source.change.to.take() else {
            return;
        };
        let migration = source.options.migration;
        let was_another = !source.policy.pulls();
        let pass = source.switch_policy(push, forgets_delayed, now);
        source.holes.begin(now);
        source.change.awaits_generation = !overtakes;
        let generation = source.generation;
        self.cx
            .send(TrafficClass::Sync, Message::NewGeneration { generation });
        self.outgoing.begin_pass(&mut self.cx, pass);
        if was_another {
            self.cx.notify(Event::PolicySwitched { migration });
        }
    }
}
