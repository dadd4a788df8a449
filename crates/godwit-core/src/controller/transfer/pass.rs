//! Passes of the window over the disk.

/// A pass of the window over the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Pass {
    /// Every chunk goes to the destination.
    Copy,
    /// Both sides read every chunk and compare hashes, to find the chunks to copy.
    Compare,
    /// Blocks written since their copy are copied again: the round of this number, from 2 on.
    Resend { round: u32 },
    /// Both sides read every chunk and compare hashes.
    VerifyAll,
    /// Like [`Self::VerifyAll`], for the blocks written since they were compared.
    VerifyDirty { number: u32 },
}

impl Pass {
    /// Returns true if chunks go to the destination, and are not compared.
    #[inline]
    pub(in crate::controller) const fn copies(self) -> bool {
        matches!(self, Self::Copy | Self::Resend { .. })
    }

    /// Returns true if copied blocks are compared to prove equality.
    pub(in crate::controller) const fn verifies(self) -> bool {
        matches!(self, Self::VerifyAll | Self::VerifyDirty { .. })
    }

    /// Returns true if the pass covers scattered blocks, not the whole disk.
    pub(in crate::controller) const fn is_scattered(self) -> bool {
        matches!(self, Self::Resend { .. } | Self::VerifyDirty { .. })
    }
}
