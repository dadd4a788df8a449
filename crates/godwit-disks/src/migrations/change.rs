//! Changes a migration under way.

use std::sync::Arc;
use std::time::Duration;

use godwit_core::wire::Features;
use godwit_core::{ChangeError, MAX_PULLED, MigrationChange};
use tokio::sync::oneshot;

use super::options::push_options;
use super::promise::{Asked, settle};
use super::table;
use crate::migrations::Migrations;
use godwit_api::{
    Direction, ErrorBody, ErrorCode, Migration, MigrationSettings, Policy, PushSettings,
    SwitchMigration,
};

/// Changes the outgoing migration of a disk.
///
/// # Errors
/// The migration does not exist, has ended or can no longer change, or the request is invalid. Nothing has changed
/// then.
pub async fn change(
    migrations: &Arc<Migrations>,
    id: &str,
    request: &SwitchMigration,
) -> Result<Migration, ErrorBody> {
    change_because(migrations, id, request, None).await
}

/// Changes the outgoing migration of a disk. `reason` is the node's for a policy that it chose itself.
///
/// # Errors
/// As [`change`].
pub(super) async fn change_because(
    migrations: &Arc<Migrations>,
    id: &str,
    request: &SwitchMigration,
    reason: Option<String>,
) -> Result<Migration, ErrorBody> {
    let (id, view) = migrations.get(id)?;
    let mut wanted = Wanted::of(migrations, &view, request)?;
    if request.policy.is_some() {
        wanted.settings.policy_reason = reason;
    }
    let disk = migrations.disks.get(&view.disk)?;
    let (reply, answer) = oneshot::channel();
    let reply = move |changed| {
        // The waiting request may be gone.
        let _ = reply.send(changed);
    };
    let engine = disk
        .engine()
        .filter(|_| disk.lock().activity.migration() == Some(id));
    if let Some(engine) = engine {
        engine.change_migration(wanted.change, Box::new(reply));
    } else {
        reply(Err(ChangeError::NoMigration));
    }
    let changed = answer.await.unwrap_or(Err(ChangeError::NoMigration));
    changed.map_err(|error| refused(&view, &error, "see 'godwit migration show'"))?;
    // Stored together with the record by which the disk is given away.
    disk.lock().entry.max_bandwidth = wanted.settings.max_bandwidth;
    tracing::info!(
        disk = disk.name,
        migration = %id,
        change = ?wanted.change,
        why = wanted.settings.policy_reason,
        "goes on otherwise"
    );
    let Wanted {
        settings, warnings, ..
    } = wanted;
    migrations.set_options(id, settings, warnings).await;
    let (_, view) = migrations.get(&id.to_string())?;
    Ok(table::live(migrations, id, view))
}

/// Checks that a migration could be changed as requested.
///
/// # Errors
/// The foreseeable errors of [`change`].
pub fn check(
    migrations: &Migrations,
    view: &Migration,
    request: &SwitchMigration,
) -> Result<(), ErrorBody> {
    Wanted::of(migrations, view, request).map(|_| ())
}

fn refused(view: &Migration, why: &dyn std::fmt::Display, hint: &str) -> ErrorBody {
    let text = format!(
        "migration {} of disk {} stays as it is: {why}",
        view.id, view.disk
    );
    ErrorBody::new(ErrorCode::Conflict, text).hint(hint)
}

/// The requested change.
struct Wanted {
    change: MigrationChange,
    settings: MigrationSettings,
    warnings: Vec<String>,
}

impl Wanted {
    fn of(
        migrations: &Migrations,
        view: &Migration,
        request: &SwitchMigration,
    ) -> Result<Self, ErrorBody> {
        let conflict = |why: &str, hint: &str| Err(refused(view, &why, hint));
        if *request == SwitchMigration::default() {
            return Err(invalid(
                view,
                "the request changes nothing",
                "say what is to be different",
            ));
        }
        if view.phase.ended() {
            return conflict(
                &format!("it has ended: it is {}", view.phase.name()),
                "see 'godwit migration list'",
            );
        }
        let (Direction::Outgoing, Some(settings)) = (view.direction, &view.options) else {
            return conflict(
                &format!("node '{}' conducts it", view.from),
                "ask that node",
            );
        };
        let Some(agreed) = view.id.parse().ok().and_then(|id| migrations.agreed(id)) else {
            return conflict(
                "the other node has not accepted it yet",
                "try again shortly",
            );
        };
        let mut wanted = Self {
            change: MigrationChange::default(),
            settings: settings.clone(),
            warnings: Vec::new(),
        };
        wanted.bounds(migrations, view, request)?;
        if let Some(push) = push(view, request)? {
            if !agreed.contain(Features::PULLS) {
                return conflict(
                    &format!(
                        "node '{}' is older and serves no disk before all of it is there",
                        view.to
                    ),
                    "let it end, or update that node and start again",
                );
            }
            if view.progress.bytes_total > MAX_PULLED.0 {
                return conflict(
                    &format!("only disks of up to {MAX_PULLED} can be pulled"),
                    "let it end",
                );
            }
            wanted.policy(request.policy, push);
        }
        Ok(wanted)
    }

    fn policy(&mut self, policy: Option<Policy>, push: PushSettings) {
        let settings = &mut self.settings;
        self.change.policy = Some(push_options(&push));
        settings.policy = policy.unwrap_or(settings.policy);
        settings.push = Some(push);
        settings.rounds = None;
        if std::mem::take(&mut settings.verify) {
            self.warnings.push(String::from(
                "the copies are not compared, because the disk leaves before all of it is there",
            ));
        }
    }

    fn bounds(
        &mut self,
        migrations: &Migrations,
        view: &Migration,
        request: &SwitchMigration,
    ) -> Result<(), ErrorBody> {
        let settings = &mut self.settings;
        if let Some(limit) = request.max_bandwidth {
            settings.max_bandwidth = Some(limit).filter(|limit| *limit > 0);
            self.change.max_bandwidth = Some(settings.max_bandwidth);
        }
        if let Some(seconds) = request.deadline_seconds {
            settings.deadline_seconds = Some(seconds).filter(|seconds| *seconds > 0);
            self.change.deadline = Some(settings.deadline_seconds.map(Duration::from_secs));
        }
        if let Some(text) = &request.sla {
            let asked = Asked::parse(&view.disk, Some(text))?;
            if asked == Asked::Auto {
                return Err(invalid(
                    view,
                    "what a guest has without a migration can be measured only before it",
                    "write off, or a percentile and a time like 'p99.99<2ms'",
                ));
            }
            let baseline = migrations.baseline(&view.id);
            let promise = settle(&view.disk, asked, baseline.as_ref())?;
            let target = promise.target;
            self.warnings.extend(promise.warnings);
            settings.sla = target.map(|target| target.to_string());
            settings.sla_auto = false;
            self.change.sla = Some(target);
        }
        Ok(())
    }
}

fn invalid(view: &Migration, why: &str, hint: &str) -> ErrorBody {
    let text = format!("migration {} of disk {}: {why}", view.id, view.disk);
    ErrorBody::new(ErrorCode::Invalid, text).hint(hint)
}

/// Returns the push settings from now on, if the policy is to change.
fn push(view: &Migration, request: &SwitchMigration) -> Result<Option<PushSettings>, ErrorBody> {
    let of_pushing = request.push_threshold.is_some() || request.push_seconds.is_some();
    let Some(policy) = request.policy else {
        return match of_pushing {
            true => Err(invalid(
                view,
                "what is said of pushing needs a policy that pushes",
                "choose the policy push-pull with it",
            )),
            false => Ok(None),
        };
    };
    let Some(usual) = policy.usual.push() else {
        return Err(invalid(
            view,
            &format!("while it runs it cannot become {}", policy.name),
            "choose push-pull or post-copy, or cancel it and start again",
        ));
    };
    let threshold = request.push_threshold.unwrap_or(usual.threshold);
    match policy.pushes() {
        true if threshold == 0 => Err(invalid(
            view,
            "with a threshold of 0 nothing would be pushed",
            "choose at least 1, or the policy post-copy",
        )),
        false if of_pushing => Err(invalid(
            view,
            &format!("{} pushes nothing", policy.name),
            "leave out what is said of pushing, or choose the policy push-pull",
        )),
        _ => Ok(Some(PushSettings {
            threshold,
            longest_seconds: request.push_seconds,
        })),
    }
}
