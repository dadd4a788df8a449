//! Moves under a promise. The guest shares its disk with the copies, and the link with double writes: a guest in need of
//! more than the copies leave gets less done or waits longer.

use std::time::Duration;

use godwit_core::sla::LatencyTarget;
use godwit_core::units::MigrationId;
use godwit_core::{Arrivals, GovernorParts, MigrationOptions};

use super::{LIMITS, Load, MICROSECOND, plan};
use crate::plan::{DiskPlan, LinkPlan, Places, Plan, SteadyLoad};
use crate::run::soak::panics_as_violation;
use crate::world::World;
use crate::world::measuring::{Figures, Measurement};

/// Time for which a guest works before its disk moves.
const BEFORE: Duration = Duration::from_secs(2);

/// Limit of a move: thirty times the time of an idle disk.
const LIMIT: Duration = Duration::from_secs(60);

/// Sectors of the disk, all with data: 1 GiB.
const DISK: u64 = 1 << 21;

/// Requests in flight of a closed loop, and of a guest with its own pace.
const CLOSED_DEPTH: usize = 16;
/// See [`CLOSED_DEPTH`].
const OPEN_DEPTH: usize = 64;

/// The medians of some moves.
#[derive(Clone, Debug)]
pub struct Move {
    /// Guest, path and promise.
    pub name: String,
    /// Time until the source is free.
    pub seconds: f64,
    /// Part of its former throughput that the guest kept.
    pub kept: f64,
    /// Latencies in seconds.
    pub p99: f64,
    /// See `p99`.
    pub p9999: f64,
    /// Promised latency in seconds.
    pub promised: f64,
    /// Part of the requests that took longer than promised.
    pub late: f64,
    /// Moves that did not end.
    pub given_up: usize,
}

/// A guest, and its path to the other node.
#[derive(Clone, Copy, Debug)]
struct Cell {
    name: &'static str,
    places: Places,
    reads: u64,
    /// Bytes per second of the guest; 0 for a closed loop.
    rate: u64,
    /// Arrivals as measured before the move.
    arrivals: Arrivals,
    /// Bytes per second of the link.
    link: u64,
    disk: DiskPlan,
    /// `None`: as a node promises by itself.
    stated: Option<LatencyTarget>,
}

const FAST_LINK: u64 = 625_000_000;
const SLOW_LINK: u64 = 125_000_000;

/// 1 GB/s.
const FAST_DISK: DiskPlan = DiskPlan {
    base: 70 * MICROSECOND,
    tail: 1_000 * MICROSECOND,
    tail_permille: 0,
    nanoseconds_per_sector: 512,
    queues: true,
    stalls_every: 0,
};

/// 250 MB/s.
const SLOW_DISK: DiskPlan = DiskPlan {
    nanoseconds_per_sector: 2_048,
    ..FAST_DISK
};

/// One request in a thousand holds all others up.
const STALLING_DISK: DiskPlan = DiskPlan {
    tail: 8_000 * MICROSECOND,
    tail_permille: 1,
    ..FAST_DISK
};

/// A standstill now and then while the guest's disk moves, whatever the load.
const STANDING_DISK: DiskPlan = DiskPlan {
    stalls_every: 400_000 * MICROSECOND,
    ..FAST_DISK
};

const fn target(milliseconds: u64, allowed_per_million: u32) -> Option<LatencyTarget> {
    Some(LatencyTarget {
        limit: Duration::from_millis(milliseconds),
        allowed_per_million,
    })
}

fn cells() -> Vec<Cell> {
    let anywhere = Places::Within(DISK);
    let skewed = Places::Skewed(DISK);
    let open = |name, places, reads, megabytes: u64| Cell {
        name,
        places,
        reads,
        rate: megabytes * 1_000_000,
        arrivals: if megabytes > 0 {
            Arrivals::OpenLoop
        } else {
            Arrivals::ClosedLoop
        },
        link: FAST_LINK,
        disk: FAST_DISK,
        stated: None,
    };
    let writes = open("writes, 40 MB/s", anywhere, 0, 40);
    let mixed = open("half writes, 80 MB/s", anywhere, 50, 80);
    let full = Cell {
        disk: SLOW_DISK,
        ..open("half writes, 100 MB/s, slow disk", anywhere, 50, 100)
    };
    let crowds = Cell {
        link: SLOW_LINK,
        ..open("skewed writes, 110 MB/s, slow link", skewed, 0, 110)
    };
    let takes_all = open("writes, no limit", anywhere, 0, 0);
    let fills = Cell {
        link: SLOW_LINK,
        ..open("writes, no limit, slow link", anywhere, 0, 0)
    };
    let stated = |name, cell, stated| Cell {
        name,
        stated,
        ..cell
    };
    vec![
        open("half writes, 2 MB/s", anywhere, 50, 2),
        open("writes, 20 MB/s", anywhere, 0, 20),
        writes,
        mixed,
        open("skewed writes, 80 MB/s", skewed, 0, 80),
        takes_all,
        open("half writes, no limit", anywhere, 50, 0),
        Cell {
            arrivals: Arrivals::Unknown,
            ..open("half writes, no limit, not known", anywhere, 50, 0)
        },
        Cell {
            arrivals: Arrivals::Unknown,
            ..open("writes, no limit, not known", anywhere, 0, 0)
        },
        Cell {
            disk: STALLING_DISK,
            ..open("writes, 40 MB/s, stalling disk", anywhere, 0, 40)
        },
        Cell {
            disk: STANDING_DISK,
            ..open("half writes, 60 MB/s, standing disk", anywhere, 50, 60)
        },
        Cell {
            disk: STANDING_DISK,
            ..open("half writes, no limit, standing disk", anywhere, 50, 0)
        },
        Cell {
            disk: SLOW_DISK,
            ..open("half writes, 40 MB/s, slow disk", anywhere, 50, 40)
        },
        full,
        Cell {
            disk: SLOW_DISK,
            ..open("writes, no limit, slow disk", anywhere, 0, 0)
        },
        Cell {
            link: SLOW_LINK,
            ..open("writes, 40 MB/s, slow link", anywhere, 0, 40)
        },
        crowds,
        fills,
        stated("p99.99<3ms: half writes, 80 MB/s", mixed, target(3, 100)),
        stated("p99.9<20ms: writes, 40 MB/s", writes, target(20, 1_000)),
        stated("p99.9<2ms: writes, no limit", takes_all, target(2, 1_000)),
        stated("p99.9<20ms: full slow disk", full, target(20, 1_000)),
        stated("p99.9<20ms: slow link, 110 MB/s", crowds, target(20, 1_000)),
        stated("p99.9<20ms: slow link, no limit", fills, target(20, 1_000)),
    ]
}

/// Moves the disk of each guest whose name contains `only` once for each seed, by a governor without the given parts.
/// Calls `tell` with the medians of each guest's moves.
///
/// # Errors
/// The move that went wrong, and its violation.
pub fn moves(
    seeds: u64,
    governor: GovernorParts,
    only: &str,
    mut tell: impl FnMut(&Move),
) -> Result<(), String> {
    for cell in cells() {
        if !cell.name.contains(only) {
            continue;
        }
        let mut figures = Vec::new();
        for seed in 1..=seeds {
            figures.push(cell.run(seed, governor)?);
        }
        let median = |of: &dyn Fn(&Figures) -> f64| {
            let mut all: Vec<_> = figures.iter().map(of).collect();
            all.sort_unstable_by(f64::total_cmp);
            all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
        };
        tell(&Move {
            name: cell.name.to_owned(),
            seconds: median(&|it| it.cost.until_free.as_secs_f64()),
            kept: median(&|it| 1.0 - it.cost.lost.as_secs_f64() / it.cost.until_free.as_secs_f64()),
            p99: median(&|it| it.waits.p99.as_secs_f64()),
            p9999: median(&|it| it.waits.p9999.as_secs_f64()),
            promised: median(&|it| it.waits.promised.unwrap_or_default().as_secs_f64()),
            late: median(&|it| it.waits.late),
            given_up: figures.iter().filter(|it| it.handed_over.is_none()).count(),
        });
    }
    Ok(())
}

impl Cell {
    fn run(&self, seed: u64, governor: GovernorParts) -> Result<Figures, String> {
        let measurement = Measurement {
            full: DISK,
            before: BEFORE,
            limit: LIMIT,
            thinks: false,
            automatic: self.stated.is_none().then_some(self.arrivals),
        };
        let plan = self.plan(seed, governor);
        panics_as_violation(|| World::new(plan, None, None).measure(&measurement))
            .unwrap_or_else(Err)
            .map_err(|violation| {
                format!(
                    "{} with seed {seed} violates: {}\n  {}",
                    self.name, violation.claim, violation.detail
                )
            })
    }

    fn plan(&self, seed: u64, governor: GovernorParts) -> Plan {
        let load = Load {
            name: self.name,
            full: DISK,
            does: SteadyLoad {
                places: self.places,
                reads: self.reads,
                blocks: 1,
                own_pace: self.rate > 0,
            },
            rate: self.rate,
            deadline: None,
            sla: self.stated,
        };
        let mut plan = plan(&load, godwit_core::PolicyOptions::DoubleWrite);
        plan.seed = seed;
        plan.sectors = DISK;
        plan.requests = u32::MAX;
        plan.guest.depth = if self.rate > 0 {
            OPEN_DEPTH
        } else {
            CLOSED_DEPTH
        };
        let nanobytes = 4096 * plan.guest.depth as u64 * 1_000_000_000;
        plan.guest.think = nanobytes.checked_div(self.rate).unwrap_or_default();
        plan.migrations[0].options = MigrationOptions {
            sla: self.stated,
            wake_up_limit: self.stated.map(|target| target.limit),
            governor,
            find_holes: true,
            ..MigrationOptions::new(MigrationId([1; 16]))
        };
        plan.link = LinkPlan {
            bandwidth: self.link,
            delay: 30 * MICROSECOND,
            jitter: 5 * MICROSECOND,
            socket: 256 << 10,
            copy_connections: 2,
        };
        plan.disks = [self.disk, FAST_DISK];
        plan.tags = LIMITS.requests;
        plan
    }
}
