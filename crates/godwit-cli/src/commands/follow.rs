//! Follows a migration until it ends.

use std::time::{Duration, Instant};

use godwit_node::api::{Migration, MigrationPhase};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::client::{CallError, Client};
use crate::failure::Failure;
use crate::output::Output;
use crate::progress::{ProgressLine, migration_status};
use crate::routes;

pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How often a migration is printed as a line of JSON.
const JSON_INTERVAL: Duration = Duration::from_secs(1);
/// How long a node that does not answer is asked again: it may be restarting.
const PATIENCE: Duration = Duration::from_secs(30);

/// What Ctrl-C means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnInterrupt {
    /// The first asks the node to cancel, the second stops following.
    Cancel,
    /// Stops following.
    Detach,
}

/// How following ended.
#[derive(Debug)]
pub(crate) struct Followed {
    /// The migration as it was last seen.
    pub migration: Migration,
    /// Whether cancelling was asked for here.
    pub cancelled: bool,
}

/// Ctrl-C, from the moment this is made.
pub(crate) fn interrupts() -> Result<Signal, Failure> {
    signal(SignalKind::interrupt())
        .map_err(|error| Failure::caused("cannot listen for Ctrl-C", &error))
}

/// Follows a migration with its progress on standard error until it ends, or until Ctrl-C says
/// otherwise. With `lines`, also prints it as JSON on standard output once a second, in every new
/// phase, and at its end.
pub(crate) async fn follow(
    client: &mut Client,
    mut migration: Migration,
    mut interrupts: Signal,
    on_interrupt: OnInterrupt,
    lines: Option<Output>,
) -> Result<Followed, Failure> {
    let mut line = ProgressLine::new();
    let mut cancelled = false;
    let mut answered = Instant::now();
    let mut printed: Option<(Instant, MigrationPhase)> = None;
    loop {
        let phase = migration.phase;
        let due = printed.is_none_or(|(at, last)| last != phase || at.elapsed() >= JSON_INTERVAL);
        if let Some(output) = lines
            && due
        {
            output.print_json_line(&migration)?;
            printed = Some((Instant::now(), phase));
        }
        if phase.ended() {
            line.clear();
            return Ok(Followed {
                migration,
                cancelled,
            });
        }
        if answered.elapsed() < POLL_INTERVAL * 20 {
            line.show(phase.name(), &migration_status(&migration));
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            _ = interrupts.recv() => {
                if cancelled || on_interrupt == OnInterrupt::Detach {
                    line.clear();
                    return Err(detached(&migration));
                }
                cancelled = true;
                line.say("cancelling; press Ctrl-C again to leave the migration to the node");
                ask_to_cancel(client, &migration, &line).await;
            }
        }
        match look(
            client,
            &routes::migration(&migration.id),
            answered,
            &mut line,
        )
        .await?
        {
            Some(seen) => {
                migration = seen;
                answered = Instant::now();
            }
            None => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

/// Asks for something that is followed; nothing while the node does not answer, as long as it may be
/// restarting.
pub(super) async fn look<T: serde::de::DeserializeOwned>(
    client: &mut Client,
    path: &str,
    answered: Instant,
    line: &mut ProgressLine,
) -> Result<Option<T>, Failure> {
    match client.get(path).await {
        Ok(seen) => Ok(Some(seen)),
        Err(CallError::Unreachable(failure)) if answered.elapsed() < PATIENCE => {
            let status = crate::progress::Status {
                line: retrying(&failure),
                done: None,
                note: None,
            };
            line.show("retrying", &status);
            Ok(None)
        }
        Err(error) => {
            line.clear();
            Err(Failure::from(error))
        }
    }
}

fn retrying(failure: &Failure) -> String {
    format!("{}; trying again", failure.message)
}

async fn ask_to_cancel(client: &mut Client, migration: &Migration, line: &ProgressLine) {
    let path = routes::migration_cancel(&migration.id);
    // Whatever the answer, following goes on and shows how the migration ends.
    if let Err(error) = client
        .post::<Migration>(&path, &serde_json::json!({}))
        .await
    {
        line.say(&format!(
            "it was not cancelled: {}",
            Failure::from(error).message
        ));
    }
}

fn detached(migration: &Migration) -> Failure {
    let id = &migration.id;
    Failure::new(format!("stopped following migration {id}; it goes on"))
        .hint(format!("see how it ends: godwit migration watch {id}"))
}
