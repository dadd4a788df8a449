//! The seam between a transfer and its policy: the reach of a guest's write, the window's next extent, and the rest
//! allowed at the switchover. All policy-specific decisions of a transfer are here.

use super::dirty::DirtyBitmap;
use super::pre_copy::{AfterRound, PreCopy};
use super::push_pull::PushPull;
use crate::controller::{MigrationOptions, PolicyOptions, PushOptions};
use crate::units::{Extent, Lba, Sectors, Time};

/// Route of a guest's write that waits for no chunk. The local disk gets the write in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Route {
    /// To the local disk; a copy brings the data to the destination.
    Local,
    /// Remembered, and sent to the destination later.
    Later,
    /// To both nodes now.
    Both,
}

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

/// Method by which the destination gets the disk.
#[derive(Debug)]
pub(in crate::controller) enum Policy {
    /// A single pass; writes behind the head go to both nodes (Alg. 1 of the SmartNIC storage-migration paper).
    DoubleWrite,
    /// A single pass; all writes go to both nodes from the start.
    Mirror,
    /// Passes over the blocks written since the last pass, until little is left.
    PreCopy(PreCopy),
    /// Rarely written blocks are pushed; the rest is pulled after the switchover.
    PushPull(PushPull),
}

impl Policy {
    pub(in crate::controller) fn new(
        options: &MigrationOptions,
        capacity: Sectors,
        now: Time,
    ) -> Self {
        match options.policy {
            PolicyOptions::DoubleWrite => Self::DoubleWrite,
            PolicyOptions::Mirror => Self::Mirror,
            PolicyOptions::PreCopy(rounds) => Self::PreCopy(PreCopy::new(rounds, capacity)),
            PolicyOptions::PushPull(push) => Self::PushPull(PushPull::new(push, capacity, now)),
        }
    }

    /// Creates pre-copy of these blocks of the disk.
    pub(in crate::controller) fn copying(
        rounds: crate::controller::RoundOptions,
        different: &DirtyBitmap,
    ) -> Self {
        Self::PreCopy(PreCopy::of(rounds, different))
    }

    /// Returns true if a write has to reach the destination in a pass, now or later. `behind` is true if the write
    /// begins behind the read head.
    #[inline]
    pub(in crate::controller) const fn reaches(&self, pass: Pass, behind: bool) -> bool {
        match self {
            Self::Mirror | Self::PushPull(_) => true,
            Self::DoubleWrite | Self::PreCopy(_) => behind || !matches!(pass, Pass::Copy),
        }
    }

    /// Returns true if writes of this pass are only remembered: a later round, or a pull, sends the data.
    #[inline]
    pub(in crate::controller) const fn only_marks(&self, pass: Pass) -> bool {
        match self {
            Self::DoubleWrite | Self::Mirror => false,
            Self::PreCopy(rounds) => pass.copies() && !rounds.writes_through(),
            Self::PushPull(_) => true,
        }
    }

    /// Returns true if this pass is one of the rounds that may not converge: blocks written meanwhile are sent by the
    /// next round. The round in which writes go to both nodes is not.
    pub(in crate::controller) const fn sends_again(&self, pass: Pass) -> bool {
        match self {
            Self::PreCopy(rounds) => pass.copies() && !rounds.writes_through(),
            Self::DoubleWrite | Self::Mirror | Self::PushPull(_) => false,
        }
    }

    /// Marks a write of the guest that the destination does not receive. Returns true if the policy remembers the
    /// write.
    #[inline]
    pub(in crate::controller) fn mark(&mut self, pass: Pass, extent: Extent) -> bool {
        match self {
            Self::PreCopy(rounds) if pass.copies() => rounds.mark(extent),
            Self::PushPull(push) => push.mark(extent),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => return false,
        }
        true
    }

    /// Returns true if writes usually go to both nodes, so that keeping back writes to hot places pays.
    pub(in crate::controller) const fn doubles(&self) -> bool {
        matches!(self, Self::DoubleWrite | Self::Mirror)
    }

    /// Returns true if writes never wait for a chunk in flight, because their blocks are copied again; `None` if the
    /// promise to the guest decides.
    pub(in crate::controller) const fn lets_writes_through(&self, pass: Pass) -> Option<bool> {
        match self {
            // A place written without end would be copied without end.
            Self::PreCopy(rounds) if pass.copies() => Some(!rounds.writes_through()),
            Self::PushPull(_) => Some(true),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => None,
        }
    }

    /// Switches to push and pull. No chunk is in flight. Of this pass, the destination has the blocks before `head`,
    /// except those remembered by the policy. Before the pass the destination had the whole disk except `wanted`, or
    /// nothing.
    pub(in crate::controller) fn become_push_pull(
        &mut self,
        pass: Pass,
        options: PushOptions,
        head: Lba,
        wanted: Option<&DirtyBitmap>,
        capacity: Sectors,
        now: Time,
    ) {
        if let Self::PushPull(push) = self {
            return push.change(options, now);
        }
        let mut push = PushPull::with_nothing_left(options, capacity, now);
        match (pass, wanted) {
            (Pass::Copy, None) => push.add_from(head),
            (Pass::Copy, Some(wanted)) => push.add_those_of(wanted, head),
            (Pass::Compare, differing) => {
                // Blocks behind the head have not been compared.
                push.add_from(head);
                if let Some(differing) = differing {
                    push.add_those_of(differing, Lba(0));
                }
            }
            (Pass::Resend { .. } | Pass::VerifyAll | Pass::VerifyDirty { .. }, _) => {}
        }
        if let Self::PreCopy(rounds) = self {
            rounds.give_up(core::iter::empty(), head);
            rounds.take_rest(|extent| push.give_up(extent));
        }
        *self = Self::PushPull(push);
    }

    /// Notes that the destination has the whole disk except these blocks, before anything is sent.
    pub(in crate::controller) fn lacks_only(&mut self, wanted: &DirtyBitmap) {
        if let Self::PushPull(push) = self {
            push.lacks_only(wanted);
        }
    }

    /// Returns the next extent of a copying pass at or behind `head`, limited to `limit` sectors.
    pub(in crate::controller) fn next(
        &self,
        pass: Pass,
        head: Lba,
        limit: u32,
        capacity: Sectors,
    ) -> Option<Extent> {
        match (self, pass) {
            (Self::PushPull(push), _) => push.next(head, limit),
            (Self::PreCopy(rounds), Pass::Resend { .. }) => rounds.next(head, limit),
            _ => {
                let left = capacity.0.saturating_sub(head.0);
                Extent::new(head, left.min(u64::from(limit)) as u32)
            }
        }
    }

    /// Notes that a chunk of a copying pass is locked: later writes are not part of the chunk.
    pub(in crate::controller) fn locked(&mut self, pass: Pass, extent: Extent) {
        match (self, pass) {
            (Self::PushPull(push), _) => push.locked(extent),
            (Self::PreCopy(rounds), Pass::Resend { .. }) => rounds.locked(extent),
            _ => {}
        }
    }

    /// Notes that the window was given up: these chunks of a copying pass, and the rest of the last chunk's block, have
    /// not been copied.
    pub(in crate::controller) fn give_up(
        &mut self,
        pass: Pass,
        extents: impl Iterator<Item = Extent>,
        head: Lba,
    ) {
        match (self, pass) {
            (Self::PushPull(push), _) => extents.for_each(|extent| push.give_up(extent)),
            (Self::PreCopy(rounds), Pass::Resend { .. }) => rounds.give_up(extents, head),
            _ => {}
        }
    }

    /// Begins a copying pass at the start of the disk; returns the bytes of the pass.
    pub(in crate::controller) fn begin_round(&mut self, pass: Pass, capacity: Sectors) -> u64 {
        match (self, pass) {
            (Self::PushPull(push), _) => push.pushable_bytes(),
            (Self::PreCopy(rounds), Pass::Resend { .. }) => {
                rounds.begin_round();
                rounds.rest()
            }
            _ => capacity.bytes().0,
        }
    }

    /// Returns true if a round follows `round`, which has just ended. `compares` is true if the disks are compared
    /// next.
    pub(in crate::controller) fn goes_on(
        &mut self,
        pass: Pass,
        round: u32,
        compares: bool,
    ) -> bool {
        match self {
            Self::PreCopy(rounds) if pass.copies() => {
                rounds.after(round, compares) == AfterRound::Again
            }
            Self::PushPull(push) => push.pushable_bytes() > 0,
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => false,
        }
    }

    /// Returns true if enough was written for another round while the switchover waits.
    pub(in crate::controller) fn is_due_again(&self, pass: Pass) -> bool {
        match self {
            Self::PreCopy(rounds) => pass.copies() && rounds.is_too_much(),
            Self::PushPull(push) => push.is_worth_a_round(),
            Self::DoubleWrite | Self::Mirror => false,
        }
    }

    /// Hands over the rest before the disks are compared; the caller remembers the rest from then on.
    pub(in crate::controller) fn take_rest(&mut self, remember: impl FnMut(Extent)) {
        if let Self::PreCopy(rounds) = self {
            rounds.take_rest(remember);
        }
    }

    /// Returns the bytes written since their copy, to be copied while the guest is held.
    pub(in crate::controller) fn rest(&self) -> u64 {
        match self {
            Self::PreCopy(rounds) => rounds.rest(),
            Self::DoubleWrite | Self::Mirror | Self::PushPull(_) => 0,
        }
    }

    /// Returns the time at which the disk is handed over, whatever the destination lacks; `None` once the time has
    /// come.
    pub(in crate::controller) const fn leaves_at(&self) -> Option<Time> {
        match self {
            Self::PushPull(push) => push.until(),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => None,
        }
    }

    /// Advances the clock. Returns true once the push deadline has passed.
    pub(in crate::controller) fn pass_time(&mut self, now: Time) -> bool {
        match self {
            Self::PushPull(push) => push.pass_time(now),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => false,
        }
    }

    /// Returns true if the disk is handed over before the end of a pass, because the handover was `ordered` or its time
    /// has come.
    pub(in crate::controller) const fn leaves(&self, ordered: bool) -> bool {
        match self {
            Self::PushPull(push) => ordered || push.is_over(),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => false,
        }
    }

    /// Returns the part that stays at the source when the disk changes hands.
    pub(in crate::controller) fn remainder(&self) -> Option<&PushPull> {
        match self {
            Self::PushPull(push) => Some(push).filter(|push| push.remaining_bytes() > 0),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => None,
        }
    }
}
