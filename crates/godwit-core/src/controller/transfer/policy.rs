//! The seam between a transfer and its policy: what a guest's write has to reach, and what the window goes over.

use super::pre_copy::PreCopy;
use crate::controller::{MigrationOptions, PolicyOptions};
use crate::units::Sectors;

/// What becomes of a guest's write that no chunk keeps waiting. The local disk gets it in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Route {
    /// A copy brings it to the destination.
    Local,
    /// It is remembered, and reaches the destination later.
    Later,
    /// It goes to both nodes now.
    Both,
}

/// A pass of the window over the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Pass {
    /// Every chunk goes to the destination.
    Copy,
    /// What was written since it was copied goes there again: the round of this number, from 2 on.
    Resend { round: u32 },
    /// Both sides read every chunk and compare hashes.
    VerifyAll,
    /// As before, but only blocks that were written since they were compared.
    VerifyDirty { number: u32 },
}

impl Pass {
    /// Whether chunks go to the destination, and are not compared.
    #[inline]
    pub(in crate::controller) const fn copies(self) -> bool {
        matches!(self, Self::Copy | Self::Resend { .. })
    }

    /// Whether it goes over blocks here and there, and not over all of the disk.
    pub(in crate::controller) const fn is_scattered(self) -> bool {
        matches!(self, Self::Resend { .. } | Self::VerifyDirty { .. })
    }
}

/// How the destination comes to have the disk.
#[derive(Debug)]
pub(in crate::controller) enum Policy {
    /// One pass; what is written behind its head goes to both nodes (Alg. 1 of the SmartNIC storage-migration
    /// paper).
    DoubleWrite,
    /// One pass; whatever is written goes to both nodes from the start.
    Mirror,
    /// Passes over what was written since the last one, until what is left is little.
    PreCopy(PreCopy),
}

impl Policy {
    pub(in crate::controller) fn new(options: &MigrationOptions, capacity: Sectors) -> Self {
        match options.policy {
            PolicyOptions::DoubleWrite => Self::DoubleWrite,
            PolicyOptions::Mirror => Self::Mirror,
            PolicyOptions::PreCopy(rounds) => Self::PreCopy(PreCopy::new(rounds, capacity)),
        }
    }

    /// Whether a write has to reach the destination in a pass, before the read head or `behind` it.
    #[inline]
    pub(in crate::controller) const fn reaches(&self, pass: Pass, behind: bool) -> bool {
        match self {
            Self::Mirror => true,
            Self::DoubleWrite | Self::PreCopy(_) => behind || !matches!(pass, Pass::Copy),
        }
    }

    /// The bitmap that a write of this pass is entered in, instead of going to the destination.
    #[inline]
    pub(in crate::controller) const fn rounds(&self, pass: Pass) -> Option<&PreCopy> {
        match self {
            Self::PreCopy(rounds) if pass.copies() => Some(rounds),
            _ => None,
        }
    }

    /// As [`Self::rounds`], to be changed.
    #[inline]
    pub(in crate::controller) const fn rounds_mut(&mut self, pass: Pass) -> Option<&mut PreCopy> {
        match self {
            Self::PreCopy(rounds) if pass.copies() => Some(rounds),
            _ => None,
        }
    }

    /// Whether writes go to both nodes as a rule, so that places which are written again and again are worth
    /// being kept back.
    pub(in crate::controller) const fn doubles(&self) -> bool {
        matches!(self, Self::DoubleWrite | Self::Mirror)
    }

    /// Bytes that were written since they were copied.
    pub(in crate::controller) fn rest(&self) -> u64 {
        match self {
            Self::PreCopy(rounds) => rounds.rest(),
            Self::DoubleWrite | Self::Mirror => 0,
        }
    }
}
