//! The node's own choice of policy, beside every fixed policy: twelve guests, the same moves of each, by the real
//! controllers in virtual time.

mod loads;
mod promises;

use std::time::Duration;

use godwit_core::units::MigrationId;
use godwit_core::{AREA_SECTORS, Limits, MigrationOptions, POLICIES, PolicyOptions};

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

const UNQUEUED_DISK: DiskPlan = DiskPlan {
    base: 60 * MICROSECOND,
    tail: 1_000 * MICROSECOND,
    tail_permille: 2,
    nanoseconds_per_sector: 1_000,
    queues: false,
    stalls_every: 0,
};

/// Sizes of the engines' tables.
const LIMITS: Limits = Limits {
    requests: 256,
    window_chunks: 64,
    delayed_chunks: 8,
    delayed_ranges: 1024,
    hot_places: 1024,
    area_sectors: AREA_SECTORS,
    active_areas: 256,
};

/// The moves of one guest's disk.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The guest.
    pub load: &'static str,
    /// Each policy, `auto` last, and its move.
    pub figures: Vec<(&'static str, Figures)>,
}

impl Choice {
    /// Largest allowed ratio of the cost of `auto` to the best policy's cost.
    pub const MOST: f64 = 1.1;

    /// Returns the ratio of the cost of `auto` to the best policy's cost.
    pub fn ratio(&self) -> f64 {
        let figures = self.figures.iter();
        let costs: Vec<_> = figures.map(|(_, figures)| figures.cost.seconds()).collect();
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
            let measured = run(&load, options, thinks)
                .map_err(|violation| format!("{} by {policy} {violation}", load.name))?;
            figures.push((policy, measured));
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
    let mut plan = plan(load, DEPTH, options);
    if load.rate == 0 {
        plan.requests = 0;
    }
    panics_as_violation(|| World::new(plan, None, None).measure(&measurement)).unwrap_or_else(Err)
}

/// Returns the plan of one move beside a guest with this many requests in flight, without faults.
fn plan(load: &Load, depth: usize, options: MigrationOptions) -> Plan {
    Plan {
        seed: 1,
        sectors: DISK,
        load: u64::MAX,
        requests: u64::MAX,
        guest: guest(load, depth),
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
        disks: [UNQUEUED_DISK; 2],
        clocks: [ClockPlan {
            offset: 1,
            drift: 0,
        }; 2],
        tags: LIMITS.requests,
        store: 1_000 * MICROSECOND,
        power_loss_at_end: false,
        limits: LIMITS,
        most_steps: u64::MAX,
        image: None,
        protection: None,
    }
}

fn guest(load: &Load, depth: usize) -> GuestPlan {
    let nanobytes = 4096 * depth as u64 * 1_000_000_000;
    GuestPlan {
        workload: Workload::Uniform,
        depth,
        reads: 0,
        // The time for one queue depth of requests at this rate.
        think: nanobytes.checked_div(load.rate).unwrap_or_default(),
        longest: 1,
        pause: 0,
        deserts: 0,
        strays: 0,
        steady: Some(load.does),
    }
}
