//! Runs of many seeds, or of a failing one: coverage, results, and the smallest plan that still fails.

pub(crate) mod coverage;
pub(crate) mod report;
pub(crate) mod shrink;
pub(crate) mod soak;
