//! Follows a migration until it ends, be it a disk's or a virtual machine's.

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

/// How often the node is asked, unless the migration ends before.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How often the node is asked whether another is still needed.
const WAIT_INTERVAL: Duration = Duration::from_millis(500);
/// How often a migration is printed as a line of JSON.
const JSON_INTERVAL: Duration = Duration::from_secs(1);
/// How long a node that does not answer is asked again: it may be restarting.
const PATIENCE: Duration = Duration::from_secs(30);

/// What the first Ctrl-C answers.
const CANCELLING: &str = "cancelling; press Ctrl-C again to leave the migration to the node";

/// What Ctrl-C means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnInterrupt {
    /// The first asks the node to cancel, the second stops following.
    Cancel {
        /// Whether the first has come already.
        cancelled: bool,
    },
    /// Stops following.
    Detach,
}

/// Something that moves to another node.
pub(crate) trait Moving: Serialize + DeserializeOwned {
    fn id(&self) -> &str;

    /// Where the node shows it, and answers within [`POLL_INTERVAL`].
    fn path(&self) -> String;

    /// Where the node cancels it.
    fn cancel_path(&self) -> String;

    /// What it does now.
    fn phase(&self) -> &'static str;

    fn ended(&self) -> bool;

    /// How far it is.
    fn status(&self) -> Status;

    /// What the user should know.
    fn warnings(&self) -> &[String];

    /// Why one that has ended did not move anything; `None` when it did.
    fn failure(&self, cancelled: bool) -> Option<Failure>;

    /// What a completed one did, in two lines.
    fn summary(&self) -> String;

    /// What of a completed one is still at the node that was left, in a sentence; nothing when that is needed no more.
    fn owed(&self) -> Option<String> {
        None
    }

    /// The command that lists such moves.
    fn list_command() -> &'static str {
        "godwit migration list"
    }

    /// The command that follows it.
    fn watch_command(&self) -> String {
        format!("godwit migration watch {}", self.id())
    }
}

/// A move that can go on otherwise while it runs.
pub(crate) trait Switching: Moving {
    /// Where the node takes what is to be different.
    fn switch_path(&self) -> String;
}

/// How following ended.
#[derive(Debug)]
pub(crate) struct Followed<M> {
    /// The migration as it was last seen.
    pub migration: M,
    /// Whether cancelling was asked for here.
    pub cancelled: bool,
}

/// Ctrl-C, from the moment this is made.
pub(crate) fn interrupts() -> Result<Signal, Failure> {
    signal(SignalKind::interrupt())
        .map_err(|error| Failure::caused("cannot listen for Ctrl-C", &error))
}

/// What a node has begun, and whether Ctrl-C asked meanwhile to cancel it.
#[derive(Debug)]
pub(crate) struct Begun<M> {
    migration: M,
    cancelled: bool,
}

/// Asks the node to begin a migration, which may take until it has heard from the other node. After
/// Ctrl-C it is cancelled as soon as it has begun; a second one leaves it to the node.
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

/// Shows what the node says that it has started: its id when it is left alone, or its progress to the
/// end and what came of it.
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

/// What a completed one did, and what is owed.
fn told<M: Moving>(migration: &M) -> String {
    let owed = migration.owed().map(|owed| format!("\n{owed}"));
    format!("{}{}", migration.summary(), owed.unwrap_or_default())
}

/// As [`see_off`], and then waits until the node that was left is needed no more, or until Ctrl-C.
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

/// Follows a migration with its progress and warnings on standard error until it ends, or until
/// Ctrl-C says otherwise. With `lines`, also prints it as JSON on standard output once a second, in
/// every new phase, and at its end.
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
        // What was seen before the node fell silent is not shown again.
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
        // A node that waits for the end answers after this.
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

/// Asks for something that is followed; nothing while the node does not answer, as long as it may be
/// restarting.
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
    // Whatever the answer, following goes on and shows how the migration ends.
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
