//! Questions about the outcome of a migration, and their answers.

use super::{Attempt, Authority, Effect, Ownership};
use crate::event::AbortReason;
use crate::units::MigrationId;
use crate::wire::Message;

impl Authority {
    /// Returns the message to repeat while the outcome is open. Called when a control connection comes up, and at
    /// intervals afterwards.
    pub fn remind(&self) -> Option<Message> {
        if self.storing.is_some() {
            return None;
        }
        match self.record.ownership {
            Ownership::Accepted { migration } => Some(Message::Query { migration }),
            Ownership::Relinquished { migration } if !self.confirmed => Some(Message::Commit {
                migration,
                epoch: self.record.epoch,
            }),
            _ => None,
        }
    }

    /// Answers a destination that asks for the outcome.
    pub(super) fn handle_query(&mut self, migration: MigrationId) -> Vec<Effect> {
        let gave_away = matches!(self.record.ownership,
            Ownership::Relinquished { migration: m } | Ownership::Departed { migration: m }
                if m == migration);
        if gave_away {
            return vec![Effect::Send(Message::Commit {
                migration,
                epoch: self.record.epoch,
            })];
        }
        if matches!(self.attempt, Attempt::Preparing { migration: asked, .. } if asked == migration)
        {
            return Vec::new();
        }
        vec![Effect::Send(Message::Abort {
            migration,
            reason: AbortReason::Cancelled,
        })]
    }
}
