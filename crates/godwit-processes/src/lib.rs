//! Processes with RDMA connections: their view, and moves of them between nodes.
//!
//! `godwit_move` sets the order of a move's steps. `outgoing/` takes the steps at the source, `incoming/` answers other
//! nodes. `images.rs` transfers a process as CRIU's files. `host/` acts on the host: CRIU, addresses,
//! connections, files.

mod durable;
pub mod host;
pub mod images;
pub mod incoming;
pub mod messages;
mod older_files;
pub mod outgoing;
pub mod view;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_core::units::MigrationId;
use godwit_verbs::control::{self, Answer, Request, Status};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::Context;
use godwit_context::blocking;
use godwit_context::store::process_moves::Kind;

/// Most connections of other nodes about processes at once.
const MAX_SESSIONS: usize = 16;

/// Longest round of requests to all processes of the host.
const ROUND: Duration = Duration::from_secs(10);
/// Most processes asked at once.
const ASKED_AT_ONCE: usize = 32;

/// The node's knowledge of processes.
#[derive(Debug)]
pub struct Processes {
    /// Configuration, store and connections of the node.
    pub context: Arc<Context>,
    /// Moves of processes away from here.
    pub moves: outgoing::records::table::ProcessMigrations,
    /// Processes held still for the moves of their partners.
    pub held: incoming::partners::HeldPartners,
    pub(crate) sessions: Arc<Semaphore>,
    /// Serializes restores and dumps, since they change the host.
    pub(crate) arrivals: incoming::arrivals::Arrivals,
}

impl Processes {
    /// Creates the empty knowledge of a node that starts.
    pub fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            moves: Default::default(),
            held: Default::default(),
            sessions: Arc::new(Semaphore::new(MAX_SESSIONS)),
            arrivals: Default::default(),
        }
    }
}

/// Refuses work on processes unless the node is configured for moves of processes.
///
/// # Errors
/// [`ErrorCode::Conflict`].
pub(crate) fn check_enabled(processes: &Processes) -> Result<(), ErrorBody> {
    if processes.context.config.processes.is_some() {
        return Ok(());
    }
    let text = format!(
        "node '{}' does not move processes",
        processes.context.config.name
    );
    Err(ErrorBody::new(ErrorCode::Conflict, text).hint("start it with --processes, as root"))
}

/// Returns the folder of a move's files.
pub fn folder(processes: &Processes, id: &str) -> PathBuf {
    processes.context.config.processes_dir().join(id)
}

/// The reason for an unfulfilled request to a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotDone {
    /// The process refuses.
    Refused(String),
    /// The process does not answer, and may fulfil the request nevertheless.
    Silent(String),
}

impl NotDone {
    pub(crate) fn into_text(self) -> String {
        match self {
            Self::Refused(text) | Self::Silent(text) => text,
        }
    }
}

/// Sends a request to a process of this host.
///
/// # Errors
/// One sentence: the process does not answer, or refuses.
pub(crate) async fn ask(pid: u32, request: Request) -> Result<Answer, String> {
    hear(pid, request).await.map_err(NotDone::into_text)
}

/// Sends a request to a process of this host, and distinguishes silence from a refusal.
///
/// # Errors
/// One sentence.
pub(crate) async fn hear(pid: u32, request: Request) -> Result<Answer, NotDone> {
    match blocking(move || control::ask(pid, &request)).await {
        Ok(Ok(Answer::Error(error))) => Err(NotDone::Refused(format!("process {pid}: {error}"))),
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(NotDone::Silent(error.to_string())),
        Err(error) => Err(NotDone::Silent(error.message)),
    }
}

/// Returns the RDMA status of a process of this host.
///
/// # Errors
/// The errors of [`ask`].
pub async fn status(pid: u32) -> Result<Status, String> {
    match ask(pid, Request::Status).await? {
        Answer::Status(status) => Ok(status),
        _ => Err(format!("process {pid} gave an answer to another question")),
    }
}

/// Returns the statuses of these processes, except for processes without an answer in time.
pub(crate) async fn statuses(pids: Vec<u32>) -> Vec<(u32, Status)> {
    let answers = ask_all(pids, Request::Status).await.into_iter();
    let status = |(pid, answer)| match answer {
        Ok(Answer::Status(status)) => Some((pid, status)),
        // A process that has just ended, or a foreign socket of this name, has no status.
        _ => None,
    };
    answers.filter_map(status).collect()
}

/// Returns the answers of these processes. A silent process does not delay the others.
pub(crate) async fn ask_all(
    pids: Vec<u32>,
    request: Request,
) -> Vec<(u32, Result<Answer, String>)> {
    let until = Instant::now() + ROUND;
    let turns = Arc::new(Semaphore::new(ASKED_AT_ONCE));
    let mut asked = JoinSet::new();
    for pid in pids {
        let (turns, request) = (Arc::clone(&turns), request.clone());
        asked.spawn(async move {
            let _turn = turns.acquire_owned().await.ok()?;
            let left = until.saturating_duration_since(Instant::now());
            let answer = blocking(move || control::ask_within(pid, &request, left)).await;
            let answer = match answer {
                Ok(Ok(Answer::Error(error))) => Err(format!("process {pid}: {error}")),
                Ok(Ok(answer)) => Ok(answer),
                Ok(Err(error)) => Err(error.to_string()),
                Err(error) => Err(error.message),
            };
            Some((pid, answer))
        });
    }
    let mut found: Vec<_> = asked.join_all().await.into_iter().flatten().collect();
    found.sort_unstable_by_key(|(pid, _)| *pid);
    found
}

/// Takes up the work that was under way when the node ended.
pub fn recover(processes: &Arc<Processes>) {
    if processes.context.config.processes.is_none() {
        return;
    }
    older_files::take_over(processes);
    incoming::partners::recover(processes);
    outgoing::recover(processes);
    incoming::arrivals::recover(processes);
    forget_the_unknown(processes);
}

/// Returns true if the move has a record, or is not known to have none.
fn may_be_known(processes: &Processes, id: &str) -> bool {
    let has_none = |kind| {
        let record = processes
            .context
            .store
            .process_move::<serde_json::Value>(kind, id);
        matches!(record, Ok(None))
    };
    let stored = !has_none(Kind::Outgoing) || !has_none(Kind::Arrival);
    stored || older_files::none_is_left(&folder(processes, id)).is_err()
}

/// Removes the folders of moves without a record, such as of an image that had not come whole.
fn forget_the_unknown(processes: &Processes) {
    let entries = std::fs::read_dir(processes.context.config.processes_dir());
    for entry in entries.into_iter().flatten().flatten() {
        let (name, place) = (entry.file_name(), entry.path());
        let name = name.to_string_lossy();
        if name.parse::<MigrationId>().is_err() || may_be_known(processes, &name) {
            continue;
        }
        // The image of a lost process is for people. Without a readable answer the folder is left alone.
        if matches!(place.join("lost.json").try_exists(), Ok(false))
            && let Err(error) = remove(&place)
        {
            tracing::warn!(place = %place.display(), %error, "cannot remove what is left of a move");
        }
    }
}

/// Removes a folder with all that is in it, if there is one.
fn remove(place: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
