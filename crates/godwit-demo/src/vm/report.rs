//! The demo's report: `target/demo-vm/report.json`.

use std::fmt;
use std::io;

use godwit_testkit::report::{Target, median};
use godwit_testkit::vm::Gaps;
use serde::Serialize;
use serde_json::Value;

/// Longest median blackout of the guest on an emulated CPU, in milliseconds.
const BLACKOUT_GOAL: f64 = 300.0;
/// Longest median part of the blackout in which disks change hands.
const SWITCHOVER_GOAL: f64 = 10.0;

/// All scenes.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// All moves of all scenes.
    migrations: Vec<Moved>,
    guest_errors: u64,
    fsck_clean: bool,
    verified: bool,
    /// Medians over all moves.
    blackout_ms_guest: f64,
    switchover_ms: f64,
    targets: Vec<Target>,
    scenes: Vec<Played>,
}

/// The results of one scene.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Played {
    pub(crate) disks: usize,
    pub(crate) memory: String,
    pub(crate) migrations: Vec<Moved>,
    pub(crate) guest_errors: u64,
    pub(crate) guest_writes: u64,
    pub(crate) fsck_clean: bool,
    pub(crate) verified: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Moved {
    from: String,
    to: String,
    total_seconds: f64,
    /// The largest gap between two writes of the guest during the move, by the host's clock.
    blackout_ms_guest: f64,
    /// The same by the guest's clock, which stands still with the machine.
    gap_ms_guest_clock: f64,
    /// Time from QEMU's stop at the source to QEMU's start at the destination.
    blackout_ms_qmp: f64,
    /// The part of this time in which the disks changed hands.
    switchover_ms: f64,
    disk_bytes: u64,
    memory_bytes: u64,
    pub(crate) verified: bool,
}

impl Moved {
    /// Takes the figures from the source's view of the migration.
    ///
    /// # Errors
    /// If a figure is missing.
    pub(crate) fn new(from: &str, to: &str, shown: &Value, gaps: Gaps) -> io::Result<Self> {
        let missing = |name: &str| io::Error::other(format!("no {name} in {shown}"));
        let number = |name: &str| shown[name].as_f64().ok_or_else(|| missing(name));
        let count = |name: &str| shown[name].as_u64().ok_or_else(|| missing(name));
        let disks = shown["disks"].as_array().ok_or_else(|| missing("disks"))?;
        Ok(Self {
            from: from.to_owned(),
            to: to.to_owned(),
            total_seconds: number("total_seconds")?,
            blackout_ms_guest: gaps.host_ms,
            gap_ms_guest_clock: gaps.guest_ms,
            blackout_ms_qmp: number("blackout_ms")?,
            switchover_ms: number("switchover_ms")?,
            disk_bytes: count("disk_bytes")?,
            memory_bytes: count("memory_bytes")?,
            verified: !disks.is_empty() && disks.iter().all(|disk| disk["verified"] == true),
        })
    }
}

impl fmt::Display for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>9.2} {:>13.0} {:>13.0} {:>15.1} {:>10.0} {:>10.0}",
            self.total_seconds,
            self.blackout_ms_guest,
            self.blackout_ms_qmp,
            self.switchover_ms,
            self.disk_bytes as f64 / 1e6,
            self.memory_bytes as f64 / 1e6
        )
    }
}

impl Report {
    pub(crate) fn add(&mut self, played: Played) {
        self.migrations.extend(played.migrations.iter().cloned());
        self.scenes.push(played);
    }

    /// Computes the totals, medians and verdicts.
    pub(crate) fn judge(&mut self) {
        self.guest_errors = self.scenes.iter().map(|scene| scene.guest_errors).sum();
        self.fsck_clean = self.scenes.iter().all(|scene| scene.fsck_clean);
        self.verified = self.scenes.iter().all(|scene| scene.verified);
        let of =
            |pick: fn(&Moved) -> f64| median(&self.migrations.iter().map(pick).collect::<Vec<_>>());
        self.blackout_ms_guest = of(|moved| moved.blackout_ms_guest);
        self.switchover_ms = of(|moved| moved.switchover_ms);
        self.targets = vec![
            Target::judged(
                "median blackout in the guest, ms",
                BLACKOUT_GOAL,
                self.blackout_ms_guest,
            ),
            Target::judged(
                "median time in which disks change hands, ms",
                SWITCHOVER_GOAL,
                self.switchover_ms,
            ),
        ];
    }

    /// Returns true if the guest lost nothing. The blackout does not count here.
    pub(crate) fn is_good(&self) -> bool {
        self.guest_errors == 0 && self.fsck_clean && self.verified && !self.migrations.is_empty()
    }
}
