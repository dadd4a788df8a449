//! `target/bench/report.json`: what tools read, and from which `docs/benchmarks.md` is made.

pub(crate) mod document;
pub(crate) mod join;
pub(crate) mod plots;
pub(crate) mod targets;

use godwit_bench::environment::Environment;
use godwit_bench::steady::Measured;
use godwit_testkit::fio::Window;
use godwit_testkit::report::median;
use serde::{Deserialize, Serialize};

use crate::noise::Noise;
use crate::options::Extent;
use crate::report::targets::Target;

/// Whether a report counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    /// The run has not ended, or was refused.
    Partial,
    /// Everything that was asked for was measured and verified.
    Complete,
}

/// A run of the suite.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Whether it counts.
    pub(crate) state: State,
    /// Why it does not.
    pub(crate) refused: Option<String>,
    /// How much was measured.
    pub(crate) extent: Extent,
    /// Scenes that are not part of it.
    #[serde(default)]
    pub(crate) left_out: Vec<String>,
    /// On what.
    pub(crate) environment: Environment,
    /// How quiet the machine was.
    pub(crate) noise: Noise,
    /// The longest that a move waited for the disk to be at rest; 0 when none did.
    #[serde(default)]
    pub(crate) settle_seconds: u64,
    /// Disks that moved while their guests worked.
    pub(crate) migrate: Vec<Migrate>,
    /// Disks that were served and did not move.
    pub(crate) steady: Vec<Steady>,
    /// Machines that moved with their disks while their guests worked.
    #[serde(default)]
    pub(crate) vm: Vec<Vm>,
    /// What the disk allows whoever copies it beside a guest.
    #[serde(default)]
    pub(crate) disk_limit: Vec<DiskLimit>,
    /// A disk that moved while nobody used it.
    pub(crate) idle_copy: Option<IdleCopy>,
    /// What the numbers are held against.
    pub(crate) targets: Vec<Target>,
}

/// One workload, rate, link and mover: medians over the rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Migrate {
    /// What the guest asks for.
    pub(crate) workload: String,
    /// How much of it, in MB/s: 0 for an idle guest, null for as much as goes.
    pub(crate) rate_mbps: Option<f64>,
    /// The link's bandwidth in Gbit/s, null without a cap.
    pub(crate) link_gbps: Option<f64>,
    /// Whether the disk went to one in memory instead of to the one that it came from.
    #[serde(default)]
    pub(crate) destination_in_memory: bool,
    /// Whether the image was full of files, and what the guest wrote compressed to half; otherwise
    /// nothing of it became shorter.
    #[serde(default)]
    pub(crate) files: bool,
    /// Who moved the disk.
    pub(crate) mover: String,
    /// The disk's size.
    pub(crate) image_bytes: u64,
    /// A move that took longer had not converged.
    pub(crate) limit_seconds: f64,
    /// Whether the move ended in time, in every round; a round in which it did not is the last.
    pub(crate) converged: bool,
    /// From the command to the end of the switchover; null unless it converged.
    pub(crate) lm_seconds: Option<f64>,
    /// Bytes that left the source's host and came back, headers included.
    pub(crate) wire_bytes: f64,
    /// What the guest saw.
    pub(crate) guest: Guest,
    /// CPU seconds of all processes that moved and served the disk, in the time of the move.
    pub(crate) cpu_seconds: f64,
    /// The longest time without an answer around the switchover; null without one or for an idle
    /// guest.
    pub(crate) blackout_ms: Option<f64>,
    /// Whether the rounds disagree about the guest before the move, or it had much less than others then.
    pub(crate) noisy: bool,
    /// The least and the most of the rounds' `lm_seconds`.
    pub(crate) lm_seconds_spread: Option<[f64; 2]>,
    /// What the guest saw over time in the round whose time is the median; of two, the shorter.
    pub(crate) series: Vec<Point>,
    /// Every repetition.
    pub(crate) rounds: Vec<Move>,
}

/// One move of a disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Move {
    /// Whether it ended in time.
    pub(crate) converged: bool,
    /// From the command to the end of the switchover, or to giving up.
    pub(crate) seconds: f64,
    /// As in [`Migrate`].
    pub(crate) wire_bytes: u64,
    /// As in [`Migrate`].
    pub(crate) guest: Guest,
    /// As in [`Migrate`].
    pub(crate) cpu_seconds: f64,
    /// As in [`Migrate`].
    pub(crate) blackout_ms: Option<f64>,
    /// Blocks that were compared between both images afterwards; null when nothing had moved.
    pub(crate) compared_blocks: Option<u64>,
    /// Whether the disk was at rest when the guest began; null when nobody looked.
    #[serde(default)]
    pub(crate) disk_at_rest: Option<bool>,
    /// What the guest saw over time; the cell keeps that of one round.
    #[serde(skip)]
    pub(crate) series: Vec<Point>,
}

/// What the guest saw.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Guest {
    /// With nothing moving; null for an idle guest.
    pub(crate) before: Option<Seen>,
    /// While the disk moved.
    pub(crate) during: Option<Seen>,
}

/// A guest's throughput and latencies.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// Throughput in MB/s.
    pub(crate) mbps: f64,
    /// Median latency.
    pub(crate) p50_us: f64,
    /// 99th percentile.
    pub(crate) p99_us: f64,
    /// 99.9th percentile.
    pub(crate) p999_us: f64,
    /// 99.99th percentile.
    pub(crate) p9999_us: f64,
    /// The longest.
    pub(crate) max_us: f64,
}

/// A short time of a guest's life.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Point {
    /// Seconds since the command.
    pub(crate) seconds: f64,
    /// Throughput in MB/s.
    pub(crate) mbps: f64,
    /// Median latency.
    pub(crate) p50_us: f64,
    /// The longest latency: so short a time has no higher percentile.
    pub(crate) max_us: f64,
}

/// One load and mover of a machine: medians over the rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Vm {
    /// What the guest writes, in MB/s, null for as much as it can.
    pub(crate) rate_mbps: Option<f64>,
    /// Who moved the machine.
    pub(crate) mover: String,
    /// The disk's size.
    pub(crate) image_bytes: u64,
    /// A move that took longer had not converged.
    pub(crate) limit_seconds: f64,
    /// Whether the move ended in time, in every round.
    pub(crate) converged: bool,
    /// From the command to the guest running at the destination with the source released; null unless
    /// it converged.
    pub(crate) lm_seconds: Option<f64>,
    /// The least and the most of the rounds' `lm_seconds`.
    pub(crate) lm_seconds_spread: Option<[f64; 2]>,
    /// The longest time between two completed writes of the guest during the move, on the host's clock;
    /// null unless it converged.
    pub(crate) blackout_ms: Option<f64>,
    /// The part of it in which QEMU had stopped the guest.
    pub(crate) stopped_ms: Option<f64>,
    /// What the guest saw.
    pub(crate) guest: VmGuest,
    /// CPU seconds of all QEMUs and nodes during the move. An emulated guest's own work is in it.
    pub(crate) cpu_seconds: f64,
    /// CPU seconds that they used for each second before it.
    pub(crate) cpu_before: f64,
    /// Bytes that left the source's host and came back, headers included.
    pub(crate) wire_bytes: f64,
    /// Whether the rounds disagree about the guest before the move, or it had much less than others then.
    pub(crate) noisy: bool,
    /// Every repetition.
    pub(crate) rounds: Vec<VmMove>,
}

/// One move of a machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct VmMove {
    /// Whether it ended in time.
    pub(crate) converged: bool,
    /// From the command to the end, or to giving up.
    pub(crate) seconds: f64,
    /// As in [`Vm`].
    pub(crate) blackout_ms: Option<f64>,
    /// As in [`Vm`].
    pub(crate) stopped_ms: Option<f64>,
    /// As in [`Vm`].
    pub(crate) guest: VmGuest,
    /// As in [`Vm`].
    pub(crate) cpu_seconds: f64,
    /// As in [`Vm`].
    pub(crate) cpu_before: f64,
    /// As in [`Vm`].
    pub(crate) wire_bytes: u64,
    /// As in [`Move`].
    #[serde(default)]
    pub(crate) disk_at_rest: Option<bool>,
    /// Writes that the guest made in all. It compared every block of its file with what it had written.
    pub(crate) verified_writes: u64,
}

/// What a machine's guest saw.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct VmGuest {
    /// With nothing moving.
    pub(crate) before: VmSeen,
    /// While the machine moved.
    pub(crate) during: VmSeen,
}

/// A guest's throughput, and how long its writes, reads and syncs took on its own clock, which stands
/// still while it is stopped.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct VmSeen {
    /// What it wrote in MB/s, on the host's clock.
    pub(crate) mbps: f64,
    /// Median latency.
    pub(crate) p50_us: f64,
    /// 99th percentile.
    pub(crate) p99_us: f64,
    /// 99.9th percentile.
    pub(crate) p999_us: f64,
    /// The longest.
    pub(crate) max_us: f64,
}

/// One server, front end and load: medians over the rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Steady {
    /// How the client reaches the disk: `nbd` or `vhost-user-blk`.
    pub(crate) front_end: String,
    /// Who serves it.
    pub(crate) server: String,
    /// Bytes of a request.
    pub(crate) bs: u64,
    /// Requests in flight.
    pub(crate) depth: u32,
    /// `read`, `write`, `randread` or `randwrite`.
    pub(crate) rw: String,
    /// Requests answered per second.
    pub(crate) iops: f64,
    /// Median latency.
    pub(crate) p50_us: f64,
    /// The server's CPU seconds for a million requests.
    pub(crate) cpu_seconds_per_mio: f64,
    /// Whether the server reaches the image with direct I/O.
    pub(crate) direct: bool,
    /// How the server reaches the image, in its own words.
    pub(crate) disk_options: String,
    /// Whether the rounds disagree about the CPU time of a request.
    pub(crate) noisy: bool,
    /// Every repetition.
    pub(crate) rounds: Vec<Measured>,
}

/// A plain copy of a disk beside its guest: medians over the rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DiskLimit {
    /// Pieces of 256 KiB that are read and written at the same time.
    pub(crate) in_flight: u32,
    /// What the guest writes, in MB/s; half as much is written to the copy meanwhile.
    pub(crate) rate_mbps: f64,
    /// The disk's size.
    pub(crate) image_bytes: u64,
    /// From the first piece's read to the last one's write.
    pub(crate) copy_seconds: f64,
    /// The least and the most of the rounds' `copy_seconds`.
    pub(crate) copy_seconds_spread: [f64; 2],
    /// What the guest saw of the source.
    pub(crate) guest: Guest,
    /// Whether the rounds disagree about the guest before the copy.
    pub(crate) noisy: bool,
    /// Every repetition.
    pub(crate) rounds: Vec<DiskLimitRound>,
}

/// One plain copy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DiskLimitRound {
    /// As in [`DiskLimit`].
    pub(crate) copy_seconds: f64,
    /// As in [`DiskLimit`].
    pub(crate) guest: Guest,
    /// As in [`Move`].
    pub(crate) disk_at_rest: Option<bool>,
}

/// An idle disk's move beside a plain copy: medians over the rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct IdleCopy {
    /// From the command to the destination serving.
    pub(crate) godwit_seconds: f64,
    /// The same bytes with `nbdcopy`.
    pub(crate) nbdcopy_seconds: f64,
    /// What the slower of disk and loopback needs at least.
    pub(crate) limit_seconds: f64,
    /// The same bytes with `cp --sparse=never`, synced.
    pub(crate) cp_seconds: f64,
    /// The disk reads and writes as many bytes, both at the same time, with direct I/O.
    pub(crate) disk_limit_seconds: f64,
    /// As many bytes through a TCP connection over loopback.
    pub(crate) loopback_limit_seconds: f64,
    /// The disk's size.
    pub(crate) image_bytes: u64,
    /// Whether the rounds disagree about the disk's limit.
    pub(crate) noisy: bool,
    /// Every repetition.
    pub(crate) rounds: Vec<IdleCopyRound>,
}

/// Seconds of each way in one round.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct IdleCopyRound {
    /// As in [`IdleCopy`].
    pub(crate) godwit: f64,
    /// As in [`IdleCopy`].
    pub(crate) nbdcopy: f64,
    /// As in [`IdleCopy`].
    pub(crate) cp: f64,
    /// As in [`IdleCopy`].
    pub(crate) disk: f64,
    /// As in [`IdleCopy`].
    pub(crate) loopback: f64,
}

/// Bytes of a guest's request.
const BLOCK: f64 = 4096.0;

impl Seen {
    /// What was seen in a stretch of time.
    pub(crate) fn of(window: &Window) -> Self {
        Self {
            mbps: window.iops * BLOCK / 1e6,
            p50_us: window.p50_us as f64,
            p99_us: window.p99_us as f64,
            p999_us: window.p999_us as f64,
            p9999_us: window.p9999_us as f64,
            max_us: window.max_us as f64,
        }
    }

    /// The median of each number; `None` of none.
    pub(crate) fn median(all: &[Self]) -> Option<Self> {
        let of = |value: fn(&Self) -> f64| median(&all.iter().map(value).collect::<Vec<_>>());
        (!all.is_empty()).then(|| Self {
            mbps: of(|seen| seen.mbps),
            p50_us: of(|seen| seen.p50_us),
            p99_us: of(|seen| seen.p99_us),
            p999_us: of(|seen| seen.p999_us),
            p9999_us: of(|seen| seen.p9999_us),
            max_us: of(|seen| seen.max_us),
        })
    }
}

/// The least and the most.
pub(crate) fn spread(values: &[f64]) -> [f64; 2] {
    [
        values.iter().copied().fold(f64::MAX, f64::min),
        values.iter().copied().fold(f64::MIN, f64::max),
    ]
}

impl Report {
    /// One in which nothing was measured yet.
    pub(crate) fn new(extent: Extent, environment: Environment) -> Self {
        Self {
            state: State::Partial,
            refused: None,
            extent,
            left_out: Vec::new(),
            environment,
            noise: Noise::default(),
            settle_seconds: 0,
            migrate: Vec::new(),
            steady: Vec::new(),
            vm: Vec::new(),
            disk_limit: Vec::new(),
            idle_copy: None,
            targets: Vec::new(),
        }
    }

    /// Moves that began although the disk was not at rest.
    pub(crate) fn restless(&self) -> usize {
        let disks = self.migrate.iter().flat_map(|cell| &cell.rounds);
        let machines = self.vm.iter().flat_map(|cell| &cell.rounds);
        disks
            .map(|moved| moved.disk_at_rest)
            .chain(machines.map(|moved| moved.disk_at_rest))
            .filter(|at_rest| *at_rest == Some(false))
            .count()
    }

    /// How many cells were measured, and how many of them are noisy.
    pub(crate) fn cells(&self) -> (usize, usize) {
        let noisy: Vec<bool> = self
            .migrate
            .iter()
            .map(|cell| cell.noisy)
            .chain(self.steady.iter().map(|cell| cell.noisy))
            .chain(self.vm.iter().map(|cell| cell.noisy))
            .chain(self.disk_limit.iter().map(|cell| cell.noisy))
            .chain(self.idle_copy.iter().map(|cell| cell.noisy))
            .collect();
        (noisy.len(), noisy.iter().filter(|noisy| **noisy).count())
    }
}
