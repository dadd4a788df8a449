//! The governor in use: the paper's pauses, a rate searched from below, and a window of chunks in flight.

use core::time::Duration;

use crate::controller::governor::in_flight::busy_window::{BusyWindow, GuestDid, Pace};
use crate::controller::governor::judgement::haste::Haste;
use crate::controller::governor::judgement::local_answer_budget::LocalAnswerBudget;
use crate::controller::governor::judgement::net_progress::NetProgress;
use crate::controller::governor::judgement::rate_search::RateSearch;
use crate::controller::governor::judgement::relaxed_bound::RelaxedBound;
use crate::controller::governor::judgement::strain_cause::StrainCause;
use crate::controller::governor::judgement::throughput::{Shortage, Throughput};
use crate::controller::governor::token_bucket::TokenBucket;
use crate::controller::governor::tuning::rate_and_pause::{
    FIRST_RATE_BYTES, LEAST_AUTOMATIC_RATE_BYTES, LEAST_KEPT_PART, LEAST_LAST_RATE_BYTES,
    LEAST_RATE_BYTES, LONGEST_PAUSE, MEMORY_PART, MOST_KEPT_PART, MOST_RATE_BYTES, REACTION,
    SHORTEST_PAUSE,
};
use crate::controller::governor::{Answer, Governor, JudgedPeriods, Period};
use crate::controller::{Controller, MigrationOptions, PromiseProgress};
use crate::sla::LatencyTarget;
use crate::units::{SECTOR_SIZE, Time};

/// Time between two judgements of the guest's latency.
const SAMPLING: Duration = Controller::LINK_SAMPLING;

/// Counts of a sampling period.
#[derive(Debug, Default)]
struct Counts {
    /// Latency of the slowest request answered.
    worst: Duration,
    answered: u32,
    /// Bytes of the answered requests.
    bytes: u64,
    /// Bytes of copies and delayed writes.
    spent: u64,
}

/// Requests of the last sampling periods, decaying.
#[derive(Debug, Default)]
struct Recent {
    requests: f64,
    late: f64,
    bytes: f64,
}

impl Recent {
    fn period_ends(&mut self, counts: &Counts) {
        self.requests = self.requests * MEMORY_PART + f64::from(counts.answered);
        self.late *= MEMORY_PART;
        self.bytes = self.bytes * MEMORY_PART + counts.bytes as f64;
    }
}

/// Spends the room that the guest leaves on finishing sooner.
#[derive(Debug)]
pub(super) struct Adaptive {
    target: Option<LatencyTarget>,
    interface_budget: Option<u64>,
    fixed_delayed_rate: Option<u64>,
    next_sample: Time,
    current: Counts,
    /// Factor by which the guest's requests exceed the promise although the migration stands still: at least 1. A pause
    /// for less would change nothing.
    own: RelaxedBound,
    /// Further factor by which the requests exceed the promise although copies hardly move: at least 1.
    crept: RelaxedBound,
    throughput: Option<Throughput>,
    /// Present only without an explicit promise.
    strain_cause: Option<StrainCause>,
    /// Absent if the migration's use of the link is bounded: waiting for more would be in vain.
    net_progress: Option<NetProgress>,
    /// Present only without an explicit promise or interface budget.
    haste: Option<Haste>,
    recent: Recent,
    /// `None`: outside of a pause no request is answered without the destination.
    local_answer_budget: Option<LocalAnswerBudget>,
    rate: u64,
    rate_search: RateSearch,
    budget: TokenBucket,
    delayed: TokenBucket,
    busy_window: BusyWindow,
    pause: Duration,
    resumed: Option<Time>,
    interface_full: bool,
    judged: JudgedPeriods,
}

impl Adaptive {
    /// Starts with these options and the count of the governor before, if any.
    pub(super) fn new(options: &MigrationOptions, judged: JudgedPeriods, now: Time) -> Self {
        let rate = options.interface_budget.map_or(FIRST_RATE_BYTES, |budget| {
            FIRST_RATE_BYTES.min(budget / 4).max(LEAST_RATE_BYTES)
        });
        let delayed = options.delayed_write_rate.unwrap_or(rate / 2);
        let bounds = [
            options.max_bandwidth,
            options.interface_budget,
            options.delayed_write_rate,
        ];
        let parts = options.governor;
        let is_bounded = bounds.iter().any(Option::is_some);
        Self {
            target: options.sla,
            interface_budget: options.interface_budget,
            fixed_delayed_rate: options.delayed_write_rate,
            next_sample: now.after(SAMPLING),
            current: Counts::default(),
            own: RelaxedBound::NONE,
            crept: RelaxedBound::NONE,
            throughput: options
                .guest_load
                .map(|before| Throughput::new(before, now)),
            strain_cause: options
                .guest_load
                .filter(|_| parts.strain_cause)
                .map(|_| StrainCause::default()),
            haste: options
                .guest_load
                .filter(|_| parts.haste && options.interface_budget.is_none())
                .map(|before| Haste::new(before.per_second, now)),
            net_progress: (!is_bounded && parts.net_progress).then(|| NetProgress::new(now)),
            recent: Recent::default(),
            local_answer_budget: parts.local_answer_budget.then(LocalAnswerBudget::default),
            rate,
            rate_search: RateSearch::new(),
            budget: TokenBucket::new(rate, now),
            delayed: TokenBucket::new(delayed, now),
            busy_window: BusyWindow::new(options),
            pause: SHORTEST_PAUSE,
            resumed: None,
            interface_full: false,
            judged,
        }
    }

    /// Returns true while copies go at full speed because going slowly does not spare the guest.
    fn hurries(&self) -> bool {
        self.haste.as_ref().is_some_and(Haste::hurries)
    }

    /// Returns the promise, eased by delays without fault of the migration, and by the need to end at all.
    fn eased(&self, promised: Duration) -> Duration {
        let own = promised.mul_f64(self.own.factor());
        if self.hurries() {
            return own.max(Controller::MOST_EASED);
        }
        // An explicit promise is kept.
        let net_progress = match (&self.net_progress, &self.throughput) {
            (Some(net_progress), Some(_)) => net_progress.factor(),
            _ => 1.0,
        };
        own.max(own.mul_f64(net_progress).min(Controller::MOST_EASED))
    }

    fn recent_requests(&self) -> f64 {
        self.recent.requests + f64::from(self.current.answered)
    }

    /// Returns the number of recent requests that may be late by the target's percentile.
    fn allowance(&self) -> f64 {
        let allowed = self.target.map_or(0, |target| target.allowed_per_million);
        self.recent_requests() * f64::from(allowed) / 1e6
    }

    /// Returns the least rate of copies in bytes per second, short of a pause. An explicit promise or interface budget
    /// comes before progress.
    fn least_rate(&self) -> u64 {
        if self.throughput.is_none() || self.interface_budget.is_some() {
            return LEAST_RATE_BYTES;
        }
        let lately = SAMPLING.as_secs_f64() / (1.0 - MEMORY_PART);
        LEAST_AUTOMATIC_RATE_BYTES.max((self.recent.bytes / lately) as u64)
    }

    /// Returns true if copies hardly move: the guest's strain then does not speak against their rate.
    fn creeps(&self) -> bool {
        self.rate <= self.least_rate()
    }

    /// Reduces the rate of copies, unless copies hardly move already.
    fn give_way(&mut self) {
        if !self.creeps() {
            self.rate_search.yielded(self.rate);
            self.rate = self.rate / 10 * 7;
        }
    }

    /// Reduces the rate of copies below their rate during the shortage, by twice the lacking part, so that the guest
    /// can catch up. If copies stood still like the guest, both waited for the disk.
    fn make_up_for(&mut self, shortage: Shortage) {
        if !self.creeps() && shortage.copied > 0 {
            // Copies far below their allowed rate are not the cause of the shortage.
            let took = shortage.copied.clamp(self.rate / 2, self.rate);
            self.rate_search.yielded(took);
            let keep = (1.0 - 2.0 * shortage.lacked).clamp(LEAST_KEPT_PART, MOST_KEPT_PART);
            self.rate = (took as f64 * keep) as u64;
        }
    }

    /// Judges the guest's throughput.
    fn judge_throughput(&mut self, now: Time) {
        // A shortage while copies hurry says nothing about the rate before.
        let hurries = self.hurries();
        let stood_still = hurries || self.current.answered == 0 && !self.busy_window.arrives();
        let Some(throughput) = &mut self.throughput else {
            return;
        };
        if stood_still {
            return throughput.stood_still(now);
        }
        if let Some(shortage) = throughput.count(now, self.current.answered, self.current.spent) {
            self.make_up_for(shortage);
        }
    }

    /// Judges if slow copies spare the guest.
    fn judge_haste(&mut self, now: Time, period: &Period) {
        let held_back = self.creeps() || period.paused;
        let is_idle = self.current.answered == 0 && period.oldest.is_zero();
        let hurried = self.hurries();
        let Some(haste) = &mut self.haste else {
            return;
        };
        if is_idle {
            return haste.stood_still(now);
        }
        haste.count(now, self.current.answered, self.current.spent, held_back);
        if hurried && !haste.hurries() {
            // The search begins anew from below.
            self.rate = LEAST_RATE_BYTES;
            self.rate_search = RateSearch::new();
        }
    }

    /// Allows more chunks in flight, as long as a chunk takes no longer than the longest allowed request.
    fn widen(&mut self, worst: Duration) {
        let guest = GuestDid { worst, lags: false };
        let limit = Controller::MOST_EASED;
        self.busy_window.adjust(limit, guest, Pace::Starved);
    }

    fn adjust(&mut self, worst: Duration, promised: Duration, period: &Period) {
        if period.still {
            let own = promised.mul_f64(self.own.factor());
            self.own.period_ends(worst > own * 3 / 4);
            return;
        }
        let limit = self.eased(promised);
        self.own.period_ends(false);
        let comfort = limit.mul_f64(self.crept.factor());
        // The percentile allows a few late requests. Half of them are kept for delays without fault of the migration.
        let strained = worst > comfort && self.recent.late > self.allowance() / 2.0;
        let creeps = self.creeps();
        self.crept.period_ends(strained && creeps);
        // An explicit promise is kept despite all reasons against it.
        let at_fault = match &mut self.strain_cause {
            Some(strain_cause) => strain_cause.lies_with_copies(strained, creeps),
            None => strained,
        };
        self.rate_search.period_ends(self.rate, strained && !creeps);
        let used = per_second(self.current.spent);
        if at_fault {
            self.give_way();
        } else if !strained && !self.throughput.as_ref().is_some_and(Throughput::is_short) {
            // An unused rate is no reason for a higher rate.
            if used >= self.rate / 4 * 3 {
                self.rate += self.rate_search.rise(self.rate);
            }
        }
        // An explicit promise comes before progress here, too.
        let automatic = self.throughput.is_some();
        let (_, chunk_sectors) = self.in_flight();
        let one_more = self.current.spent + u64::from(chunk_sectors) * SECTOR_SIZE;
        let pace = if automatic && period.copying && used < self.least_rate() / 4 * 3 {
            Pace::Starved
        } else if per_second(one_more) < self.rate / 8 * 7 {
            Pace::BelowRate
        } else {
            Pace::AtRate
        };
        let lags = self.throughput.as_ref().is_some_and(Throughput::lags);
        self.busy_window
            .adjust(limit, GuestDid { worst, lags }, pace);
    }
}

impl Governor for Adaptive {
    fn threshold(&self) -> Option<Duration> {
        let limit = self.eased(self.target?.limit);
        Some(limit.saturating_sub(REACTION).max(limit / 2))
    }

    fn pass_begins(&mut self) {
        if let Some(net_progress) = &mut self.net_progress {
            net_progress.restart();
        }
    }

    fn in_flight(&self) -> (u16, u32) {
        self.busy_window.in_flight()
    }

    fn answered(&mut self, answer: &Answer) {
        let &Answer { bytes, latency, .. } = answer;
        self.current.answered += 1;
        self.current.bytes += bytes.0;
        self.current.worst = self.current.worst.max(latency);
        if !answer.known_late && self.target.is_some_and(|target| latency > target.limit) {
            self.recent.late += 1.0;
        }
        if answer.writes
            && let Some(net_progress) = &mut self.net_progress
        {
            net_progress.written(bytes.0);
        }
    }

    fn may_answer_alone(&mut self) -> bool {
        let requests = self.recent_requests();
        let budget = self.local_answer_budget.as_mut();
        budget.is_some_and(|budget| budget.allow(requests))
    }

    fn may_be_late(&mut self) -> bool {
        if self.target.is_none() {
            return true;
        }
        let allows = self.recent.late + 1.0 <= self.allowance() / 2.0;
        if allows {
            self.recent.late += 1.0;
        }
        allows
    }

    fn chunk_done(&mut self, took: Duration) {
        self.busy_window.chunk_done(took);
    }

    fn ready(&mut self, now: Time, delayed: bool) -> Result<(), Time> {
        self.budget.ready(now)?;
        if delayed {
            self.delayed.ready(now)
        } else {
            Ok(())
        }
    }

    fn spend(&mut self, bytes: u64, delayed: bool) {
        self.current.spent += bytes;
        self.budget.spend(bytes);
        if delayed {
            self.delayed.spend(bytes);
        }
    }

    fn next_sample(&self) -> Time {
        self.next_sample
    }

    fn sample(&mut self, now: Time, period: &Period) {
        let &Period {
            oldest,
            left,
            copying,
            ..
        } = period;
        self.next_sample = now.after(SAMPLING);
        let worst = self.current.worst.max(oldest);
        let seen = self.current.answered > 0 || !oldest.is_zero();
        self.recent.period_ends(&self.current);
        if let Some(budget) = &mut self.local_answer_budget {
            budget.period_ends(MEMORY_PART);
        }
        if let Some(net_progress) = &mut self.net_progress {
            net_progress.period_ends(now, left, period.paused);
        }
        if let Some(target) = self.target
            && seen
        {
            self.judged.all += 1;
            self.judged.breached += u64::from(worst > target.limit);
            if self.hurries() {
                self.widen(worst);
            } else {
                self.adjust(worst, target.limit, period);
            }
        }
        self.judge_throughput(now);
        self.judge_haste(now, period);
        let least = self.least_rate();
        let least = if copying {
            least
        } else {
            least.max(LEAST_LAST_RATE_BYTES)
        };
        // A deadline that has passed asks for more than any disk can do.
        let least = least.max(period.required).min(MOST_RATE_BYTES);
        self.rate = self.rate.clamp(least, MOST_RATE_BYTES);
        if self.hurries() {
            self.rate = MOST_RATE_BYTES;
        }
        self.budget.set_rate(self.rate);
        // The delayed writes' share of the budget while copies go on.
        let share = if copying { self.rate / 2 } else { self.rate };
        self.delayed
            .set_rate(self.fixed_delayed_rate.unwrap_or(share));
        self.busy_window.period_ends();
        self.current = Counts::default();
    }

    fn pressed(&self, required: u64) -> bool {
        required >= self.rate
    }

    fn pause(&mut self, now: Time) -> Time {
        let soon = self
            .resumed
            .is_some_and(|resumed| now.since(resumed) < self.pause * 4);
        // While the migration loses ground, a longer pause loses more.
        let loses = self.net_progress.as_ref().is_some_and(NetProgress::is_lost);
        // A hurrying migration would lose its purpose in a longer pause.
        self.pause = if soon && !loses && !self.hurries() {
            (self.pause * 2).min(LONGEST_PAUSE)
        } else {
            SHORTEST_PAUSE
        };
        if !self.creeps() {
            self.rate_search.yielded(self.rate);
            self.rate = (self.rate / 4 * 3).max(self.least_rate());
        }
        self.busy_window.narrow();
        now.after(self.pause)
    }

    fn prolong(&mut self, now: Time) -> Time {
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        now.after(self.pause)
    }

    fn resume(&mut self, now: Time) {
        self.resumed = Some(now);
    }

    fn interface(&mut self, rate: Option<u64>, paused: bool) -> bool {
        let (Some(budget), Some(rate)) = (self.interface_budget, rate) else {
            return false;
        };
        if rate > budget / 20 * 19 && !paused {
            self.rate = (self.rate / 10 * 8).max(LEAST_RATE_BYTES);
        } else if rate < budget / 20 * 17 && self.target.is_none() {
            self.rate = (self.rate + self.rate / 20 + (256 << 10)).min(budget);
        }
        self.budget.set_rate(self.rate);
        // A pause ends once other traffic leaves room.
        self.interface_full = rate > if paused { budget / 10 * 9 } else { budget };
        self.interface_full
    }

    fn interface_is_full(&self) -> bool {
        self.interface_full
    }

    fn report(&self, progress: &mut PromiseProgress) {
        progress.limit = self.target.map(|target| target.limit);
        progress.allowed = progress.limit.map(|limit| self.eased(limit));
        progress.periods = self.judged.all;
        progress.breached_periods = self.judged.breached;
        progress.rate_limit = (!self.hurries()).then_some(self.rate);
    }
}

/// Converts bytes of a sampling period to bytes per second.
const fn per_second(bytes: u64) -> u64 {
    bytes.saturating_mul(1_000_000_000) / SAMPLING.as_nanos() as u64
}

#[cfg(test)]
mod tests;
