//! The faults of a run, and their times.

use godwit_core::event::Phase;
use godwit_core::request::RequestError;

use super::{MICROSECOND, MILLISECOND};
use crate::random::Random;

/// The time of a fault.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trigger {
    At(u64),
    /// `delay` after the `skip + 1`st occurrence of the moment.
    After {
        moment: Moment,
        skip: u32,
        delay: u64,
    },
}

/// A moment of a migration at which faults aim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    Entered(Phase),
    Paused,
    Resumed,
    /// A source has lost the node that followed.
    Severed,
    /// A node has taken a disk that followed there.
    Taken,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) trigger: Trigger,
    /// Node of the fault; without meaning for [`FaultKind::Cut`].
    pub(crate) target: Target,
    pub(crate) kind: FaultKind,
}

/// A node, by its role in the current or the last migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Source,
    Destination,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum FaultKind {
    /// The process dies and restarts.
    Crash {
        down: u64,
    },
    /// The host loses power and restarts.
    PowerLoss {
        down: u64,
    },
    /// Every connection of the youngest session ends.
    Cut,
    Cancel,
    /// Operations fail: a single one, or all for a while.
    DiskError {
        error: RequestError,
        lasts: u64,
    },
    DiskSlow {
        factor: u64,
        lasts: u64,
    },
    /// Records take this long.
    StoreSlow {
        delay: u64,
        lasts: u64,
    },
    /// Congestion: this node's bandwidth divided by `divisor`.
    LinkSlow {
        divisor: u64,
        lasts: u64,
    },
    /// One connection delivers nothing for a while: a lost segment waits for its retransmission.
    Stall {
        connection: u8,
        lasts: u64,
    },
    /// The host's other traffic takes this percentage of the link.
    Traffic {
        percent: u64,
        lasts: u64,
    },
}

impl Fault {
    /// Returns true if a guest may notice the fault, however unobtrusive the migration.
    pub(crate) fn excuses_waits(&self) -> bool {
        match self.kind {
            FaultKind::DiskSlow { .. } => self.target == Target::Source,
            kind => matches!(
                kind,
                FaultKind::Crash { .. }
                    | FaultKind::PowerLoss { .. }
                    | FaultKind::Cut
                    | FaultKind::DiskError { .. }
            ),
        }
    }
}

fn target(random: &mut Random) -> Target {
    random.pick(&[Target::Source, Target::Destination])
}

/// Draws a fault that only slows a run down.
pub(super) fn disturbance(random: &mut Random, load: u64) -> Fault {
    if random.permille(200) {
        return straggler(random);
    }
    let target = target(random);
    let lasts = random.magnitude(MILLISECOND, 60 * MILLISECOND);
    let kind = match random.below(6) {
        0 => FaultKind::DiskSlow {
            factor: random.between(3, 40),
            lasts: lasts / 2,
        },
        1 => FaultKind::StoreSlow {
            delay: random.magnitude(MILLISECOND, 30 * MILLISECOND),
            lasts,
        },
        2 => FaultKind::Stall {
            connection: random.below(5) as u8,
            lasts: lasts * random.pick(&[1, 1, 6]),
        },
        3 => FaultKind::Traffic {
            percent: random.between(20, 95),
            lasts: lasts * 2,
        },
        _ => FaultKind::LinkSlow {
            divisor: random.between(3, 60),
            lasts,
        },
    };
    Fault {
        trigger: trigger(random, 300, load),
        target,
        kind,
    }
}

/// Draws a stall of one copy connection at a pause. The frames arrive after the migration has resumed, when another
/// connection may have copied the same addresses again.
fn straggler(random: &mut Random) -> Fault {
    Fault {
        trigger: Trigger::After {
            moment: Moment::Paused,
            skip: random.below(3) as u32,
            delay: random.magnitude(1, 100 * MICROSECOND),
        },
        target: Target::Source,
        kind: FaultKind::Stall {
            connection: random.between(2, 5) as u8,
            lasts: random.between(20, 200) * MILLISECOND,
        },
    }
}

/// Draws a fault that ends a process, a connection or a migration.
pub(super) fn blow(random: &mut Random, load: u64) -> Fault {
    let target = target(random);
    let down = random.magnitude(10 * MICROSECOND, 25 * MILLISECOND);
    let kind = match random.below(16) {
        0..=4 => FaultKind::Crash { down },
        5..=8 => FaultKind::PowerLoss { down },
        9..=11 => FaultKind::Cut,
        12..=13 => FaultKind::Cancel,
        _ => FaultKind::DiskError {
            error: random.pick(&[RequestError::Io, RequestError::NoSpace]),
            lasts: random.pick(&[0, 0, 200 * MICROSECOND, 5 * MILLISECOND]),
        },
    };
    Fault {
        trigger: trigger(random, 650, load),
        target,
        kind,
    }
}

/// Draws the time of a fault; of a thousand faults, `aimed` aim at a moment of a migration.
fn trigger(random: &mut Random, aimed: u64, load: u64) -> Trigger {
    if !random.permille(aimed) {
        return Trigger::At(random.below(load));
    }
    let moment = random.pick(&[
        Moment::Entered(Phase::Copying),
        Moment::Entered(Phase::Verifying),
        Moment::Entered(Phase::Converged),
        Moment::Entered(Phase::Draining),
        Moment::Entered(Phase::Preparing),
        Moment::Entered(Phase::Relinquishing),
        Moment::Entered(Phase::Committing),
        Moment::Entered(Phase::Completed),
        Moment::Paused,
        Moment::Resumed,
    ]);
    Trigger::After {
        moment,
        skip: random.below(3) as u32,
        delay: random.magnitude(1, 8 * MILLISECOND),
    }
}
