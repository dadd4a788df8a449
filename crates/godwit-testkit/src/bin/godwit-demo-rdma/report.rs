//! target/demo-rdma/report.json

use godwit_testkit::rdma::{Breakdown, Moved};
use serde::Serialize;

#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) passed: bool,
    /// How each move was asked for: without pre-setup, every object is made inside the blackout.
    pub(crate) pre_setup: bool,
    pub(crate) holder: Option<Holder>,
    pub(crate) moves: Vec<Move>,
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
    /// Whether both sides ended with success after the move.
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
            succeeded: error.is_none(),
            error,
        }
    }
}
