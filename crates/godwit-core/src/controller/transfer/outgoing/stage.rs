//! Stages of a departure.

use crate::controller::cx::Cx;
use crate::controller::transfer::outgoing::Outgoing;
use crate::controller::transfer::outgoing::Source;
use crate::controller::transfer::pass::Pass;
use crate::event::{Event, Phase};
use crate::units::Time;

/// Stage of a departure. [`Phase`] is the public view of the stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Stage {
    /// The guest works, and the window goes over the disk.
    Moving,
    /// The guest works, and the switchover waits for an order.
    Converged,
    /// The guest is held until the destination has the rest.
    Freezing {
        since: Time,
        /// True while blocks left over at the start of the freeze are copied or compared.
        last_pass: bool,
    },
    /// The destination was asked to accept the disk.
    Preparing { since: Time },
    /// Authority has decided; the decision is being carried out.
    Decided(Phase),
}

impl Stage {
    /// Returns the time since which the guest is held, while the hold can still be ended.
    pub(super) const fn held_since(self) -> Option<Time> {
        match self {
            Self::Freezing { since, .. } | Self::Preparing { since } => Some(since),
            Self::Moving | Self::Converged | Self::Decided(_) => None,
        }
    }

    /// Returns true if the destination was asked to accept the disk: from then on the destination takes no more data.
    pub(super) const fn has_asked(self) -> bool {
        matches!(self, Self::Preparing { .. } | Self::Decided(_))
    }

    pub(in crate::controller) const fn is_freezing(self) -> bool {
        matches!(self, Self::Freezing { .. })
    }
}

impl Source {
    /// Returns true if new guest I/O has to wait.
    #[inline]
    pub(in crate::controller) const fn is_frozen(&self) -> bool {
        !self.runs()
    }

    /// Returns true if the guest's I/O goes on beside the migration.
    #[inline]
    pub(in crate::controller) const fn runs(&self) -> bool {
        matches!(self.stage, Stage::Moving | Stage::Converged)
    }

    /// Returns the public view of the stage.
    pub(in crate::controller) const fn phase(&self) -> Phase {
        match self.stage {
            Stage::Moving if self.pass.verifies() => Phase::Verifying,
            Stage::Moving => Phase::Copying,
            Stage::Converged if self.peer.follower.follows() => Phase::Following,
            Stage::Converged => Phase::Converged,
            Stage::Freezing { .. } => Phase::Draining,
            Stage::Preparing { .. } => Phase::Preparing,
            Stage::Decided(phase) => phase,
        }
    }
}

impl Outgoing {
    pub(in crate::controller) fn enter_stage(&mut self, cx: &mut Cx, stage: Stage) {
        self.change_stage(cx, |source| source.stage = stage);
    }

    /// Starts a pass beside which the guest works.
    pub(super) fn begin_pass(&mut self, cx: &mut Cx, pass: Pass) {
        let now = cx.now;
        self.change_stage(cx, |source| {
            source.stage = Stage::Moving;
            source.start_pass(pass, now);
        });
    }

    pub(in crate::controller) fn change_stage(
        &mut self,
        cx: &mut Cx,
        change: impl FnOnce(&mut Source),
    ) {
        let Some(source) = &mut self.source else {
            return;
        };
        let before = source.phase();
        change(source);
        let (migration, phase) = (source.options.migration, source.phase());
        if phase != before {
            cx.notify(Event::PhaseEntered { migration, phase });
        }
    }
}
