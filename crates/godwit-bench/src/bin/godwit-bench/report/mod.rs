//! `target/bench/report.json`: the input of tools and of `docs/benchmarks.md`.

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

/// The state of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    /// The run has not ended, or was refused.
    Partial,
    /// Every requested measurement was taken and verified.
    Complete,
}

/// A run of the suite.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// State of the run; only a complete run counts.
    pub(crate) state: State,
    /// Reason for the refusal of the run.
    pub(crate) refused: Option<String>,
    /// Extent of the run.
    pub(crate) extent: Extent,
    /// Scenes that are not part of the run.
    #[serde(default)]
    pub(crate) left_out: Vec<String>,
    /// The machine and its programs.
    pub(crate) environment: Environment,
    /// Noise of the machine.
    pub(crate) noise: Noise,
    /// Longest wait of a move for the disk to be at rest; 0 without waits.
    #[serde(default)]
    pub(crate) settle_seconds: u64,
    /// Disks that moved while their guests worked.
    pub(crate) migrate: Vec<Migrate>,
    /// Disks that were served and did not move.
    pub(crate) steady: Vec<Steady>,
    /// Machines that moved with their disks while their guests worked.
    #[serde(default)]
    pub(crate) vm: Vec<Vm>,
    /// Plain copies beside a guest: the limit of the disk.
    #[serde(default)]
    pub(crate) disk_limit: Vec<DiskLimit>,
    /// A disk that moved while no guest used it.
    pub(crate) idle_copy: Option<IdleCopy>,
    /// Goals of the numbers.
    pub(crate) targets: Vec<Target>,
}

/// One workload, rate, link and mover: medians over the rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Migrate {
    /// Workload of the guest.
    pub(crate) workload: String,
    /// Rate of the workload in MB/s: 0 for an idle guest, null for full speed.
    pub(crate) rate_mbps: Option<f64>,
    /// The link's bandwidth in Gbit/s, null without a cap.
    pub(crate) link_gbps: Option<f64>,
    /// True if the destination's disk was in memory instead of on the source's disk.
    #[serde(default)]
    pub(crate) destination_in_memory: bool,
    /// True if the image was full of files and the guest's writes compressed to half; otherwise nothing was
    /// compressible.
    #[serde(default)]
    pub(crate) files: bool,
    /// Mover of the disk.
    pub(crate) mover: String,
    /// Size of the disk.
    pub(crate) image_bytes: u64,
    /// Time after which a move counts as not converged.
    pub(crate) limit_seconds: f64,
    /// True if the move ended in time in every round. A round without convergence is the last.
    pub(crate) converged: bool,
    /// Time from the command to the end of the switchover; null unless the move converged.
    pub(crate) lm_seconds: Option<f64>,
    /// Bytes out of and into the source's host, headers included.
    pub(crate) wire_bytes: f64,
    /// Measurements of the guest.
    pub(crate) guest: Guest,
    /// CPU seconds of all processes that moved and served the disk, during the move.
    pub(crate) cpu_seconds: f64,
    /// Longest time without an answer around the switchover; null without a switchover or for an idle guest.
    pub(crate) blackout_ms: Option<f64>,
    /// True if the rounds disagree about the guest before the move, or this guest had much less than others then.
    pub(crate) noisy: bool,
    /// The least and the most of the rounds' `lm_seconds`.
    pub(crate) lm_seconds_spread: Option<[f64; 2]>,
    /// Guest over time in the round with the median time; of two, the shorter.
    pub(crate) series: Vec<Point>,
    /// Every repetition.
    pub(crate) rounds: Vec<Move>,
}

/// One move of a disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Move {
    /// True if the move ended in time.
    pub(crate) converged: bool,
    /// Time from the command to the end of the switchover, or to giving up.
    pub(crate) seconds: f64,
    /// As in [`Migrate`].
    pub(crate) wire_bytes: u64,
    /// As in [`Migrate`].
    pub(crate) guest: Guest,
    /// As in [`Migrate`].
    pub(crate) cpu_seconds: f64,
    /// As in [`Migrate`].
    pub(crate) blackout_ms: Option<f64>,
    /// Blocks compared between both images afterwards; null when nothing had moved.
    pub(crate) compared_blocks: Option<u64>,
    /// True if the disk was at rest when the guest began; null when not checked.
    #[serde(default)]
    pub(crate) disk_at_rest: Option<bool>,
    /// Guest over time; the cell keeps the series of one round.
    #[serde(skip)]
    pub(crate) series: Vec<Point>,
}

/// The measurements of a guest.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Guest {
    /// Measurements before the move; null for an idle guest.
    pub(crate) before: Option<Seen>,
    /// Measurements during the move.
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
    /// Longest latency.
    pub(crate) max_us: f64,
}

/// A short interval of a guest's load.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Point {
    /// Seconds since the command.
    pub(crate) seconds: f64,
    /// Throughput in MB/s.
    pub(crate) mbps: f64,
    /// Median latency.
    pub(crate) p50_us: f64,
    /// Longest latency: so short an interval has no higher percentile.
    pub(crate) max_us: f64,
}

/// One load and mover of a machine: medians over the rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Vm {
    /// Write rate of the guest in MB/s, null for full speed.
    pub(crate) rate_mbps: Option<f64>,
    /// Mover of the machine.
    pub(crate) mover: String,
    /// Size of the disk.
    pub(crate) image_bytes: u64,
    /// Time after which a move counts as not converged.
    pub(crate) limit_seconds: f64,
    /// True if the move ended in time in every round.
    pub(crate) converged: bool,
    /// Time from the command until the guest runs at the destination and the source is released; null unless the move
    /// converged.
    pub(crate) lm_seconds: Option<f64>,
    /// The least and the most of the rounds' `lm_seconds`.
    pub(crate) lm_seconds_spread: Option<[f64; 2]>,
    /// Longest time between two completed writes of the guest during the move, on the host's clock; null unless the
    /// move converged.
    pub(crate) blackout_ms: Option<f64>,
    /// Part of the blackout in which QEMU had stopped the guest.
    pub(crate) stopped_ms: Option<f64>,
    /// Measurements of the guest.
    pub(crate) guest: VmGuest,
    /// CPU seconds of all QEMUs and nodes during the move, including an emulated guest's own work.
    pub(crate) cpu_seconds: f64,
    /// CPU seconds per second of the same processes before the move.
    pub(crate) cpu_before: f64,
    /// Bytes out of and into the source's host, headers included.
    pub(crate) wire_bytes: f64,
    /// True if the rounds disagree about the guest before the move, or this guest had much less than others then.
    pub(crate) noisy: bool,
    /// Every repetition.
    pub(crate) rounds: Vec<VmMove>,
}

/// One move of a machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct VmMove {
    /// True if the move ended in time.
    pub(crate) converged: bool,
    /// Time from the command to the end, or to giving up.
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
    /// Total writes of the guest, which compared every block of its file with its writes.
    pub(crate) verified_writes: u64,
}

/// The measurements of a machine's guest.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct VmGuest {
    /// Measurements before the move.
    pub(crate) before: VmSeen,
    /// Measurements during the move.
    pub(crate) during: VmSeen,
}

/// A guest's throughput, and the latency of its writes, reads and syncs. The latency is on the guest's clock, which
/// stands still while the guest is stopped.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct VmSeen {
    /// Write throughput in MB/s, on the host's clock.
    pub(crate) mbps: f64,
    /// Median latency.
    pub(crate) p50_us: f64,
    /// 99th percentile.
    pub(crate) p99_us: f64,
    /// 99.9th percentile.
    pub(crate) p999_us: f64,
    /// Longest latency.
    pub(crate) max_us: f64,
}

/// One server, front end and load: medians over the rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Steady {
    /// Access of the client to the disk: `nbd` or `vhost-user-blk`.
    pub(crate) front_end: String,
    /// Server of the disk.
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
    /// CPU seconds of the server for a million requests.
    pub(crate) cpu_seconds_per_mio: f64,
    /// True if the server uses direct I/O on the image.
    pub(crate) direct: bool,
    /// Server's options for the image.
    pub(crate) disk_options: String,
    /// True if the rounds disagree about the CPU time of a request.
    pub(crate) noisy: bool,
    /// Every repetition.
    pub(crate) rounds: Vec<Measured>,
}

/// A plain copy of a disk beside its guest: medians over the rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DiskLimit {
    /// Pieces of 256 KiB in flight at the same time.
    pub(crate) in_flight: u32,
    /// Write rate of the guest in MB/s; half of this rate goes to the copy in addition.
    pub(crate) rate_mbps: f64,
    /// Size of the disk.
    pub(crate) image_bytes: u64,
    /// Time from the first piece's read to the last piece's write.
    pub(crate) copy_seconds: f64,
    /// The least and the most of the rounds' `copy_seconds`.
    pub(crate) copy_seconds_spread: [f64; 2],
    /// Measurements of the guest on the source.
    pub(crate) guest: Guest,
    /// True if the rounds disagree about the guest before the copy.
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
    /// Time from the command until the destination serves.
    pub(crate) godwit_seconds: f64,
    /// Time of `nbdcopy` for the same bytes.
    pub(crate) nbdcopy_seconds: f64,
    /// Minimum time of the slower of disk and loopback.
    pub(crate) limit_seconds: f64,
    /// Time of `cp --sparse=never` for the same bytes, synced.
    pub(crate) cp_seconds: f64,
    /// Time of the disk to read and write as many bytes simultaneously with direct I/O.
    pub(crate) disk_limit_seconds: f64,
    /// Time of a TCP connection over loopback for as many bytes.
    pub(crate) loopback_limit_seconds: f64,
    /// Size of the disk.
    pub(crate) image_bytes: u64,
    /// True if the rounds disagree about the disk's limit.
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
    /// Returns the measurements of a window.
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

    /// Returns the median of each number; `None` for an empty slice.
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

/// Returns the least and the most.
pub(crate) fn spread(values: &[f64]) -> [f64; 2] {
    [
        values.iter().copied().fold(f64::MAX, f64::min),
        values.iter().copied().fold(f64::MIN, f64::max),
    ]
}

impl Report {
    /// Returns a report without measurements.
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

    /// Returns the number of moves that began with a disk not at rest.
    pub(crate) fn restless(&self) -> usize {
        let disks = self.migrate.iter().flat_map(|cell| &cell.rounds);
        let machines = self.vm.iter().flat_map(|cell| &cell.rounds);
        disks
            .map(|moved| moved.disk_at_rest)
            .chain(machines.map(|moved| moved.disk_at_rest))
            .filter(|at_rest| *at_rest == Some(false))
            .count()
    }

    /// Returns the number of measured cells, and the number of noisy ones.
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
