//! Work that takes a while.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ErrorBody;

/// Which kind of copy a job makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobKind {
    /// A raw image becomes a disk.
    Import,
    /// A disk becomes a raw image.
    Export,
}

/// Whether a job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// It runs.
    Running,
    /// It is done.
    Done,
    /// It failed and left nothing behind; see the job's `error`.
    Failed,
}

/// An import or export, under way or ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Names it while the node runs.
    pub id: String,
    /// What it does.
    pub kind: JobKind,
    /// The disk.
    pub disk: String,
    /// The file outside.
    pub path: String,
    /// Whether it runs.
    pub state: JobState,
    /// Bytes to go over in all.
    pub bytes_total: u64,
    /// Bytes gone over.
    pub bytes_done: u64,
    /// Why it failed.
    pub error: Option<ErrorBody>,
}
