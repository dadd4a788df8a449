//! A run for measuring one move instead of looking for faults: nothing fails, and the invariants are checked all the
//! same.

use std::collections::VecDeque;
use std::time::Duration;

use godwit_core::auto::{Cost, Facts, Leave, Pace, Why, reconsider};
use godwit_core::event::{Obstacle, Phase};
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Extent, Lba};
use godwit_core::{Arrivals, GuestLoad, MigrationChange, PushOptions};

use super::{MILLISECOND, Violation, World};
use crate::disk::Data;

/// Time between two reviews of a node's choice.
const THINKS: u64 = 500 * MILLISECOND;

/// Time between two looks at the progress of a move.
const LOOKS: u64 = 10 * MILLISECOND;

/// Most sectors written at once to fill a disk.
const FILLED: u64 = 2048;

/// A move to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measurement {
    /// Number of sectors with data, from the start of the disk.
    pub(crate) full: u64,
    /// Time for which the guest works before the disk moves.
    pub(crate) before: Duration,
    /// Time after which the move is given up.
    pub(crate) limit: Duration,
    /// True if the policy is reviewed while the disk moves.
    pub(crate) thinks: bool,
    /// A guest with these arrivals is promised as much as a node promises it.
    pub(crate) automatic: Option<Arrivals>,
}

/// The measurements of a move.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Cost of the move.
    pub cost: Cost,
    /// Time from the start until the other node serves the disk; `None` if the move was given up.
    pub handed_over: Option<Duration>,
    /// Bytes over the link, both directions together.
    pub carried: u64,
    /// Reason for a change of the policy, if any.
    pub why: Option<Why>,
    /// The guest's latencies.
    pub waits: Waits,
}

/// The guest's latencies while its disk moved.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waits {
    /// Promised latency.
    pub promised: Option<Duration>,
    /// Part of the requests that took longer than promised.
    pub late: f64,
    /// The time within which 99 of a hundred requests were answered.
    pub p99: Duration,
    /// The time within which 9,999 of ten thousand requests were answered.
    pub p9999: Duration,
}

/// The review state of a policy chosen by the node.
#[derive(Clone, Debug, Default)]
pub(super) struct Thought {
    begun: u64,
    /// Obstacle to the end of the move, and the time of its start.
    obstacle: Option<(Obstacle, u64)>,
    why: Option<Why>,
    /// Bytes sent as copies, sent as double writes, and written by the guest, with the time of each sample of the last
    /// seconds, oldest first.
    sent: VecDeque<(u64, [u64; 3])>,
    /// Sectors of the disk with data.
    full: u64,
}

/// Number of samples from which a pace is computed.
const PACE: usize = 20;

impl Waits {
    fn of(mut waits: Vec<u64>, promised: Option<Duration>) -> Self {
        let limit = promised.unwrap_or(Duration::MAX).as_nanos();
        let late = waits.iter().filter(|wait| u128::from(**wait) > limit);
        Self {
            promised,
            late: late.count() as f64 / waits.len().max(1) as f64,
            p99: at_quantile(&mut waits, 0.99),
            p9999: at_quantile(&mut waits, 0.9999),
        }
    }
}

/// Returns the part of its throughput before the move that the guest kept.
fn part_kept(had_before: u64, before: Duration, had: u64, took: Duration) -> f64 {
    let usual = had_before as f64 / before.as_secs_f64() * took.as_secs_f64();
    if usual > 0.0 {
        (had as f64 / usual).min(1.0)
    } else {
        1.0
    }
}

/// Returns the time that this part of the waits does not exceed.
fn at_quantile(waits: &mut [u64], quantile: f64) -> Duration {
    waits.sort_unstable();
    let at = (waits.len() as f64 * quantile) as usize;
    Duration::from_nanos(waits.get(at).copied().unwrap_or_default())
}

impl World {
    /// Runs until the planned move is over.
    ///
    /// # Errors
    /// The violated invariant.
    pub(crate) fn measure(mut self, what: &Measurement) -> Result<Figures, Violation> {
        self.fill(what.full);
        self.start_guest();
        self.schedule(1, Self::sample);
        let nanoseconds = |time: Duration| time.as_nanos() as u64;
        self.run_until(nanoseconds(what.before));
        let had_before = self.guest.had;
        self.promise_automatically(what);
        let begun = self.now;
        (self.thought.begun, self.thought.full) = (begun, what.full);
        let carried = self.carried_bytes();
        self.schedule(1, Self::operate);
        if what.thinks {
            self.schedule(THINKS, Self::think);
        }
        let end = begun + nanoseconds(what.limit);
        let (mut over, mut waits) = (None, None);
        let mut free = false;
        while self.holds() && !free && self.now < end {
            self.run_until(self.now + LOOKS);
            let since = Duration::from_nanos(self.now - begun);
            if over.is_none() && self.nodes[1].serves() {
                over = Some(since);
                waits = Some(std::mem::take(&mut self.guest.waits));
            }
            free = over.is_some() && self.is_whole();
        }
        let took = Duration::from_nanos(self.now - begun);
        let carried = self.carried_bytes() - carried;
        let had = self.guest.had - had_before;
        if !free {
            self.cancel();
        }
        let waits = waits.unwrap_or_else(|| std::mem::take(&mut self.guest.waits));
        let options = self.plan.migrations[0].options;
        let (deadline, promised) = (options.deadline, options.sla.map(|sla| sla.limit));
        self.settle();
        if let Some(violation) = self.outcome.violation {
            return Err(violation);
        }
        let kept = part_kept(had_before, what.before, had, took);
        let cost = Cost {
            until_free: took,
            on_two_nodes: over.map_or(Duration::ZERO, |over| took - over),
            lost: took.mul_f64(1.0 - kept),
            late: deadline.map_or(Duration::ZERO, |deadline| {
                over.unwrap_or(took).saturating_sub(deadline)
            }),
        };
        Ok(Figures {
            cost,
            handed_over: over.filter(|_| free),
            carried,
            why: self.thought.why,
            waits: Waits::of(waits, promised),
        })
    }

    /// Promises the guest what a node promises by itself a guest with the latencies up to now.
    fn promise_automatically(&mut self, what: &Measurement) {
        let waits = &mut std::mem::take(&mut self.guest.waits);
        let Some(arrivals) = what.automatic else {
            return;
        };
        let share = match arrivals {
            Arrivals::ClosedLoop => at_quantile(waits, 0.5) * GuestLoad::CLOSED_LOOP_PARTS,
            Arrivals::OpenLoop | Arrivals::Unknown => Duration::ZERO,
        };
        let usual = at_quantile(waits, 0.9999) * 5 / 4;
        let limit = usual
            .max(share.min(Duration::from_millis(20)))
            .max(Duration::from_millis(3));
        let options = &mut self.plan.migrations[0].options;
        options.sla = Some(LatencyTarget {
            limit,
            allowed_per_million: 100,
        });
        options.wake_up_limit = Some(limit);
        options.guest_load = Some(GuestLoad {
            per_second: (waits.len() as f64 / what.before.as_secs_f64()) as u64,
            arrivals,
        });
    }

    /// Gives the source's disk data, durably.
    fn fill(&mut self, sectors: u64) {
        for start in (0..sectors).step_by(FILLED as usize) {
            let length = FILLED.min(sectors - start) as u32;
            let Some(extent) = Extent::new(Lba(start), length) else {
                continue;
            };
            let number = self.history.started(extent, false, 0, 0);
            self.history.acknowledged(number, true, 0);
            let data: Data = Some(vec![number; length as usize].into());
            let write = godwit_core::action::DiskOperation::Write { extent, fua: true };
            self.nodes[0].disk.store(&write, &data);
        }
    }

    fn carried_bytes(&self) -> u64 {
        self.network.directions.iter().map(|it| it.total).sum()
    }

    /// Reviews the policy of a migration, if the node chose it.
    pub(super) fn think(&mut self) {
        self.schedule(THINKS, Self::think);
        let node = self.course.source;
        let progress = self.nodes[node].progress();
        let Some(progress) = progress.filter(|it| it.phase == Phase::Copying) else {
            return;
        };
        let now = self.now;
        let thought = &mut self.thought;
        thought.obstacle = progress.promise.obstacle.map(|obstacle| {
            let since = thought.obstacle.map_or(now, |(_, since)| since);
            (obstacle, since)
        });
        let copies = progress.copy_bytes_sent;
        let doubled = progress.double_write_bytes_sent;
        let sent = [copies, doubled, self.guest.written];
        thought.sent.push_back((now, sent));
        if thought.sent.len() > PACE {
            thought.sent.pop_front();
        }
        let first = thought.sent.front().filter(|(at, _)| *at < now);
        let pace = first.map(|(at, before)| {
            let measured = Duration::from_nanos(now - at);
            let rate = |of: usize| (sent[of] - before[of]) as f64 / measured.as_secs_f64();
            Pace {
                measured,
                left: (thought.full * 512).saturating_sub(copies),
                copied: copies,
                copies: rate(0),
                doubled: rate(1),
                written: rate(2),
            }
        });
        let planned = self.plan.migrations[0].options;
        let facts = Facts {
            elapsed: Duration::from_nanos(now - thought.begun),
            deadline: planned.deadline,
            obstacle: (thought.obstacle)
                .map(|(obstacle, since)| (obstacle, Duration::from_nanos(now - since))),
            pace,
        };
        if thought.why.is_some() {
            return;
        }
        let Some(Leave { push_for, why }) = reconsider(&facts) else {
            return;
        };
        let change = MigrationChange {
            policy: Some(PushOptions {
                longest_push: push_for,
                ..PushOptions::USUAL
            }),
            ..MigrationChange::default()
        };
        let changed = self.with(node, |c, now| c.change_migration(now, &change));
        if changed == Some(Ok(())) {
            self.thought.why = Some(why);
        }
    }
}
