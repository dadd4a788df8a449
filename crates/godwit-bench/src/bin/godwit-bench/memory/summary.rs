//! Medians and spread of the runs of each way.

use godwit_bench::spread::Spread;
use serde::Serialize;

use crate::memory::method::Method;
use crate::memory::run::Run;

/// The runs of one way at one write rate.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) method: Method,
    pub(crate) dirty_mib: u64,
    pub(crate) runs: usize,
    /// Runs that ended without being cancelled.
    pub(crate) ended: usize,
    pub(crate) total_seconds: Option<Spread>,
    pub(crate) blackout_ms: Option<Spread>,
    pub(crate) bytes_over_network: Option<Spread>,
    pub(crate) latency_before_ns: Option<Spread>,
    pub(crate) latency_worst_window_ns: Option<Spread>,
    pub(crate) rate_before_mib: Option<Spread>,
    pub(crate) rate_following_mib: Option<Spread>,
    /// Bytes a second of the mover.
    pub(crate) mover_bytes_per_second: Option<Spread>,
}

impl Summary {
    /// Returns one summary for each way and rate that ran.
    pub(crate) fn all(runs: &[Run]) -> Vec<Self> {
        let mut keys: Vec<_> = runs.iter().map(|run| (run.dirty_mib, run.method)).collect();
        keys.sort_unstable();
        keys.dedup();
        let of = |(dirty_mib, method)| {
            let same = |run: &&Run| run.method == method && run.dirty_mib == dirty_mib;
            Self::of(
                method,
                dirty_mib,
                &runs.iter().filter(same).collect::<Vec<_>>(),
            )
        };
        keys.into_iter().map(of).collect()
    }

    fn of(method: Method, dirty_mib: u64, runs: &[&Run]) -> Self {
        let spread = |pick: fn(&Run) -> Option<f64>| {
            let values: Vec<f64> = runs.iter().filter_map(|run| pick(run)).collect();
            Spread::of(&values)
        };
        Self {
            method,
            dirty_mib,
            runs: runs.len(),
            ended: runs.iter().filter(|run| run.ended).count(),
            total_seconds: spread(|run| Some(run.total_seconds)),
            blackout_ms: spread(|run| Some(run.blackout_ms)),
            bytes_over_network: spread(|run| Some(run.bytes_over_network as f64)),
            latency_before_ns: spread(|run| run.latency_before_ns),
            latency_worst_window_ns: spread(|run| run.latency_worst_window_ns),
            rate_before_mib: spread(|run| run.rate_before_mib),
            rate_following_mib: spread(|run| run.rate_following_mib),
            mover_bytes_per_second: spread(|run| {
                let moved = run.bytes_by_mover as f64 / run.mover_seconds;
                (run.mover_seconds > 0.0).then_some(moved)
            }),
        }
    }
}
