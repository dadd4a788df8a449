//! The plan of a run, drawn from the seed before the start: a list of decisions for a shrinker to remove one by one.

mod faults;
mod image;
mod protection;

use std::time::Duration;

use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Bytes, MigrationId};
use godwit_core::{
    Arrivals, GovernorParts, GuestLoad, Limits, MigrationChange, MigrationOptions, PolicyOptions,
    PushOptions, RoundOptions, Switchover,
};

pub(crate) use self::faults::{Fault, FaultKind, Moment, Target, Trigger};
use self::faults::{blow, disturbance};
pub(crate) use self::image::ImagePlan;
pub(crate) use self::protection::{CheckpointPlan, ProtectionPlan};
use crate::random::Random;
use crate::world::{LIMITS, MOST_STEPS};

const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000_000;

/// All decisions of a run. The rest follows from the seed and the core.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// Size of the disk.
    pub(crate) sectors: u64,
    /// Duration of the guest's load in nanoseconds.
    pub(crate) load: u64,
    /// Most requests of the guest.
    pub(crate) requests: u64,
    pub(crate) guest: GuestPlan,
    pub(crate) migrations: Vec<MigrationPlan>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) link: LinkPlan,
    pub(crate) disks: [DiskPlan; 2],
    pub(crate) clocks: [ClockPlan; 2],
    /// Buffers of each node: with few buffers, frames wait for one.
    pub(crate) tags: u32,
    /// Longest time for a record to become durable.
    pub(crate) store: u64,
    /// True if the owner loses power after everything has settled.
    pub(crate) power_loss_at_end: bool,
    /// Sizes of the controllers' tables.
    pub(crate) limits: Limits,
    /// Number of steps above which a run counts as endless.
    pub(crate) most_steps: u64,
    /// Image that the disk is created from, if any.
    pub(crate) image: Option<ImagePlan>,
    /// Protection of the machine instead of moves, if any.
    pub(crate) protection: Option<ProtectionPlan>,
}

/// The distribution of the guest's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workload {
    Uniform,
    Zipf,
    Sequential,
    /// A few sectors, over and over.
    Hot,
    /// Flushes, discards, zeroes and FUA as often as plain writes.
    Mixed,
}

impl Workload {
    pub(crate) const ALL: [Self; 5] = [
        Self::Uniform,
        Self::Zipf,
        Self::Sequential,
        Self::Hot,
        Self::Mixed,
    ];
}

#[derive(Clone, Debug)]
pub(crate) struct GuestPlan {
    pub(crate) workload: Workload,
    /// Requests in flight.
    pub(crate) depth: usize,
    /// Reads per hundred requests.
    pub(crate) reads: u64,
    /// Mean time between an answer and the next request of the same place in the queue.
    pub(crate) think: u64,
    /// Usual longest request, in sectors.
    pub(crate) longest: u64,
    /// Duration of the guest's occasional pauses.
    pub(crate) pause: u64,
    /// Requests per thousand before which the guest leaves for the other node and abandons its outstanding requests.
    pub(crate) deserts: u64,
    /// Requests per thousand sent to the other node beside the outstanding requests here.
    pub(crate) strays: u64,
    /// Load that replaces all of the above in a measuring run.
    pub(crate) steady: Option<SteadyLoad>,
}

/// A guest with a constant load of requests of 4 KiB.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SteadyLoad {
    pub(crate) places: Places,
    /// Reads per hundred requests.
    pub(crate) reads: u64,
    /// True if the guest sends its requests at its own pace, however late the answers are.
    pub(crate) own_pace: bool,
}

/// The places of a steady load's requests, among the first sectors of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Places {
    /// Anywhere within this many sectors.
    Within(u64),
    /// In order within this many sectors, and again from the start.
    InOrder(u64),
    /// Some of this many sectors often, others seldom: the probability falls with the rank.
    Skewed(u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct MigrationPlan {
    /// Time since the end of the previous migration.
    pub(crate) gap: u64,
    pub(crate) options: MigrationOptions,
    /// Time from switchover until the client moves to the new owner, if the client moves by itself.
    pub(crate) client_follows: Option<u64>,
    /// Time from convergence until the guest's host orders the switchover, if the migration waits for the order.
    pub(crate) ordered_after: u64,
    /// True if the order comes from the guest's new host, at the destination.
    pub(crate) ordered_there: bool,
    /// True if the store refuses the record of the handover.
    pub(crate) store_refuses: bool,
    /// Use of an older copy at the destination.
    pub(crate) older_copy: OlderCopyPlan,
    /// Change that the operator makes during the migration.
    pub(crate) change: Option<PlannedChange>,
}

/// The use of an older copy at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OlderCopyPlan {
    /// The copy is used as far as its origin allows.
    Use,
    /// The copy is compared, as if its origin were unknown.
    Compare,
    /// The copy is discarded.
    Ignore,
}

/// A change of the migration by the operator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedChange {
    /// Time since the start of the migration.
    pub(crate) after: u64,
    pub(crate) change: MigrationChange,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkPlan {
    /// Bytes per second.
    pub(crate) bandwidth: u64,
    /// One-way delay without queueing.
    pub(crate) delay: u64,
    /// Mean jitter added to the delay.
    pub(crate) jitter: u64,
    /// Bytes accepted by a connection's socket, which cannot be discarded any more.
    pub(crate) socket: u64,
    pub(crate) copy_connections: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskPlan {
    pub(crate) base: u64,
    pub(crate) tail: u64,
    pub(crate) tail_permille: u64,
    pub(crate) nanoseconds_per_sector: u64,
    /// True if transfers wait for each other; otherwise the disk carries out any number at a time.
    pub(crate) queues: bool,
    /// Time from one standstill of a disk with a queue to the next; 0 for none.
    pub(crate) stalls_every: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct ClockPlan {
    pub(crate) offset: u64,
    /// Clock drift in millionths; positive for a fast clock.
    pub(crate) drift: i64,
}

impl Plan {
    /// Returns the plan of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        let random = &mut Random::stream(seed, 1);
        let changes = &mut Random::stream(seed, 7);
        let copies = &mut Random::stream(seed, 8);
        let sectors = random.pick(&[2048, 2048, 4096, 4096, 8192]) - random.pick(&[0, 0, 8, 13]);
        let load = random.between(300, 900) * MILLISECOND;
        let requests = random.between(700, 3500);
        let guest = guest(random, load, requests);
        let clean = random.permille(300);
        let migrations: Vec<MigrationPlan> = (1..=random.between(3, 8))
            .map(|number| MigrationPlan {
                older_copy: copies.pick(&[
                    OlderCopyPlan::Use,
                    OlderCopyPlan::Use,
                    OlderCopyPlan::Compare,
                    OlderCopyPlan::Ignore,
                ]),
                change: changes.permille(250).then(|| planned_change(changes)),
                ..migration(random, number as u8, sectors)
            })
            .collect();
        let disturbances = random.below(6);
        let blows = if clean { 0 } else { random.between(1, 6) };
        let mut faults: Vec<_> = (0..disturbances)
            .map(|_| disturbance(random, load))
            .collect();
        faults.extend((0..blows).map(|_| blow(random, load)));
        let images = &mut Random::stream(seed, 11);
        let image = images
            .permille(200)
            .then(|| ImagePlan::new(images, load, &migrations));
        let mut plan = Self {
            image,
            protection: None,
            seed,
            sectors,
            load,
            requests,
            guest,
            migrations,
            faults,
            link: LinkPlan {
                bandwidth: random.magnitude(15_000_000, 400_000_000),
                delay: random.magnitude(10 * MICROSECOND, 300 * MICROSECOND),
                jitter: random.magnitude(MICROSECOND, 100 * MICROSECOND),
                socket: random.magnitude(8 << 10, 256 << 10),
                copy_connections: random.between(1, 4) as usize,
            },
            disks: [disk(random), disk(random)],
            clocks: [clock(random), clock(random)],
            tags: random.pick(&[LIMITS.requests, LIMITS.requests, 14]),
            store: random.magnitude(100 * MICROSECOND, 4 * MILLISECOND),
            power_loss_at_end: random.permille(300),
            limits: LIMITS,
            most_steps: MOST_STEPS,
        };
        let protections = &mut Random::stream(seed, 12);
        if protections.permille(280) {
            plan.protect(protections);
        }
        plan
    }

    /// Protects the machine instead of moving its disk.
    fn protect(&mut self, random: &mut Random) {
        self.image = None;
        self.guest.deserts = 0;
        self.guest.strays = 0;
        let protection = ProtectionPlan::new(random, self.load);
        let checkpoints = protection.checkpoints.is_some();
        self.migrations = protection::syncs()
            .map(|number| {
                let drawn = migration(random, number, self.sectors);
                protection::sync(random, number, drawn, checkpoints)
            })
            .collect();
        let blows = random.below(6);
        self.faults
            .extend((0..blows).map(|_| protection::blow(random)));
        self.protection = Some(protection);
    }
}

fn guest(random: &mut Random, load: u64, requests: u64) -> GuestPlan {
    let depth = random.between(1, 13) as usize;
    GuestPlan {
        workload: random.pick(&Workload::ALL),
        depth,
        reads: random.pick(&[10, 30, 30, 50, 80]),
        think: (load / requests * depth as u64).saturating_sub(60 * MICROSECOND) / 2,
        longest: random.pick(&[8, 16, 24, 64]),
        pause: random.between(1, 40) * MILLISECOND,
        deserts: random.pick(&[0, 0, 0, 2, 6, 20]),
        strays: random.pick(&[0, 0, 0, 50, 300]),
        steady: None,
    }
}

fn push(random: &mut Random) -> PushOptions {
    PushOptions {
        threshold: random.pick(&[0, 1, 2, 3, 8]),
        longest_push: random
            .permille(400)
            .then(|| Duration::from_nanos(random.magnitude(MICROSECOND, 50 * MILLISECOND))),
    }
}

fn planned_change(random: &mut Random) -> PlannedChange {
    let target = |random: &mut Random| LatencyTarget {
        limit: Duration::from_nanos(random.magnitude(200 * MICROSECOND, 5 * MILLISECOND)),
        allowed_per_million: random.pick(&[100, 1_000, 10_000]),
    };
    let policy = random.permille(700).then(|| push(random));
    PlannedChange {
        after: random.magnitude(MICROSECOND, 60 * MILLISECOND),
        change: MigrationChange {
            max_bandwidth: random.permille(300).then(|| {
                let bounded = random.permille(500);
                bounded.then(|| random.magnitude(4_000_000, 150_000_000))
            }),
            sla: random
                .permille(300)
                .then(|| random.permille(600).then(|| target(random))),
            deadline: random.permille(200).then(|| {
                let bounded = random.permille(700);
                bounded.then(|| Duration::from_millis(random.between(10, 300)))
            }),
            policy,
        },
    }
}

fn policy(random: &mut Random) -> PolicyOptions {
    match random.below(14) {
        0..=1 => PolicyOptions::Mirror,
        10..=13 => PolicyOptions::PushPull(push(random)),
        2..=4 => PolicyOptions::PreCopy(RoundOptions {
            block_sectors: random.pick(&[8, 8, 32, 128, 1024]),
            most_rounds: random.between(1, 6) as u32,
            most_left: Bytes(random.magnitude(4096, 1 << 20)),
        }),
        _ => PolicyOptions::DoubleWrite,
    }
}

/// Draws the parts of the governor, mostly all: the invariants hold without any of them.
fn governor_parts(random: &mut Random) -> GovernorParts {
    let mut part = || !random.permille(50);
    GovernorParts {
        strain_cause: part(),
        local_answer_budget: part(),
        net_progress: part(),
        haste: part(),
    }
}

fn migration(random: &mut Random, number: u8, sectors: u64) -> MigrationPlan {
    let window_chunks = random.between(1, u64::from(LIMITS.window_chunks) + 1) as u16;
    let chunk = random.pick(&[8_u32, 16, 32, 64, 64, 128, 256]);
    let rate = |random: &mut Random, of_ten: u64| {
        (random.below(10) < of_ten).then(|| random.magnitude(4_000_000, 150_000_000))
    };
    let allowed_per_million = random.pick(&[100, 1_000, 10_000]);
    let limit = Duration::from_nanos(random.magnitude(200 * MICROSECOND, 5 * MILLISECOND));
    let sla = random.permille(700).then_some(LatencyTarget {
        limit,
        allowed_per_million,
    });
    let policy = policy(random);
    let pulls = policy.description().pulls();
    let busy_chunk_sectors = chunk.max(((sectors / 160) as u32).next_multiple_of(8));
    let options = MigrationOptions {
        chunk_sectors: busy_chunk_sectors * random.pick(&[1, 1, 2, 4]),
        busy_chunk_sectors,
        window_chunks,
        idle_window_chunks: random.between(1, u64::from(window_chunks) + 1) as u16,
        busy_window_chunks: random.between(1, u64::from(window_chunks) + 1) as u16,
        max_bandwidth: rate(random, 2),
        sla,
        wake_up_limit: random.permille(500).then_some(limit),
        delayed_writes: random.permille(750),
        guest_load: rate(random, 4).map(|per_second| GuestLoad {
            per_second,
            arrivals: random.pick(&[Arrivals::OpenLoop, Arrivals::ClosedLoop, Arrivals::Unknown]),
        }),
        delayed_write_rate: rate(random, 3),
        interface_budget: rate(random, 3),
        deadline: random
            .permille(150)
            .then(|| Duration::from_millis(random.between(10, 300))),
        policy,
        verify: random.permille(400) && !pulls,
        find_holes: random.permille(700),
        governor: governor_parts(random),
        switchover: random.pick(&[Switchover::WhenConverged, Switchover::WhenTold]),
        peer_timeout: Duration::from_millis(random.between(40, 250)),
        ..MigrationOptions::new(MigrationId([number; 16]))
    };
    MigrationPlan {
        gap: random.magnitude(50 * MICROSECOND, 40 * MILLISECOND),
        options,
        client_follows: random
            .permille(600)
            .then(|| random.magnitude(MICROSECOND, 60 * MILLISECOND)),
        ordered_after: random.magnitude(MICROSECOND, 60 * MILLISECOND),
        ordered_there: random.permille(500),
        store_refuses: random.permille(40),
        older_copy: OlderCopyPlan::Ignore,
        change: None,
    }
}

fn disk(random: &mut Random) -> DiskPlan {
    DiskPlan {
        base: random.between(15, 70) * MICROSECOND,
        tail: random.magnitude(100 * MICROSECOND, 3 * MILLISECOND),
        tail_permille: random.pick(&[0, 2, 10]),
        nanoseconds_per_sector: random.between(200, 2500),
        queues: false,
        stalls_every: 0,
    }
}

fn clock(random: &mut Random) -> ClockPlan {
    ClockPlan {
        offset: random.pick(&[0, 1, 1_000_000_000, 86_400_000_000_000]),
        drift: random.below(600) as i64 - 300,
    }
}
