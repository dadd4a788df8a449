//! Follows a move until its end.

use std::time::Duration;

use godwit_api::Move;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use super::moving;
use crate::client::{CallError, Client};
use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::routes;
use crate::show::line::Line;
use crate::show::output::Output;
use crate::show::progress::{ProgressLine, Status};

/// Interval of requests to the node, unless the migration ends before.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of requests while another node is still needed.
const WAIT_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of JSON lines about a migration.
const JSON_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which requests to a silent node are repeated: the node may be restarting.
const PATIENCE: Duration = Duration::from_secs(30);

/// Message after the first Ctrl-C.
const CANCELLING: &str = "cancelling; press Ctrl-C again to leave the migration to the node";

/// The effect of Ctrl-C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnInterrupt {
    /// The first Ctrl-C asks the node to cancel, and the second stops following.
    Cancel {
        /// True if the first Ctrl-C has come already.
        cancelled: bool,
    },
    /// Ctrl-C stops following.
    Detach,
}

/// The outcome of following a move.
#[derive(Debug)]
pub(crate) struct Followed {
    /// Last state of the migration.
    pub migration: Move,
    /// True if the user asked to cancel.
    pub cancelled: bool,
}

/// Listens for Ctrl-C from now on.
pub(crate) fn interrupts() -> Result<Signal, Failure> {
    signal(SignalKind::interrupt())
        .map_err(|error| Failure::caused("cannot listen for Ctrl-C", &error))
}

/// A move that a node has begun.
#[derive(Debug)]
pub(crate) struct Begun {
    migration: Move,
    cancelled: bool,
}

/// Asks the node to begin a migration. The answer may have to wait for the other node. Ctrl-C during the wait cancels
/// the migration as soon as it has begun; a second Ctrl-C leaves the migration to the node.
pub(crate) async fn begin<M: DeserializeOwned + Into<Move>>(
    client: &mut Client,
    path: &str,
    request: &impl Serialize,
    interrupts: &mut Signal,
    output: Output,
) -> Result<Begun, Failure> {
    let mut cancelled = false;
    let mut answer = std::pin::pin!(client.post::<M>(path, request));
    loop {
        tokio::select! {
            answer = &mut answer => {
                return Ok(Begun { migration: answer?.into(), cancelled });
            }
            _ = interrupts.recv() => {
                if cancelled {
                    let message = "stopped waiting for the node; the migration may have begun";
                    let hint = "see whether it has: godwit migration list";
                    return Err(Failure::new(message).hint(hint).exit(EXIT_INTERRUPTED));
                }
                cancelled = true;
                output.say(CANCELLING);
            }
        }
    }
}

/// Shows a migration that has begun: only the id if `detach` is set, otherwise the progress until the end, and the
/// outcome.
pub(crate) async fn see_off(
    client: &mut Client,
    begun: Begun,
    interrupts: Signal,
    detach: bool,
    output: Output,
) -> Result<(), Failure> {
    let Begun {
        migration: started,
        cancelled,
    } = begun;
    if cancelled {
        ask_to_cancel(client, &started, &ProgressLine::new(output)).await;
    } else if detach {
        for warning in moving(&started).warnings() {
            output.say(&warned(warning));
        }
        return output.print(&started, |started| started.id().to_owned());
    }
    let Followed {
        migration,
        cancelled,
    } = follow(
        client,
        started,
        interrupts,
        OnInterrupt::Cancel { cancelled },
        output,
        false,
    )
    .await?;
    match moving(&migration).failure(cancelled) {
        Some(failure) => Err(failure),
        None => output.print(&migration, told),
    }
}

/// Returns the summary of a completed move, with the data still at the source.
fn told(migration: &Move) -> String {
    let migration = moving(migration);
    let owed = migration.owed().map(|owed| format!("\n{owed}"));
    format!("{}{}", migration.summary(), owed.unwrap_or_default())
}

/// Works like [`see_off`], and then waits until the source is no longer needed, or until Ctrl-C.
pub(crate) async fn see_off_and_wait(
    client: &mut Client,
    begun: Begun,
    interrupts: Signal,
    output: Output,
) -> Result<(), Failure> {
    let cancelled = begun.cancelled;
    if cancelled {
        ask_to_cancel(client, &begun.migration, &ProgressLine::new(output)).await;
    }
    let how = OnInterrupt::Cancel { cancelled };
    let followed = follow(client, begun.migration, interrupts, how, output, false).await?;
    if let Some(failure) = moving(&followed.migration).failure(followed.cancelled) {
        return Err(failure);
    }
    let migration = until_paid(client, followed.migration, output).await?;
    output.print(&migration, |migration| moving(migration).summary())
}

async fn until_paid(
    client: &mut Client,
    mut migration: Move,
    output: Output,
) -> Result<Move, Failure> {
    let mut line = ProgressLine::new(output);
    let mut interrupts = interrupts()?;
    let mut answered = Instant::now();
    while let Some(owed) = moving(&migration).owed() {
        let status = Status {
            line: Line::plain(owed),
            done: None,
            note: None,
        };
        line.show("waiting", &status);
        tokio::select! {
            () = tokio::time::sleep(WAIT_INTERVAL) => {}
            _ = interrupts.recv() => {
                line.clear();
                let message = "stopped waiting; the rest of it is pulled on";
                return Err(Failure::new(message).exit(EXIT_INTERRUPTED));
            }
        }
        if let Some(seen) = look(client, migration.id(), answered, &mut line).await? {
            migration = seen;
            answered = Instant::now();
        }
    }
    line.clear();
    Ok(migration)
}

/// Follows a migration until its end or Ctrl-C, with progress and warnings on standard error. With `lines`, also prints
/// the migration as JSON on standard output: once a second, in every new phase, and at the end.
pub(crate) async fn follow(
    client: &mut Client,
    mut migration: Move,
    mut interrupts: Signal,
    on_interrupt: OnInterrupt,
    output: Output,
    lines: bool,
) -> Result<Followed, Failure> {
    let mut line = ProgressLine::new(output);
    let mut cancelled = on_interrupt == OnInterrupt::Cancel { cancelled: true };
    let mut answered = Instant::now();
    let mut heard = true;
    let mut printed: Option<(Instant, &str)> = None;
    let mut told = 0;
    let mut next = Instant::now();
    loop {
        let seen = moving(&migration);
        let phase = seen.phase();
        let due = printed.is_none_or(|(at, last)| last != phase || at.elapsed() >= JSON_INTERVAL);
        if lines && due {
            output.print_json_line(&migration)?;
            printed = Some((Instant::now(), phase));
        }
        for warning in seen.warnings().iter().skip(told) {
            line.say(&warned(warning));
        }
        told = told.max(seen.warnings().len());
        if seen.ended() {
            line.clear();
            return Ok(Followed {
                migration,
                cancelled,
            });
        }
        // The state from before the node fell silent is not shown again.
        if heard {
            line.show(phase, &seen.status());
        }
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            _ = interrupts.recv() => {
                if cancelled || on_interrupt == OnInterrupt::Detach {
                    line.clear();
                    return Err(detached(&migration));
                }
                cancelled = true;
                line.say(CANCELLING);
                ask_to_cancel(client, &migration, &line).await;
            }
        }
        // A request that waits for the end answers after this time.
        next = Instant::now() + POLL_INTERVAL;
        let seen = look(client, migration.id(), answered, &mut line).await?;
        heard = seen.is_some();
        match seen {
            Some(seen) => {
                migration = seen;
                answered = Instant::now();
            }
            None => tokio::time::sleep(POLL_INTERVAL).await,
        }
    }
}

fn warned(warning: &str) -> String {
    format!("warning: {warning}")
}

/// Requests the state of a move; returns `None` while the node does not answer, as long as the node may be restarting.
async fn look(
    client: &mut Client,
    id: &str,
    answered: Instant,
    line: &mut ProgressLine,
) -> Result<Option<Move>, Failure> {
    let path = routes::migration_within(id, POLL_INTERVAL);
    match client.get(&path).await {
        Ok(seen) => Ok(Some(seen)),
        Err(CallError::Unreachable(failure)) if answered.elapsed() < PATIENCE => {
            let status = Status {
                line: Line::plain(retrying(&failure)),
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

async fn ask_to_cancel(client: &mut Client, migration: &Move, line: &ProgressLine) {
    let path = routes::migration_cancel(migration.id());
    // In any case, following goes on and shows the end of the migration.
    if let Err(error) = client.post::<Move>(&path, &serde_json::json!({})).await {
        let why = Failure::from(error).message;
        line.say(&format!("it was not cancelled: {why}"));
    }
}

fn detached(migration: &Move) -> Failure {
    let id = migration.id();
    Failure::new(format!("stopped following migration {id}; it goes on"))
        .hint(format!("see how it ends: godwit migration watch {id}"))
        .exit(EXIT_INTERRUPTED)
}
