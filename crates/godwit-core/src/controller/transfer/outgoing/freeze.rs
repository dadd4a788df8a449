//! The freeze: the guest is held, the destination gets the rest, and authority is asked afterwards.

use core::time::Duration;

use crate::action::{Action, DiskOperation, DiskTag};
use crate::controller::cx::Cx;
use crate::controller::policy::Policy;
use crate::controller::transfer::follow::source::Follower;
use crate::controller::transfer::outgoing::Outgoing;
use crate::controller::transfer::outgoing::Source;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::transfer::outgoing::verify::MAX_VERIFY_PASSES;
use crate::controller::transfer::pass::Pass;
use crate::controller::{Controller, Switchover};
use crate::event::AbortReason;
use crate::planted::PlantedBug;
use crate::request::RequestError;
use crate::units::{MigrationId, Time};
use crate::wire::{Message, TrafficClass};

/// Maximum bytes of delayed writes left when the guest is held; these writes are sent then.
pub(super) const FREEZE_DELAYED_BYTES: u64 = 64 << 10;

/// Time for which the guest may be held before the destination is asked to accept, unless the promise allows more.
/// Doubled after each freeze that was too short.
pub(super) const FIRST_FREEZE: Duration = Duration::from_millis(20);

impl Source {
    /// Returns the time at which the freeze exceeds the promise.
    pub(super) fn freeze_deadline(&self) -> Option<Time> {
        let Stage::Freezing { since, .. } = self.stage else {
            return None;
        };
        self.governor.as_ref()?;
        Some(since.after(self.handover.allowance))
    }
}

impl Outgoing {
    /// Ends a freeze that took too long: the migration continues as before the freeze.
    pub(in crate::controller) fn end_freeze(&mut self, cx: &mut Cx) {
        let Some(source) = &mut self.source else {
            return;
        };
        source.handover.allowance *= 2;
        if source.pass.copies() {
            self.enter_stage(cx, Stage::Moving);
        } else {
            self.begin_pass(cx, Pass::VerifyDirty { number: 2 });
        }
    }
}

impl Controller {
    /// Handles the guest's arrival at the destination, where the guest waits for its disk.
    pub(in crate::controller) fn guest_arrived(&mut self, migration: MigrationId) {
        self.heard();
        let waits = self.outgoing.source.as_ref().is_some_and(|source| {
            source.options.migration == migration
                && source.options.switchover == Switchover::WhenTold
        });
        if waits {
            self.order_switchover();
        }
    }

    /// Orders the switchover: only data missing at the destination holds the switchover back from now on.
    pub(in crate::controller) fn order_switchover(&mut self) -> bool {
        let Some(source) = &mut self.outgoing.source else {
            return false;
        };
        if source.options.switchover.is_never() {
            return false;
        }
        source.handover.may_switch_over = true;
        self.resume_if_ordered();
        self.outgoing.flush_delayed(&mut self.cx);
        self.pump();
        true
    }

    /// Proceeds once the guest is held and its requests are finished: compares the blocks written since the last pass,
    /// then asks the destination to accept.
    #[inline]
    pub(in crate::controller) fn check_drained(&mut self) {
        let Some(source) = self.outgoing.source.as_deref() else {
            return;
        };
        if source.stage.is_freezing() {
            self.close_when_drained();
        } else if source.peer.follower == Follower::Catching {
            self.ask_to_follow();
        }
    }

    fn close_when_drained(&mut self) {
        let forgets_delayed = self.cx.has_bug(PlantedBug::SwitchoverWithDelayed);
        let forgets_posted = self.cx.has_bug(PlantedBug::SwitchoverWithPosted);
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let Stage::Freezing { since, .. } = source.stage else {
            return;
        };
        if self.requests.admitted > 0 || !source.window.is_empty() {
            return;
        }
        if !forgets_posted && !source.posted.is_empty() {
            return;
        }
        if !forgets_delayed && !source.delayed.is_settled() {
            return self.outgoing.flush_delayed(&mut self.cx);
        }
        let last_pass = Stage::Freezing {
            since,
            last_pass: true,
        };
        if source.policy.rest() > 0 {
            source.stage = last_pass;
            let round = source.round() + 1;
            source.start_pass(Pass::Resend { round }, self.cx.now);
            self.pump();
        } else if source.options.verify && source.dirty_blocks() > 0 {
            source.stage = last_pass;
            let number = MAX_VERIFY_PASSES;
            source.start_pass(Pass::VerifyDirty { number }, self.cx.now);
            self.pump();
        } else {
            source.counters.all_verified = source.options.verify;
            self.prepare();
        }
    }

    /// Asks the destination to accept the disk.
    pub(super) fn prepare(&mut self) {
        let Some(source) = &self.outgoing.source else {
            return;
        };
        debug_assert!(
            source.delayed.is_settled() || self.cx.has_bug(PlantedBug::SwitchoverWithDelayed),
            "the destination lacks delayed writes"
        );
        debug_assert!(
            source.posted.is_empty() || self.cx.has_bug(PlantedBug::SwitchoverWithPosted),
            "the destination has not acknowledged all double writes"
        );
        let migration = source.options.migration;
        let since = self.cx.now;
        let owes = source.policy.owes() > 0;
        let loses_counts = self.cx.has_bug(PlantedBug::LoseCounts);
        let leaves_image = self.differences.leaves_image();
        // Blocks beside the remainder are in the same chunk and equally hot, so the remainder is announced last.
        let on_image = leaves_image && self.tell_what_is_the_same();
        let at_source = leaves_image && !self.cx.has_bug(PlantedBug::TakenFromImage);
        if let Some(source) = &self.outgoing.source {
            let actions = &mut self.cx.actions;
            source.policy.each_owed(|start, sectors, heat| {
                actions.push_back(Action::Send {
                    class: TrafficClass::Control,
                    message: Message::Lacks {
                        start,
                        sectors,
                        heat: if loses_counts { 0 } else { heat },
                        at_source,
                    },
                });
            });
        }
        self.outgoing
            .enter_stage(&mut self.cx, Stage::Preparing { since });
        if owes && !self.cx.has_bug(PlantedBug::OweUnflushed) {
            // From now on, data flushed by the guest at the destination must also be durable here.
            self.outgoing.flushing_owed = true;
            self.cx.act(Action::Disk {
                tag: DiskTag::OwedFlush,
                operation: DiskOperation::Flush,
            });
        }
        let effects = match leaves_image {
            true => self
                .cx
                .authority
                .prepare_on_image(migration, on_image, owes),
            false => self.cx.authority.prepare(migration, owes),
        };
        self.apply(effects);
    }

    /// Handles the end of the flush before the debt begins.
    pub(in crate::controller) fn owed_flushed(&mut self, result: Result<(), RequestError>) {
        self.outgoing.flushing_owed = false;
        let Some(source) = &self.outgoing.source else {
            return;
        };
        let migration = source.options.migration;
        if result.is_err() {
            self.abort_source(AbortReason::SourceDisk);
        } else if source.handover.accepted {
            let effects = self.cx.authority.handle(&Message::Prepared { migration });
            self.apply(effects);
        }
    }
}
