//! target/demo-rdma/report.json

use godwit_testkit::rdma::{Breakdown, Moved};
use serde::Serialize;

use crate::rdma::cases::deaths::Death;

#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) passed: bool,
    pub(crate) holder: Option<Holder>,
    /// Reasons of the preflight against processes that cannot move, by case.
    pub(crate) refusals: Vec<Refusal>,
    pub(crate) moves: Vec<Move>,
    pub(crate) checked: Vec<Checked>,
    /// Moves during which a node was killed.
    pub(crate) deaths: Vec<Death>,
    /// Programs with and without the library, none of which moves.
    pub(crate) compared: Vec<Compared>,
}

/// Exit statuses of a program.
#[derive(Serialize)]
pub(crate) struct Compared {
    pub(crate) program: &'static str,
    pub(crate) without: i32,
    pub(crate) with: i32,
}

impl Compared {
    /// Returns true if the program works only without the library.
    pub(crate) fn is_worse(&self) -> bool {
        self.without == 0 && self.with != 0
    }
}

/// A process that cannot move.
#[derive(Serialize)]
pub(crate) struct Refusal {
    pub(crate) case: &'static str,
    /// All reasons, one sentence each.
    pub(crate) said: Vec<String>,
    /// True if the reasons are exactly the expected ones.
    pub(crate) as_expected: bool,
}

/// Two processes that check every completion and every message, moved several times.
#[derive(Serialize)]
pub(crate) struct Checked {
    pub(crate) variant: &'static str,
    /// Completed moves. Every second move is of the partner, after the other one or at once with it.
    pub(crate) moves: usize,
    /// Lost share of all packets of the staying side during a move, in percent.
    pub(crate) loss_percent: f64,
    pub(crate) blackout_ms_median: f64,
    /// Output of both sides at the end.
    pub(crate) said: Vec<String>,
    pub(crate) error: Option<String>,
}

/// A process that only holds a device, dumped and restored with CRIU's plugin.
#[derive(Serialize)]
pub(crate) struct Holder {
    pub(crate) refused_without_plugin: bool,
    pub(crate) restored_with_plugin: bool,
}

#[derive(Serialize)]
pub(crate) struct Move {
    pub(crate) program: String,
    pub(crate) side: &'static str,
    pub(crate) qps: usize,
    pub(crate) blackout_ms: f64,
    pub(crate) breakdown_ms: Breakdown,
    pub(crate) wbs_ms: f64,
    /// Time of pre-setup while the process ran. Without pre-setup, every object is made inside the blackout.
    pub(crate) pre_setup_ms: Option<f64>,
    /// True if both sides ended with success after the move.
    pub(crate) succeeded: bool,
    pub(crate) error: Option<String>,
}

impl Move {
    pub(crate) fn new(
        program: &str,
        side: &'static str,
        moved: Moved,
        error: Option<String>,
    ) -> Self {
        Self {
            program: program.to_owned(),
            side,
            qps: moved.qps,
            blackout_ms: moved.blackout_ms,
            breakdown_ms: moved.breakdown_ms,
            wbs_ms: moved.wbs_ms,
            pre_setup_ms: moved.pre_setup_ms,
            succeeded: error.is_none(),
            error,
        }
    }
}
