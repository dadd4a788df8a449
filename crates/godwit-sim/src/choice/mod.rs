//! The node's own choice of policy, beside every fixed policy: twelve guests, the same moves of each, by the real
//! controllers in virtual time.

mod loads;
mod promises;

use std::time::Duration;

use godwit_core::auto::{Cost, Why};
use godwit_core::units::MigrationId;
use godwit_core::{Limits, MigrationOptions, POLICIES, PolicyOptions};

use self::loads::{DISK, LINK, Load};
pub use self::promises::{Move, moves};
use crate::plan::{
    ClockPlan, DiskPlan, GuestPlan, LinkPlan, MigrationPlan, OlderCopyPlan, Plan, Workload,
};
use crate::run::soak::panics_as_violation;
use crate::world::measuring::{Figures, Measurement};
use crate::world::{Violation, World};

const MICROSECOND: u64 = 1_000;

/// Time for which a guest works before its disk moves.
const BEFORE: Duration = Duration::from_secs(5);

/// Limit of a move: six times the time of an idle disk.
const LIMIT: Duration = Duration::from_secs(150);

/// Requests in flight of the guest.
const DEPTH: usize = 16;

/// Sizes of the engines' tables.
const LIMITS: Limits = Limits {
    requests: 256,
    window_chunks: 64,
    delayed_chunks: 8,
    delayed_ranges: 1024,
    hot_places: 1024,
};

/// One move.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The policy, or `auto`.
    pub policy: &'static str,
    /// Cost of the move.
    pub cost: Cost,
    /// Time until the handover; `None` if the move was given up.
    pub handed_over: Option<Duration>,
    /// Bytes over the link.
    pub carried: u64,
    /// Reason for a change of the policy by `auto`, if any.
    pub why: Option<Why>,
}

/// The moves of one guest's disk.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The guest.
    pub load: &'static str,
    /// One figure for each policy, `auto` last.
    pub figures: Vec<Figure>,
}

impl Choice {
    /// Largest allowed ratio of the cost of `auto` to the best policy's cost.
    pub const MOST: f64 = 1.1;

    /// Returns the ratio of the cost of `auto` to the best policy's cost.
    pub fn ratio(&self) -> f64 {
        let costs = self.figures.iter().map(|figure| figure.cost.seconds());
        let costs: Vec<_> = costs.collect();
        let Some((auto, fixed)) = costs.split_last() else {
            return f64::NAN;
        };
        auto / fixed.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// Returns true if the ratio is at most [`Self::MOST`].
    pub fn holds(&self) -> bool {
        self.ratio() <= Self::MOST
    }
}

/// Moves the disk of each guest by each policy. Calls `tell` after the last move of each guest.
///
/// # Errors
/// The move that went wrong, and its violation.
pub fn choices(mut tell: impl FnMut(&Choice)) -> Result<Vec<Choice>, String> {
    let mut choices = Vec::new();
    for load in loads::all() {
        let mut figures = Vec::new();
        let fixed = POLICIES.map(|policy| (policy.name, policy.usual, false));
        let auto = ("auto", PolicyOptions::DoubleWrite, true);
        for (policy, options, thinks) in fixed.into_iter().chain([auto]) {
            let measured = run(&load, options, thinks).map_err(|violation| {
                let Violation { claim, detail } = violation;
                format!("{} by {policy} violates: {claim}\n  {detail}", load.name)
            })?;
            figures.push(Figure {
                policy,
                cost: measured.cost,
                handed_over: measured.handed_over,
                carried: measured.carried,
                why: measured.why,
            });
        }
        let choice = Choice {
            load: load.name,
            figures,
        };
        tell(&choice);
        choices.push(choice);
    }
    Ok(choices)
}

fn run(load: &Load, policy: PolicyOptions, thinks: bool) -> Result<Figures, Violation> {
    let measurement = Measurement {
        full: load.full,
        before: BEFORE,
        limit: LIMIT,
        thinks,
        automatic: None,
    };
    let plan = plan(load, policy);
    panics_as_violation(|| World::new(plan, None, None).measure(&measurement)).unwrap_or_else(Err)
}

fn plan(load: &Load, policy: PolicyOptions) -> Plan {
    let bytes = load.does.blocks * 4096;
    // Time for one queue depth of requests at this rate.
    let period = match load.rate {
        0 => 0,
        rate => bytes * DEPTH as u64 * 1_000_000_000 / rate,
    };
    let options = MigrationOptions {
        // Chunks and windows take as long on this link as the default ones on a link of 1 Gbit/s, which is thirty times
        // as fast.
        chunk_sectors: 64,
        busy_chunk_sectors: 16,
        window_chunks: 32,
        idle_window_chunks: 8,
        busy_window_chunks: 4,
        sla: load.sla,
        deadline: load.deadline,
        policy,
        find_holes: true,
        ..MigrationOptions::new(MigrationId([1; 16]))
    };
    let disk = DiskPlan {
        base: 60 * MICROSECOND,
        tail: 1_000 * MICROSECOND,
        tail_permille: 2,
        nanoseconds_per_sector: 1_000,
        queues: false,
        stalls_every: 0,
    };
    let clock = ClockPlan {
        offset: 1,
        drift: 0,
    };
    Plan {
        seed: 1,
        sectors: DISK,
        load: u64::MAX,
        requests: if load.rate > 0 { u32::MAX } else { 0 },
        guest: GuestPlan {
            workload: Workload::Uniform,
            depth: DEPTH,
            reads: 0,
            think: period,
            longest: 1,
            pause: 0,
            deserts: 0,
            strays: 0,
            steady: Some(load.does),
        },
        migrations: vec![MigrationPlan {
            gap: 0,
            options,
            client_follows: Some(MICROSECOND),
            ordered_after: 0,
            ordered_there: false,
            store_refuses: false,
            older_copy: OlderCopyPlan::Ignore,
            change: None,
        }],
        faults: Vec::new(),
        link: LinkPlan {
            bandwidth: LINK,
            delay: 200 * MICROSECOND,
            jitter: 20 * MICROSECOND,
            socket: 16 << 10,
            copy_connections: 2,
        },
        disks: [disk, disk],
        clocks: [clock, clock],
        tags: LIMITS.requests,
        store: 1_000 * MICROSECOND,
        power_loss_at_end: false,
        limits: LIMITS,
        most_steps: u64::MAX,
        image: None,
    }
}
