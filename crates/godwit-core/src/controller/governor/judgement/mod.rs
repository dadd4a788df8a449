//! Judgement of the sampling periods: the guest's waits, the guest's throughput, the copies' gain.

pub(super) mod haste;
pub(super) mod local_answer_budget;
pub(super) mod net_progress;
pub(super) mod rate_search;
pub(super) mod relaxed_bound;
pub(super) mod strain_cause;
pub(super) mod throughput;
