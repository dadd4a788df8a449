//! Commands that wait until an earlier migration has left the disk alone.

use std::time::Duration;

use godwit_core::event::Phase;
use godwit_core::units::Time;

use crate::engine::handle::Command;
use crate::engine::run::Engine;

/// Most commands that wait at once.
pub(super) const MOST_DEFERRED: usize = 4;

/// Longest wait of a starting migration for the reads of an earlier migration.
const READS_WAIT: Duration = Duration::from_secs(5);

pub(super) struct Deferred {
    pub(super) command: Command,
    /// Time at which the command is carried out regardless.
    until: Option<Time>,
}

impl Engine {
    /// Returns true if an earlier migration still does something that conflicts with the command.
    pub(super) fn must_wait(&self, command: &Command) -> bool {
        match command {
            // Writes of the last migration must not land on top of the next migration's data.
            Command::StartDestination { .. } => self.slots.applies(),
            // The controller starts no migration while the reads of an abandoned one are pending. A start during a
            // migration is refused at once.
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

    /// Carries out the commands whose wait is over.
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
