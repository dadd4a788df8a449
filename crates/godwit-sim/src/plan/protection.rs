//! A protected machine: its disk stays, and the other node follows.

use std::time::Duration;

use godwit_core::event::Phase;
use godwit_core::units::MigrationId;
use godwit_core::{MigrationOptions, PolicyOptions, Switchover};

use super::faults::{Fault, FaultKind, Moment, Target, Trigger};
use super::{MICROSECOND, MILLISECOND, MigrationPlan, OlderCopyPlan};
use crate::random::Random;

/// Most synchronizations of a run.
const MOST_SYNCS: u8 = 60;

/// The plan for the checkpoints of a protected machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckpointPlan {
    /// Time from one checkpoint to the next.
    pub(crate) interval: u64,
    /// Longest way of a memory to the backup, and of an acknowledgement back.
    pub(crate) delay: u64,
}

/// The plan for a protected machine.
#[derive(Clone, Debug)]
pub(crate) struct ProtectionPlan {
    /// Longest way of a message to the witness, or from it.
    pub(crate) witness_delay: u64,
    /// Messages per thousand that are lost on the way.
    pub(crate) witness_loss: u64,
    /// Time from one request to the witness to its repetition.
    pub(crate) retry: u64,
    /// Silence after which the primary holds its answers.
    pub(crate) lease: u64,
    /// Silence after which the backup takes the machine: longer than the lease.
    pub(crate) patience: u64,
    /// Times at which the backup takes a living primary for lost.
    pub(crate) suspicions: Vec<u64>,
    /// Checkpoints of the machine, if any.
    pub(crate) checkpoints: Option<CheckpointPlan>,
}

impl ProtectionPlan {
    pub(super) fn new(random: &mut Random, load: u64) -> Self {
        let lease = random.magnitude(100 * MICROSECOND, 20 * MILLISECOND);
        Self {
            witness_delay: random.magnitude(20 * MICROSECOND, 10 * MILLISECOND),
            witness_loss: random.pick(&[0, 0, 100, 400]),
            retry: random.magnitude(MILLISECOND, 10 * MILLISECOND),
            lease,
            patience: lease + random.magnitude(10 * MICROSECOND, 10 * MILLISECOND),
            suspicions: (0..random.below(9)).map(|_| random.below(load)).collect(),
            checkpoints: random.permille(450).then(|| CheckpointPlan {
                interval: random.magnitude(500 * MICROSECOND, 30 * MILLISECOND),
                delay: random.magnitude(20 * MICROSECOND, 10 * MILLISECOND),
            }),
        }
    }
}

/// Returns the synchronization of this number, as another migration would be drawn.
pub(super) fn sync(
    random: &mut Random,
    number: u8,
    drawn: MigrationPlan,
    checkpoints: bool,
) -> MigrationPlan {
    MigrationPlan {
        gap: random.magnitude(50 * MICROSECOND, 30 * MILLISECOND),
        options: MigrationOptions {
            migration: MigrationId([number; 16]),
            policy: random.pick(&[PolicyOptions::DoubleWrite, PolicyOptions::Mirror]),
            verify: false,
            switchover: Switchover::Never { checkpoints },
            peer_timeout: Duration::from_millis(random.between(20, 150)),
            ..drawn.options
        },
        client_follows: None,
        store_refuses: false,
        older_copy: random.pick(&[
            OlderCopyPlan::Use,
            OlderCopyPlan::Use,
            OlderCopyPlan::Compare,
            OlderCopyPlan::Ignore,
        ]),
        change: None,
        ..drawn
    }
}

/// Returns the numbers of the synchronizations.
pub(super) fn syncs() -> impl Iterator<Item = u8> {
    1..=MOST_SYNCS
}

/// Draws a fault aimed at a disk that is followed.
pub(super) fn blow(random: &mut Random) -> Fault {
    let down = random.magnitude(10 * MICROSECOND, 60 * MILLISECOND);
    let kind = match random.below(8) {
        0..=2 => FaultKind::Crash { down },
        3..=5 => FaultKind::PowerLoss { down },
        _ => FaultKind::Cut,
    };
    Fault {
        trigger: Trigger::After {
            moment: random.pick(&[
                Moment::Entered(Phase::Converged),
                Moment::Entered(Phase::Following),
                Moment::Entered(Phase::Following),
                Moment::Severed,
                Moment::Taken,
            ]),
            skip: random.below(4) as u32,
            delay: random.magnitude(1, 60 * MILLISECOND),
        },
        target: random.pick(&[Target::Source, Target::Source, Target::Destination]),
        kind,
    }
}
