//! What the sampling periods say: of the guest's waits, of what it gets done, of what copies gain.

pub(super) mod haste;
pub(super) mod local_answer_budget;
pub(super) mod net_progress;
pub(super) mod rate_search;
pub(super) mod relaxed_bound;
pub(super) mod strain_cause;
pub(super) mod throughput;
