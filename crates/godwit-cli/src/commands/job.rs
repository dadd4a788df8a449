//! Follows an import or export until it ends.

use std::time::{Duration, Instant};

use godwit_node::api::{Job, JobState};

use crate::client::Client;
use crate::failure::Failure;
use crate::progress::{ProgressLine, job_status};
use crate::routes;

const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Waits for the job, with its progress on standard error. When the command ends early the job
/// goes on at the node.
pub(crate) async fn wait(client: &mut Client, mut job: Job) -> Result<Job, Failure> {
    let mut line = ProgressLine::new();
    let started = Instant::now();
    while job.state == JobState::Running {
        line.show("copying", &job_status(&job, started.elapsed()));
        tokio::time::sleep(POLL_INTERVAL).await;
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
