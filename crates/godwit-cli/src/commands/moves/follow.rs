//! Follows the migration of a disk or a VM until its end.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use crate::client::{CallError, Client};
use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::show::line::Line;
use crate::show::output::Output;
use crate::show::progress::{ProgressLine, Status};

/// Interval of requests to the node, unless the migration ends before.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);
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

/// A move to another node.
pub(crate) trait Moving: Serialize + DeserializeOwned {
    fn id(&self) -> &str;

    /// Returns the route of the move, which answers within [`POLL_INTERVAL`].
    fn path(&self) -> String;

    /// Returns the route that cancels the move.
    fn cancel_path(&self) -> String;

    /// Returns the name of the current phase.
    fn phase(&self) -> &'static str;

    fn ended(&self) -> bool;

    /// Returns the progress.
    fn status(&self) -> Status;

    /// Returns the warnings for the user.
    fn warnings(&self) -> &[String];

    /// Returns the failure of an ended move; `None` if the move succeeded.
    fn failure(&self, cancelled: bool) -> Option<Failure>;

    /// Returns a summary of a completed move in two lines.
    fn summary(&self) -> String;

    /// Returns a sentence about data still at the source after a completed move; `None` once the source is no longer
    /// needed.
    fn owed(&self) -> Option<String> {
        None
    }

    /// Returns the command that lists such moves.
    fn list_command() -> &'static str {
        "godwit migration list"
    }

    /// Returns the command that follows this move.
    fn watch_command(&self) -> String {
        format!("godwit migration watch {}", self.id())
    }
}

/// A move whose options can change while it runs.
pub(crate) trait Switching: Moving {
    /// Returns the route that takes the changes.
    fn switch_path(&self) -> String;
}

/// The outcome of following a move.
#[derive(Debug)]
pub(crate) struct Followed<M> {
    /// Last state of the migration.
    pub migration: M,
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
pub(crate) struct Begun<M> {
    migration: M,
    cancelled: bool,
}

/// Asks the node to begin a migration. The answer may have to wait for the other node. Ctrl-C during the wait cancels
/// the migration as soon as it has begun; a second Ctrl-C leaves the migration to the node.
pub(crate) async fn begin<M: Moving>(
    client: &mut Client,
    path: &str,
    request: &impl Serialize,
    interrupts: &mut Signal,
    output: Output,
) -> Result<Begun<M>, Failure> {
    let mut cancelled = false;
    let mut answer = std::pin::pin!(client.post::<M>(path, request));
    loop {
        tokio::select! {
            answer = &mut answer => {
                return Ok(Begun { migration: answer?, cancelled });
            }
            _ = interrupts.recv() => {
                if cancelled {
                    let message = "stopped waiting for the node; the migration may have begun";
                    let hint = format!("see whether it has: {}", M::list_command());
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
pub(crate) async fn see_off<M: Moving>(
    client: &mut Client,
    begun: Begun<M>,
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
        for warning in started.warnings() {
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
    match migration.failure(cancelled) {
        Some(failure) => Err(failure),
        None => output.print(&migration, told),
    }
}

/// Returns the summary of a completed move, with the data still at the source.
fn told<M: Moving>(migration: &M) -> String {
    let owed = migration.owed().map(|owed| format!("\n{owed}"));
    format!("{}{}", migration.summary(), owed.unwrap_or_default())
}

/// Works like [`see_off`], and then waits until the source is no longer needed, or until Ctrl-C.
pub(crate) async fn see_off_and_wait<M: Moving>(
    client: &mut Client,
    begun: Begun<M>,
    interrupts: Signal,
    output: Output,
) -> Result<(), Failure> {
    let cancelled = begun.cancelled;
    if cancelled {
        ask_to_cancel(client, &begun.migration, &ProgressLine::new(output)).await;
    }
    let how = OnInterrupt::Cancel { cancelled };
    let followed = follow(client, begun.migration, interrupts, how, output, false).await?;
    if let Some(failure) = followed.migration.failure(followed.cancelled) {
        return Err(failure);
    }
    let migration = until_paid(client, followed.migration, output).await?;
    output.print(&migration, M::summary)
}

async fn until_paid<M: Moving>(
    client: &mut Client,
    mut migration: M,
    output: Output,
) -> Result<M, Failure> {
    let mut line = ProgressLine::new(output);
    let mut interrupts = interrupts()?;
    let mut answered = Instant::now();
    while let Some(owed) = migration.owed() {
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
        if let Some(seen) = look(client, &migration.path(), answered, &mut line).await? {
            migration = seen;
            answered = Instant::now();
        }
    }
    line.clear();
    Ok(migration)
}

/// Follows a migration until its end or Ctrl-C, with progress and warnings on standard error. With `lines`, also prints
/// the migration as JSON on standard output: once a second, in every new phase, and at the end.
pub(crate) async fn follow<M: Moving>(
    client: &mut Client,
    mut migration: M,
    mut interrupts: Signal,
    on_interrupt: OnInterrupt,
    output: Output,
    lines: bool,
) -> Result<Followed<M>, Failure> {
    let mut line = ProgressLine::new(output);
    let mut cancelled = on_interrupt == OnInterrupt::Cancel { cancelled: true };
    let mut answered = Instant::now();
    let mut heard = true;
    let mut printed: Option<(Instant, &str)> = None;
    let mut told = 0;
    let mut next = Instant::now();
    loop {
        let phase = migration.phase();
        let due = printed.is_none_or(|(at, last)| last != phase || at.elapsed() >= JSON_INTERVAL);
        if lines && due {
            output.print_json_line(&migration)?;
            printed = Some((Instant::now(), phase));
        }
        for warning in migration.warnings().iter().skip(told) {
            line.say(&warned(warning));
        }
        told = told.max(migration.warnings().len());
        if migration.ended() {
            line.clear();
            return Ok(Followed {
                migration,
                cancelled,
            });
        }
        // The state from before the node fell silent is not shown again.
        if heard {
            line.show(phase, &migration.status());
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
        let seen = look(client, &migration.path(), answered, &mut line).await?;
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
async fn look<M: Moving>(
    client: &mut Client,
    path: &str,
    answered: Instant,
    line: &mut ProgressLine,
) -> Result<Option<M>, Failure> {
    match client.get(path).await {
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

async fn ask_to_cancel<M: Moving>(client: &mut Client, migration: &M, line: &ProgressLine) {
    let path = migration.cancel_path();
    // In any case, following goes on and shows the end of the migration.
    if let Err(error) = client.post::<M>(&path, &serde_json::json!({})).await {
        let why = Failure::from(error).message;
        line.say(&format!("it was not cancelled: {why}"));
    }
}

fn detached<M: Moving>(migration: &M) -> Failure {
    Failure::new(format!(
        "stopped following migration {}; it goes on",
        migration.id()
    ))
    .hint(format!("see how it ends: {}", migration.watch_command()))
    .exit(EXIT_INTERRUPTED)
}
