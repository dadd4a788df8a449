//! The seam between a transfer and its policy: what a guest's write has to reach, what the window goes over next,
//! and what may be left when the disk changes hands. The rest of a transfer knows no policy.

use super::dirty::DirtyBitmap;
use super::pre_copy::{AfterRound, PreCopy};
use super::push_pull::PushPull;
use crate::controller::{MigrationOptions, PolicyOptions, PushOptions};
use crate::units::{Extent, Lba, Sectors, Time};

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
    /// Both sides read every chunk and compare hashes, to find out which have to be copied.
    Compare,
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

    /// Whether what was copied is compared, to prove that it is equal.
    pub(in crate::controller) const fn verifies(self) -> bool {
        matches!(self, Self::VerifyAll | Self::VerifyDirty { .. })
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
    /// What is seldom written is pushed; the rest is pulled once the disk has changed hands.
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

    /// Pre-copy of these blocks of the disk.
    pub(in crate::controller) fn copying(
        rounds: crate::controller::RoundOptions,
        different: &DirtyBitmap,
    ) -> Self {
        Self::PreCopy(PreCopy::of(rounds, different))
    }

    /// Whether a write has to reach the destination in a pass, before the read head or `behind` it, now or later.
    #[inline]
    pub(in crate::controller) const fn reaches(&self, pass: Pass, behind: bool) -> bool {
        match self {
            Self::Mirror | Self::PushPull(_) => true,
            Self::DoubleWrite | Self::PreCopy(_) => behind || !matches!(pass, Pass::Copy),
        }
    }

    /// Whether writes of this pass are only remembered: a later round, or a pull, brings them.
    #[inline]
    pub(in crate::controller) const fn only_marks(&self, pass: Pass) -> bool {
        match self {
            Self::DoubleWrite | Self::Mirror => false,
            Self::PreCopy(rounds) => pass.copies() && !rounds.writes_through(),
            Self::PushPull(_) => true,
        }
    }

    /// Whether this pass is one of rounds that may come to no end: what is written meanwhile is sent by the next. The
    /// round during which writes go to both nodes is not.
    pub(in crate::controller) const fn sends_again(&self, pass: Pass) -> bool {
        match self {
            Self::PreCopy(rounds) => pass.copies() && !rounds.writes_through(),
            Self::DoubleWrite | Self::Mirror | Self::PushPull(_) => false,
        }
    }

    /// The guest writes here in this pass, and the destination does not hear of it. Whether the policy remembers it.
    #[inline]
    pub(in crate::controller) fn mark(&mut self, pass: Pass, extent: Extent) -> bool {
        match self {
            Self::PreCopy(rounds) if pass.copies() => rounds.mark(extent),
            Self::PushPull(push) => push.mark(extent),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => return false,
        }
        true
    }

    /// Whether writes go to both nodes as a rule, so that places which are written again and again are worth
    /// being kept back.
    pub(in crate::controller) const fn doubles(&self) -> bool {
        matches!(self, Self::DoubleWrite | Self::Mirror)
    }

    /// Whether writes never wait for a chunk that is on its way, because what they write is copied again; nothing
    /// where the promise to the guest decides.
    pub(in crate::controller) const fn lets_writes_through(&self, pass: Pass) -> Option<bool> {
        match self {
            // A place that is written without end would be copied without end.
            Self::PreCopy(rounds) if pass.copies() => Some(!rounds.writes_through()),
            Self::PushPull(_) => Some(true),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => None,
        }
    }

    /// Goes on by push and pull. No chunk is on its way: of this pass, the destination has what lies before
    /// `head`, but for what the policy remembers. Before that pass it had all of the disk but these blocks, or
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
                // What lies behind it has not been compared.
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

    /// The destination has all of the disk but these blocks, and nothing has been sent.
    pub(in crate::controller) fn lacks_only(&mut self, wanted: &DirtyBitmap) {
        if let Self::PushPull(push) = self {
            push.lacks_only(wanted);
        }
    }

    /// What a copying pass goes over next at or behind `head`, at most `limit` sectors of it.
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

    /// A chunk of a copying pass is locked: what is written there from now on is not in it.
    pub(in crate::controller) fn locked(&mut self, pass: Pass, extent: Extent) {
        match (self, pass) {
            (Self::PushPull(push), _) => push.locked(extent),
            (Self::PreCopy(rounds), Pass::Resend { .. }) => rounds.locked(extent),
            _ => {}
        }
    }

    /// The window was given up: these chunks of a copying pass, and what the last one was a part of, have not been
    /// copied.
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

    /// A copying pass begins at the start of the disk. The bytes that it goes over.
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

    /// Whether a round follows the one of this number, which has just come to its end; `compares`: the disks are to
    /// be compared next.
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

    /// Whether another round is due while the switchover waits: so much was written.
    pub(in crate::controller) fn is_due_again(&self, pass: Pass) -> bool {
        match self {
            Self::PreCopy(rounds) => pass.copies() && rounds.is_too_much(),
            Self::PushPull(push) => push.is_worth_a_round(),
            Self::DoubleWrite | Self::Mirror => false,
        }
    }

    /// Hands over what is left before the disks are compared, which others remember from then on.
    pub(in crate::controller) fn take_rest(&mut self, remember: impl FnMut(Extent)) {
        if let Self::PreCopy(rounds) = self {
            rounds.take_rest(remember);
        }
    }

    /// Bytes that were written since they were copied, and are to be copied while the guest is held.
    pub(in crate::controller) fn rest(&self) -> u64 {
        match self {
            Self::PreCopy(rounds) => rounds.rest(),
            Self::DoubleWrite | Self::Mirror | Self::PushPull(_) => 0,
        }
    }

    /// When the disk is to be handed over, whatever the destination lacks; nothing once that time has come.
    pub(in crate::controller) const fn leaves_at(&self) -> Option<Time> {
        match self {
            Self::PushPull(push) => push.until(),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => None,
        }
    }

    /// So late is it now. Whether the disk is to be handed over because of that.
    pub(in crate::controller) fn pass_time(&mut self, now: Time) -> bool {
        match self {
            Self::PushPull(push) => push.pass_time(now),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => false,
        }
    }

    /// Whether the disk is handed over as it is, because that was `ordered` or its time has come, before the end of
    /// a pass.
    pub(in crate::controller) const fn leaves(&self, ordered: bool) -> bool {
        match self {
            Self::PushPull(push) => ordered || push.is_over(),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => false,
        }
    }

    /// What stays at the source when the disk changes hands.
    pub(in crate::controller) fn remainder(&self) -> Option<&PushPull> {
        match self {
            Self::PushPull(push) => Some(push).filter(|push| push.remaining_bytes() > 0),
            Self::DoubleWrite | Self::Mirror | Self::PreCopy(_) => None,
        }
    }
}
