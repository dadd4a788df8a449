//! Moves under a promise. The guest shares its disk with the copies, and the link with double writes: a guest in need of
//! more than the copies leave gets less done or waits longer.

use std::time::Duration;

use godwit_core::sla::LatencyTarget;
use godwit_core::units::MigrationId;
use godwit_core::{Arrivals, GovernorParts, MigrationOptions};

use super::loads::does;
use super::{Load, MICROSECOND, plan};
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
    /// The guest; without a promise of its own, a node promises by itself.
    load: Load,
    /// Arrivals as measured before the move.
    arrivals: Arrivals,
    /// Bytes per second of the link.
    link: u64,
    disk: DiskPlan,
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

const ANYWHERE: Places = Places::Within(DISK);
const SKEWED: Places = Places::Skewed(DISK);

/// Returns a guest with a pace of its own, or a closed loop, on a fast disk and link.
const fn fast(name: &'static str, places: Places, reads: u64, megabytes: u64) -> Cell {
    let (own_pace, arrivals) = match megabytes {
        0 => (false, Arrivals::ClosedLoop),
        _ => (true, Arrivals::OpenLoop),
    };
    let does = SteadyLoad {
        own_pace,
        ..does(places, reads)
    };
    Cell {
        load: Load::new(name, DISK, does, megabytes * 1_000_000),
        arrivals,
        link: FAST_LINK,
        disk: FAST_DISK,
    }
}

const WRITES: Cell = fast("writes, 40 MB/s", ANYWHERE, 0, 40);
const MIXED: Cell = fast("half writes, 80 MB/s", ANYWHERE, 50, 80);
const TAKES_ALL: Cell = fast("writes, no limit", ANYWHERE, 0, 0);
const FULL: Cell = Cell {
    disk: SLOW_DISK,
    ..fast("half writes, 100 MB/s, slow disk", ANYWHERE, 50, 100)
};
const CROWDS: Cell = Cell {
    link: SLOW_LINK,
    ..fast("skewed writes, 110 MB/s, slow link", SKEWED, 0, 110)
};
const FILLS: Cell = Cell {
    link: SLOW_LINK,
    ..fast("writes, no limit, slow link", ANYWHERE, 0, 0)
};

fn cells() -> Vec<Cell> {
    let on = |disk, cell| Cell { disk, ..cell };
    let unknown = |cell| Cell {
        arrivals: Arrivals::Unknown,
        ..cell
    };
    let slow_link = |cell| Cell {
        link: SLOW_LINK,
        ..cell
    };
    let stated = |name, cell: Cell, sla| Cell {
        load: Load {
            name,
            sla,
            ..cell.load
        },
        ..cell
    };
    let open = |name, reads, megabytes| fast(name, ANYWHERE, reads, megabytes);
    vec![
        open("half writes, 2 MB/s", 50, 2),
        open("writes, 20 MB/s", 0, 20),
        WRITES,
        MIXED,
        fast("skewed writes, 80 MB/s", SKEWED, 0, 80),
        TAKES_ALL,
        open("half writes, no limit", 50, 0),
        unknown(open("half writes, no limit, not known", 50, 0)),
        unknown(open("writes, no limit, not known", 0, 0)),
        on(STALLING_DISK, open("writes, 40 MB/s, stalling disk", 0, 40)),
        on(
            STANDING_DISK,
            open("half writes, 60 MB/s, standing disk", 50, 60),
        ),
        on(
            STANDING_DISK,
            open("half writes, no limit, standing disk", 50, 0),
        ),
        on(SLOW_DISK, open("half writes, 40 MB/s, slow disk", 50, 40)),
        FULL,
        on(SLOW_DISK, open("writes, no limit, slow disk", 0, 0)),
        slow_link(open("writes, 40 MB/s, slow link", 0, 40)),
        CROWDS,
        FILLS,
        stated("p99.99<3ms: half writes, 80 MB/s", MIXED, target(3, 100)),
        stated("p99.9<20ms: writes, 40 MB/s", WRITES, target(20, 1_000)),
        stated("p99.9<2ms: writes, no limit", TAKES_ALL, target(2, 1_000)),
        stated("p99.9<20ms: full slow disk", FULL, target(20, 1_000)),
        stated("p99.9<20ms: slow link, 110 MB/s", CROWDS, target(20, 1_000)),
        stated("p99.9<20ms: slow link, no limit", FILLS, target(20, 1_000)),
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
        if !cell.load.name.contains(only) {
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
            name: cell.load.name.to_owned(),
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
            automatic: self.load.sla.is_none().then_some(self.arrivals),
        };
        let plan = self.plan(seed, governor);
        panics_as_violation(|| World::new(plan, None, None).measure(&measurement))
            .unwrap_or_else(Err)
            .map_err(|violation| format!("{} with seed {seed} {violation}", self.load.name))
    }

    fn plan(&self, seed: u64, governor: GovernorParts) -> Plan {
        let own_pace = self.load.does.own_pace;
        let depth = if own_pace { OPEN_DEPTH } else { CLOSED_DEPTH };
        let options = MigrationOptions {
            sla: self.load.sla,
            wake_up_limit: self.load.sla.map(|target| target.limit),
            governor,
            find_holes: true,
            ..MigrationOptions::new(MigrationId([1; 16]))
        };
        let mut plan = plan(&self.load, depth, options);
        plan.seed = seed;
        plan.sectors = DISK;
        plan.link = LinkPlan {
            bandwidth: self.link,
            delay: 30 * MICROSECOND,
            jitter: 5 * MICROSECOND,
            socket: 256 << 10,
            copy_connections: 2,
        };
        plan.disks = [self.disk, FAST_DISK];
        plan
    }
}
