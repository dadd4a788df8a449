//! Commands that wait until what an earlier migration left at the disk is done.

use std::time::Duration;

use godwit_core::event::Phase;
use godwit_core::units::Time;

use crate::engine::handle::Command;
use crate::engine::run::Engine;

/// Commands that may wait at once.
pub(super) const MOST_DEFERRED: usize = 4;

/// How long a migration that starts waits for the reads of an earlier one.
const READS_WAIT: Duration = Duration::from_secs(5);

/// A command that waits.
pub(super) struct Deferred {
    pub(super) command: Command,
    /// When it is carried out however things stand.
    until: Option<Time>,
}

impl Engine {
    /// Whether the command would meet something that an earlier migration still does.
    pub(super) fn must_wait(&self, command: &Command) -> bool {
        match command {
            // What the last migration still writes must not land on top of the next one's data.
            Command::StartDestination { .. } => self.slots.applies(),
            // The controller starts no migration while it waits for an abandoned one's reads. That
            // of a migration under way it refuses at once.
            Command::StartSource { .. } => self.chunks.is_reading() && !self.is_leaving(),
            _ => false,
        }
    }

    fn is_leaving(&self) -> bool {
        let ended = |phase| matches!(phase, Phase::Completed | Phase::Aborted);
        self.core
            .progress()
            .is_some_and(|progress| !ended(progress.phase))
    }

    pub(super) fn defer(&mut self, command: Command) {
        let until = match command {
            Command::StartSource { .. } => Some(self.now.after(READS_WAIT)),
            _ => None,
        };
        self.deferred.push(Deferred { command, until });
    }

    /// Carries out the commands that need not wait any more.
    pub(super) fn run_deferred(&mut self) {
        if self.deferred.is_empty() {
            return;
        }
        for deferred in std::mem::take(&mut self.deferred) {
            let waited_enough = deferred.until.is_some_and(|until| until <= self.now);
            if self.must_wait(&deferred.command) && !waited_enough {
                self.deferred.push(deferred);
            } else {
                self.carry_out(deferred.command);
            }
        }
    }
}
