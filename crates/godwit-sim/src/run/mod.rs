//! Many seeds, or one that fails: what they reached, what became of them, and the least that still fails.

pub(crate) mod coverage;
pub(crate) mod report;
pub(crate) mod shrink;
pub(crate) mod soak;
