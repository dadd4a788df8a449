//! The demo's report: `target/demo-memory/report.json`.

use std::fmt;
use std::io;

use godwit_testkit::report::{Target, median};
use godwit_testkit::vm::Gaps;
use serde::Serialize;
use serde_json::Value;

/// Longest median standstill of the guest's processors on an emulated CPU, in milliseconds.
const BLACKOUT_GOAL: f64 = 50.0;
/// Largest ratio of the largest guest's times to the smallest one's.
const RATIO_GOAL: f64 = 1.3;

/// All guests.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    moves: Vec<Moved>,
    guest_errors: u64,
    verified: bool,
    /// Medians over all moves.
    median_blackout_ms_guest: f64,
    median_blackout_ms_qmp: f64,
    /// Ratios of the largest guest's median to the smallest one's.
    total_ms_ratio: f64,
    blackout_ms_qmp_ratio: f64,
    targets: Vec<Target>,
}

/// The results of one guest.
#[derive(Debug)]
pub(crate) struct Played {
    pub(crate) moves: Vec<Moved>,
    pub(crate) guest_errors: u64,
}

/// The kind of a memory move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    ZeroCopy,
    StayInPool,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Moved {
    guest_mib: u64,
    mode: Mode,
    /// Time from the request until the guest runs at the destination and the source is free, including the copies of
    /// the disks.
    total_ms: f64,
    /// The largest time between two beats of the guest, by the host's clock.
    blackout_ms_guest: f64,
    /// Time from QEMU's stop at the source to QEMU's start at the destination.
    blackout_ms_qmp: f64,
    /// Bytes of the memory and the devices, without the disks.
    bytes_over_network: u64,
    /// Bytes of memory moved to the destination afterwards.
    bytes_moved_by_mover: u64,
    #[serde(skip)]
    disks_verified: bool,
    /// The largest time between two writes of the guest to the same disk.
    #[serde(skip)]
    disk_gap_ms: f64,
}

impl Moved {
    pub(crate) const HEADINGS: &str = "move     mode           total ms  blackout ms  stopped ms  disk gap ms   KB sent  \
                                       MB moved";

    /// Takes the figures from the source's view of the migration.
    ///
    /// # Errors
    /// If a figure is missing.
    pub(crate) fn new(
        guest_mib: u64,
        mode: Mode,
        shown: &Value,
        gaps: Gaps,
        bytes_moved_by_mover: u64,
    ) -> io::Result<Self> {
        let missing = |name: &str| io::Error::other(format!("no {name} in {shown}"));
        let number = |name: &str| shown[name].as_f64().ok_or_else(|| missing(name));
        let disks = shown["disks"].as_array().ok_or_else(|| missing("disks"))?;
        let sent = shown["memory_bytes"].as_u64();
        Ok(Self {
            guest_mib,
            mode,
            total_ms: number("total_seconds")? * 1000.0,
            blackout_ms_guest: gaps.beat_ms,
            blackout_ms_qmp: number("blackout_ms")?,
            bytes_over_network: sent.ok_or_else(|| missing("memory_bytes"))?,
            bytes_moved_by_mover,
            disks_verified: !disks.is_empty() && disks.iter().all(|disk| disk["verified"] == true),
            disk_gap_ms: gaps.host_ms,
        })
    }
}

impl fmt::Display for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = match self.mode {
            Mode::ZeroCopy => "zero-copy",
            Mode::StayInPool => "stay-in-pool",
        };
        write!(
            f,
            "{mode:<13} {:>9.0} {:>12.0} {:>11.1} {:>12.0} {:>9.0} {:>9.0}",
            self.total_ms,
            self.blackout_ms_guest,
            self.blackout_ms_qmp,
            self.disk_gap_ms,
            self.bytes_over_network as f64 / 1e3,
            self.bytes_moved_by_mover as f64 / 1e6
        )
    }
}

impl Report {
    pub(crate) fn add(&mut self, played: Played) {
        self.moves.extend(played.moves);
        self.guest_errors += played.guest_errors;
    }

    /// Computes the medians, ratios and verdicts.
    pub(crate) fn judge(&mut self) {
        self.verified = self.guest_errors == 0
            && !self.moves.is_empty()
            && self.moves.iter().all(|moved| moved.disks_verified);
        self.median_blackout_ms_guest = self.median(None, |moved| moved.blackout_ms_guest);
        self.median_blackout_ms_qmp = self.median(None, |moved| moved.blackout_ms_qmp);
        self.total_ms_ratio = self.ratio(|moved| moved.total_ms);
        self.blackout_ms_qmp_ratio = self.ratio(|moved| moved.blackout_ms_qmp);
        self.targets = vec![
            Target::judged(
                "median blackout in the guest, ms",
                BLACKOUT_GOAL,
                self.median_blackout_ms_guest,
            ),
            Target::judged(
                "total time, largest guest by smallest",
                RATIO_GOAL,
                self.total_ms_ratio,
            ),
        ];
        println!(
            "median blackout by QEMU's stop and start, ms: {:.2}; largest guest by smallest: {:.2}",
            self.median_blackout_ms_qmp, self.blackout_ms_qmp_ratio
        );
    }

    fn median(&self, guest_mib: Option<u64>, pick: fn(&Moved) -> f64) -> f64 {
        let of = |moved: &&Moved| guest_mib.is_none_or(|mib| moved.guest_mib == mib);
        median(&self.moves.iter().filter(of).map(pick).collect::<Vec<_>>())
    }

    fn ratio(&self, pick: fn(&Moved) -> f64) -> f64 {
        let sizes = || self.moves.iter().map(|moved| moved.guest_mib);
        self.median(sizes().max(), pick) / self.median(sizes().min(), pick)
    }

    /// Returns true if the guests lost nothing. The blackout does not count here.
    pub(crate) fn is_good(&self) -> bool {
        self.verified
    }
}
