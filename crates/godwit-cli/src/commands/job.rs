//! Follows an import or export until its end.

use std::time::{Duration, Instant};

use godwit_api::{Job, JobKind, JobState};

use crate::client::Client;
use crate::commands::moves::follow::interrupts;
use crate::failure::{EXIT_INTERRUPTED, Failure};
use crate::routes;
use crate::show::output::Output;
use crate::show::progress::{ProgressLine, job_status};

const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Waits for the job, with its progress on standard error. Ctrl-C ends the wait with a message; the job goes on at the
/// node.
pub(crate) async fn wait(
    client: &mut Client,
    mut job: Job,
    output: Output,
) -> Result<Job, Failure> {
    let mut interrupts = interrupts()?;
    let mut line = ProgressLine::new(output);
    let started = Instant::now();
    while job.state == JobState::Running {
        line.show("copying", &job_status(&job, started.elapsed()));
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            _ = interrupts.recv() => {
                line.clear();
                return Err(left_alone(&job));
            }
        }
        job = client
            .get(&routes::job(&job.id))
            .await
            .inspect_err(|_| line.clear())?;
    }
    line.clear();
    match (job.state, job.error.take()) {
        (JobState::Failed, Some(error)) => Err(error.into()),
        (JobState::Failed, None) => {
            let message = format!("the copy of disk '{}' failed", job.disk);
            Err(Failure::new(message).hint("the node's log says why"))
        }
        _ => Ok(job),
    }
}

fn left_alone(job: &Job) -> Failure {
    let Job { disk, path, .. } = job;
    let (message, hint) = match job.kind {
        JobKind::Import => (
            format!("stopped following the import of disk '{disk}'; it goes on"),
            format!("see how it ends: godwit disk show {disk}"),
        ),
        JobKind::Export => (
            format!("stopped following the export of disk '{disk}' to {path}; it goes on"),
            String::from("the node's log tells how it ends"),
        ),
    };
    Failure::new(message).hint(hint).exit(EXIT_INTERRUPTED)
}
