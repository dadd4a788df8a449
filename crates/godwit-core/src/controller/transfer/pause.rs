//! Backpressure (Alg. 2 of the SmartNIC storage-migration paper): when the guest would wait for the migration longer
//! than promised, the migration pauses at once, and resumes when the link has recovered.

use core::time::Duration;

use crate::action::Action;
use crate::controller::cx::Cx;
use crate::controller::governor::Period;
use crate::controller::requests::slots::{Slot, WorkStage};
use crate::controller::transfer::outgoing::Outgoing;
use crate::controller::{Controller, LinkSignal};
use crate::event::{Event, PauseReason};
use crate::request::RequestTag;
use crate::units::{Generation, Time};
use crate::wire::{Message, TrafficClass};

/// Delayed writes that have to be acknowledged in time before double writes are sent again.
const PROBES: u32 = 4;

/// Shortest queue that tells the link's drain rate.
const TELLING_QUEUE: u64 = 128 << 10;

/// A pause under way.
#[derive(Clone, Copy, Debug)]
pub(in crate::controller) struct Pause {
    pub(in crate::controller) reason: PauseReason,
    since: Time,
    until: Time,
    /// True if the destination has received everything sent before the pause.
    drained: bool,
    /// True while delayed writes are sent one at a time to probe the link.
    pub(in crate::controller) probing: bool,
    good_probes: u32,
}

/// A migration's pauses: the current pause, the number of pauses, and their total time.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::controller) struct Pauses {
    pub(in crate::controller) current: Option<Pause>,
    pub(in crate::controller) by_reason: [u32; PauseReason::ALL.len()],
    pub(in crate::controller) total: Duration,
}

impl Pause {
    pub(in crate::controller) fn lasted(&self, now: Time) -> Duration {
        now.since(self.since)
    }

    /// Returns true if nothing of the migration has been under way for a sampling period.
    fn stands_still(&self, now: Time) -> bool {
        self.drained && !self.probing && self.lasted(now) >= Controller::LINK_SAMPLING * 2
    }

    /// Returns true if the destination has not yet confirmed the pause.
    pub(in crate::controller) const fn is_unheard(&self) -> bool {
        !self.drained
    }

    /// Returns the time at which the pause may end or begin to probe; `None` while the pause waits for the other node.
    pub(in crate::controller) fn deadline(&self) -> Option<Time> {
        (self.drained && !self.probing).then_some(self.until)
    }
}

impl Outgoing {
    /// Watches a request that begins to wait for the migration.
    #[inline]
    pub(in crate::controller) fn watch(&mut self, cx: &mut Cx, tag: RequestTag) {
        if let Some(source) = &mut self.source
            && source.governor.is_some()
        {
            source.watch(tag, &cx.slots);
        }
    }
}

impl Controller {
    /// Takes the body's measurement of the outgoing migration's sync connection. The body reports every
    /// [`Self::LINK_SAMPLING`] while a migration leaves this node. Without reports the controller relies on the guest's
    /// latency alone.
    pub fn handle_link_signal(&mut self, now: Time, signal: LinkSignal) {
        self.cx.now = now;
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let paused = source.pauses.current.is_some();
        let Some(governor) = &mut source.governor else {
            return;
        };
        if governor.interface(signal.interface_rate, paused) && !paused {
            self.pause(PauseReason::InterfaceBudget);
        } else if let Some(threshold) = governor.threshold()
            && signal.queued >= TELLING_QUEUE
            && signal.delivery_rate > 0
            && !paused
        {
            let drains_in = signal.queued.saturating_mul(1_000_000) / signal.delivery_rate;
            if Duration::from_micros(drains_in) > threshold {
                self.pause(PauseReason::LinkQueue);
            }
        }
        self.run_ready();
    }

    /// Handles requests whose wait for the migration has reached the promise.
    pub(in crate::controller) fn watch_expired(&mut self) {
        let now = self.cx.now;
        loop {
            let Some(source) = &mut self.outgoing.source else {
                return;
            };
            let Some((tag, expiry)) = source.oldest_watched(&self.cx.slots) else {
                return;
            };
            if expiry > now {
                return;
            }
            if source.options.delayed_writes
                && source.pauses.current.is_none()
                && source
                    .governor
                    .as_mut()
                    .is_some_and(|governor| governor.may_answer_alone())
                && self.answer_alone(tag)
            {
                continue;
            }
            let Some(source) = &mut self.outgoing.source else {
                return;
            };
            let tolerated = source
                .governor
                .as_mut()
                .is_none_or(|governor| governor.may_be_late());
            if !tolerated && self.pause(PauseReason::GuestLatency) {
                return;
            }
            // The request is late, without consequences yet.
            self.cx.slots[tag].late = true;
            if let Some(source) = &mut self.outgoing.source {
                source.tolerate(tag, &self.cx.slots);
            }
        }
    }

    /// Pauses if a tolerated request is late beyond bounds. A percentile allows some late requests, but no request may
    /// be late without end.
    pub(in crate::controller) fn tolerance_expired(&mut self) {
        let now = self.cx.now;
        while let Some(source) = &mut self.outgoing.source
            && source.take_intolerable(&self.cx.slots, now)
        {
            self.pause(PauseReason::GuestLatency);
        }
    }

    /// Turns a double write, or the requests that wait for a chunk, into delayed writes, while the migration continues.
    /// Returns false if this is not possible for the request.
    fn answer_alone(&mut self, tag: RequestTag) -> bool {
        let slot = &self.cx.slots[tag];
        let (Some(extent), Some(source)) = (slot.extent, &mut self.outgoing.source) else {
            return false;
        };
        if slot.stage == WorkStage::Locked {
            let waiters = source.is_copying_pass().then(|| source.unlock(extent));
            let Some(mut waiters) = waiters.flatten() else {
                return false;
            };
            while let Some(waiter) = self.cx.slots.pop(&mut waiters) {
                self.cx.slots[waiter].unlocked = true;
                self.cx.slots[waiter].stage = WorkStage::Waiting;
                self.cx.ready.push_back(waiter);
            }
            return true;
        }
        // The part past the migrated region is copied later, and the copy could overtake the double write.
        if !source.is_migrated(extent) {
            return false;
        }
        source.delay(extent);
        self.give_up_double_write(tag);
        true
    }

    /// Pauses the migration: gives up the window (`LM_head := LM_tail`), starts a new generation, and, with delayed
    /// writes, answers the requests that wait for the destination. Returns false if there is nothing to pause or no
    /// time for a pause.
    pub(in crate::controller) fn pause(&mut self, reason: PauseReason) -> bool {
        let now = self.cx.now;
        let Some(source) = &mut self.outgoing.source else {
            return false;
        };
        let required = source.required_rate(now);
        if source.pauses.current.is_some()
            || !source.may_pause()
            || source.is_ordered()
            || source.peer.follower.is_awaited()
        {
            return false;
        }
        let Some(governor) = &mut source.governor else {
            return false;
        };
        if governor.pressed(required) {
            return false;
        }
        let until = governor.pause(now);
        source.pauses.current = Some(Pause {
            reason,
            since: now,
            until,
            drained: false,
            probing: false,
            good_probes: 0,
        });
        source.pauses.by_reason[reason as usize] += 1;
        source.generation = Generation(source.generation.0.wrapping_add(1));
        let generation = source.generation;
        let (migration, delays) = (source.options.migration, source.options.delayed_writes);
        let unfreezes = source.stage.is_freezing();
        let waiters = source.retreat();
        self.cx.act(Action::DiscardUnsent {
            class: TrafficClass::Copy,
        });
        if delays {
            self.cx.act(Action::DiscardUnsent {
                class: TrafficClass::Sync,
            });
            self.outgoing.delay_posted_writes(&mut self.cx);
            self.delay_double_writes();
        }
        self.cx
            .send(TrafficClass::Sync, Message::NewGeneration { generation });
        self.cx.notify(Event::Paused { migration, reason });
        for list in waiters {
            self.cx.wake(list);
        }
        if unfreezes {
            self.outgoing.end_freeze(&mut self.cx);
            self.release_held();
        }
        true
    }

    /// Acknowledges and remembers every double write that the destination has not acknowledged.
    pub(in crate::controller) fn delay_double_writes(&mut self) {
        if let Some(source) = &mut self.outgoing.source {
            source.delayed.recall();
        }
        for tag in self.cx.slots.select(Slot::is_at_destination) {
            if let (Some(extent), Some(source)) =
                (self.cx.slots[tag].extent, &mut self.outgoing.source)
            {
                source.delay(extent);
            }
            self.give_up_double_write(tag);
        }
    }

    /// Notes that the destination has received everything sent before the generation.
    pub(in crate::controller) fn generation_reached(&mut self, generation: Generation) {
        let now = self.cx.now;
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        source.peer.last_heard = now;
        if source.generation != generation {
            return;
        }
        if core::mem::take(&mut source.change.awaits_generation) {
            self.pump();
        }
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        if let Some(pause) = &mut source.pauses.current {
            pause.drained = true;
            self.pause_timer();
            self.resume_if_ordered();
            self.resume_if_unpromised();
        }
    }

    /// Ends the pause, or begins to probe, at its time.
    pub(in crate::controller) fn pause_timer(&mut self) {
        let now = self.cx.now;
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let settled = source.delayed.is_settled();
        let (Some(pause), Some(governor)) = (&mut source.pauses.current, &mut source.governor)
        else {
            return;
        };
        if pause.probing {
            // The rest of the table has become obsolete meanwhile.
            if settled {
                self.resume();
            }
            return;
        }
        if pause.deadline().is_none_or(|at| at > now) {
            return;
        }
        if governor.interface_is_full() {
            pause.until = governor.prolong(now);
        } else if settled {
            self.resume();
        } else {
            pause.probing = true;
            pause.good_probes = 0;
            self.outgoing.flush_delayed(&mut self.cx);
        }
    }

    /// Ends a pause that the deadline no longer allows.
    fn resume_if_pressed(&mut self, required: u64) {
        if let Some(source) = &self.outgoing.source
            && let (Some(pause), Some(governor)) = (&source.pauses.current, &source.governor)
            && !pause.is_unheard()
            && governor.pressed(required)
        {
            self.resume();
        }
    }

    /// Ends a pause that delays the switchover: the guest has stopped.
    pub(in crate::controller) fn resume_if_ordered(&mut self) {
        if let Some(source) = &self.outgoing.source
            && source.is_ordered()
            && source
                .pauses
                .current
                .is_some_and(|pause| !pause.is_unheard())
        {
            self.resume();
        }
    }

    /// Ends a pause that no promise requires any more.
    pub(in crate::controller) fn resume_if_unpromised(&mut self) {
        if let Some(source) = &self.outgoing.source
            && source.governor.is_none()
            && source
                .pauses
                .current
                .is_some_and(|pause| !pause.is_unheard())
        {
            self.resume();
        }
    }

    /// Judges a delayed write that was acknowledged after `took`.
    pub(in crate::controller) fn probed(&mut self, took: Duration) {
        let now = self.cx.now;
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let settled = source.delayed.is_settled();
        let (Some(pause), Some(governor)) = (&mut source.pauses.current, &mut source.governor)
        else {
            return;
        };
        if !pause.probing {
            return;
        }
        let limit = governor.threshold().unwrap_or(Duration::MAX) / 4 * 3;
        if took > limit || governor.interface_is_full() {
            pause.probing = false;
            pause.until = governor.prolong(now);
            return;
        }
        pause.good_probes += 1;
        if pause.good_probes >= PROBES || settled {
            self.resume();
        }
    }

    fn resume(&mut self) {
        let now = self.cx.now;
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let Some(pause) = source.pauses.current.take() else {
            return;
        };
        source.pauses.total += pause.lasted(now);
        if let Some(governor) = &mut source.governor {
            governor.resume(now);
        }
        let migration = source.options.migration;
        self.cx.notify(Event::Resumed { migration });
        self.outgoing.flush_delayed(&mut self.cx);
        self.pump();
    }

    /// Judges the last sampling period and looks for an obstacle between the migration and its end.
    pub(in crate::controller) fn sample(&mut self) {
        let now = self.cx.now;
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let oldest = source
            .oldest_watched(&self.cx.slots)
            .map_or(Duration::ZERO, |(tag, _)| {
                now.since(self.cx.slots[tag].arrived)
            });
        let (left, copying) = (source.bytes_left(), source.is_copying());
        let required = source.required_rate(now);
        let paused = source.pauses.current.is_some();
        let still = source.options.delayed_writes
            && source
                .pauses
                .current
                .is_some_and(|pause| pause.stands_still(now));
        if let Some(governor) = &mut source.governor {
            governor.sample(
                now,
                &Period {
                    oldest,
                    left,
                    required,
                    copying,
                    paused,
                    still,
                },
            );
        }
        if let Some(obstacle) = source.look_for_obstacle(now) {
            let migration = source.options.migration;
            self.cx.notify(Event::Obstructed {
                migration,
                obstacle,
            });
        }
        self.pause_timer();
        self.resume_if_pressed(required);
        // Entries that the guest was writing to, and chunks held back by the old rate.
        self.outgoing.flush_delayed(&mut self.cx);
        self.pump();
    }
}
