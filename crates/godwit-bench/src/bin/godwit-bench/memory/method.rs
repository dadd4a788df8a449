//! The ways in which a machine's memory moves.

use clap::ValueEnum;
use serde::Serialize;

/// A way to move the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Method {
    /// Only processors and devices move; the memory follows while the guest runs.
    ZeroCopy,
    /// As [`Self::ZeroCopy`], but the memory stays in its pool.
    StayInPool,
    /// All memory is sent before the switchover, and dirty pages again.
    PreCopy,
    /// All memory is sent after the switchover.
    PostCopy,
    /// One pass before the switchover, the rest after.
    Hybrid,
}

impl Method {
    pub(crate) const ALL: [Self; 5] = [
        Self::ZeroCopy,
        Self::StayInPool,
        Self::PreCopy,
        Self::PostCopy,
        Self::Hybrid,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::ZeroCopy => "zero-copy",
            Self::StayInPool => "stay-in-pool",
            Self::PreCopy => "pre-copy",
            Self::PostCopy => "post-copy",
            Self::Hybrid => "hybrid",
        }
    }

    /// Returns the options of `godwit migrate`.
    pub(crate) const fn options(self) -> &'static [&'static str] {
        match self {
            Self::ZeroCopy => &["--memory", "zero-copy"],
            Self::StayInPool => &["--memory", "zero-copy", "--stay-in-pool"],
            Self::PreCopy => &["--memory", "pre-copy"],
            Self::PostCopy => &["--memory", "post-copy"],
            Self::Hybrid => &["--memory", "hybrid"],
        }
    }

    /// Returns true if both nodes map the guest's memory. Other guests have local memory, as without a pool.
    pub(crate) const fn uses_pool(self) -> bool {
        matches!(self, Self::ZeroCopy | Self::StayInPool)
    }
}
