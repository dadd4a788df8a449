//! Imports and exports as jobs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;

/// The kind of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// A raw image is copied into a disk.
    Import,
    /// A disk is copied into a raw image.
    Export,
}

/// The state of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// The job is running.
    Running,
    /// The job has succeeded.
    Done,
    /// The job failed and left nothing behind; see the job's `error`.
    Failed,
}

/// An import or export, under way or ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Id of the job, unique while the node runs.
    pub id: String,
    /// Kind of the job.
    pub kind: JobKind,
    /// Name of the disk.
    pub disk: String,
    /// Path of the raw image.
    pub path: String,
    /// State of the job.
    pub state: JobState,
    /// Total bytes to process.
    pub bytes_total: u64,
    /// Bytes processed.
    pub bytes_done: u64,
    /// The error of a failed job.
    pub error: Option<ErrorBody>,
}
