//! A protection as users see it, at its primary and at its backup.

use godwit_api::{ProtectionRole, ProtectionState, VmProtection};
use godwit_context::store::machine::protections::ProtectionEntry;
use godwit_protect::{BackupState, PrimaryState, Term};

use super::backup::BackupActor;
use super::checkpoints::Sending;
use super::primary::{PrimaryActor, Session};

impl PrimaryActor {
    /// Shows the protection to users.
    pub(super) fn show(&self) {
        let synced = self.session.as_ref().map(|session| {
            let started = session.started.iter().flatten();
            started.fold((0, 0), |(total, done), (_, migration)| {
                let progress = self.here.progress_of(migration);
                (total + progress.0, done + progress.1)
            })
        });
        let (bytes_total, bytes_done) = synced.unwrap_or_default();
        let state = match self.primary.state() {
            PrimaryState::Alone if self.session.is_some() => ProtectionState::Syncing,
            PrimaryState::Alone => ProtectionState::Alone,
            PrimaryState::Pairing => ProtectionState::Pairing,
            PrimaryState::Paired => ProtectionState::Protected,
            PrimaryState::Severed => ProtectionState::Severed,
            PrimaryState::Ended => ProtectionState::Taken,
        };
        let answered = |session: &Session| session.pings.silence(self.here.now());
        self.here.show(VmProtection {
            bytes_total,
            bytes_done,
            answered_ms_ago: self
                .session
                .as_ref()
                .map(|it| answered(it).as_millis() as u64),
            checkpoints: self.sending.as_ref().map(Sending::figures),
            ..shown(
                &self.entry,
                (ProtectionRole::Primary, state),
                self.primary.record().known.term,
                self.problem.clone(),
            )
        });
    }
}

impl BackupActor {
    /// Shows the protection to users.
    pub(super) fn show(&self) {
        let known = self.backup.known();
        let state = match self.backup.state() {
            BackupState::Syncing => ProtectionState::Syncing,
            BackupState::Following if self.told.paired => ProtectionState::Protected,
            BackupState::Following => ProtectionState::Pairing,
            BackupState::Asking => ProtectionState::Severed,
            BackupState::Took => ProtectionState::Taken,
        };
        let term = known.term.max(self.told.term);
        let what = (ProtectionRole::Backup, state);
        self.here
            .show(shown(&self.entry, what, term, self.problem.clone()));
    }
}

/// Returns the common part of a protection's view.
fn shown(
    entry: &ProtectionEntry,
    (role, state): (ProtectionRole, ProtectionState),
    term: Term,
    problem: Option<String>,
) -> VmProtection {
    VmProtection {
        role,
        peer: entry.peer.clone(),
        state,
        witness: entry.witness.clone(),
        when_alone: entry.witness.is_none().then_some(entry.when_alone),
        term: term.0,
        heartbeat_timeout_ms: entry.timeout_ms,
        bytes_total: 0,
        bytes_done: 0,
        answered_ms_ago: None,
        checkpoints: None,
        problem,
    }
}
