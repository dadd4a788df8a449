//! Processes of this host that hold requests back while a process that they are connected to moves. Nobody holds them for
//! ever: when the mover is silent they go on, and what they then ask of a process that is not there fails.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_verbs::control::Request;
use serde::{Deserialize, Serialize};

use crate::node::Node;
use crate::processes::ask;

/// How long a partner holds at most while its mover is connected.
const LONGEST: Duration = Duration::from_secs(900);
/// How long it holds when the mover's connection has ended: as long as a node may take to start again.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often it is looked who has held for too long.
const LOOK: Duration = Duration::from_secs(1);
/// Most partners that are held at once.
const MAX_HELD: usize = 1024;

/// A partner that is held, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    /// The move.
    id: String,
    /// The node of the mover.
    peer: String,
    pid: u32,
    /// Its queue pairs that are held.
    numbers: Vec<u32>,
    /// Whether it was asked to make queue pairs that will take the place of those.
    #[serde(default)]
    prepared: bool,
}

/// The partners that are held.
#[derive(Debug, Default)]
pub(crate) struct HeldPartners {
    held: Mutex<BTreeMap<(String, u32), (Stored, Instant)>>,
}

impl HeldPartners {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(String, u32), (Stored, Instant)>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the process is held, before it is; `prepared`: and is asked to make queue pairs ahead.
    ///
    /// # Errors
    /// One sentence: too many are, or it cannot be stored.
    pub(crate) fn hold(
        &self,
        node: &Node,
        id: &str,
        peer: &str,
        pid: u32,
        numbers: &[u32],
        prepared: bool,
    ) -> Result<(), String> {
        let mut held = self.lock();
        if held.len() >= MAX_HELD {
            return Err(format!("{MAX_HELD} processes are held for others already"));
        }
        let stored = Stored {
            id: id.to_owned(),
            peer: peer.to_owned(),
            pid,
            numbers: numbers.to_vec(),
            prepared,
        };
        crate::processes::files_of_ours::write(&path(node, id, pid), &stored)?;
        held.insert((id.to_owned(), pid), (stored, Instant::now() + LONGEST));
        Ok(())
    }

    /// The queue pairs of the process that are held for this move of this node's; it is heard of, so it is held on.
    pub(crate) fn of(&self, id: &str, peer: &str, pid: u32) -> Option<Vec<u32>> {
        let mut held = self.lock();
        let (stored, until) = held.get_mut(&(id.to_owned(), pid))?;
        if stored.peer != peer {
            return None;
        }
        *until = Instant::now() + LONGEST;
        Some(stored.numbers.clone())
    }

    /// Whether the process is held for any move.
    pub(crate) fn holds(&self, pid: u32) -> bool {
        self.lock().keys().any(|(_, held)| *held == pid)
    }

    /// The process is held no more. What it made ahead goes as well, while it works.
    pub(crate) fn let_go(&self, node: &Node, id: &str, pid: u32) {
        let Some((removed, _)) = self.lock().remove(&(id.to_owned(), pid)) else {
            return;
        };
        if let Err(error) = std::fs::remove_file(path(node, id, pid)) {
            tracing::warn!(pid, %error, "cannot forget a process that is held no more");
        }
        if removed.prepared {
            tokio::spawn(tidy(pid, removed.numbers));
        }
    }

    /// A connection about the move has ended.
    pub(crate) fn left_alone(&self, id: &str, peer: &str) {
        let soon = Instant::now() + PATIENCE;
        for (stored, until) in self.lock().values_mut() {
            if stored.id == id && stored.peer == peer {
                *until = (*until).min(soon);
            }
        }
    }

    fn late(&self, now: Instant) -> Vec<Stored> {
        let held = self.lock();
        let late = held.values().filter(|(_, until)| *until <= now);
        late.map(|(stored, _)| stored.clone()).collect()
    }
}

fn path(node: &Node, id: &str, pid: u32) -> PathBuf {
    node.config
        .processes_dir()
        .join(format!("held-{id}-{pid}.json"))
}

/// Has a process destroy what it made ahead and did not use, and what was replaced by what it did use.
async fn tidy(pid: u32, numbers: Vec<u32>) {
    let only = Some(numbers);
    for request in [Request::Abandon { only }, Request::Tidy] {
        if let Err(error) = ask(pid, request).await {
            tracing::warn!(pid, error, "queue pairs of no more use were not destroyed");
        }
    }
}

/// Lets partners go on whose mover is silent, until the node is about to end.
pub(crate) async fn watch(node: Arc<Node>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = node.closed() => return,
        }
        for Stored {
            id,
            peer,
            pid,
            numbers,
            ..
        } in node.processes.held.late(Instant::now())
        {
            tracing::warn!(
                pid,
                peer,
                "the process goes on: nothing was heard of the move of a process that it is connected to"
            );
            if let Err(error) = ask(
                pid,
                Request::Resume {
                    only: Some(numbers),
                },
            )
            .await
            {
                tracing::warn!(pid, error, "the process did not go on");
            }
            node.processes.held.let_go(&node, &id, pid);
        }
    }
}

/// Takes up what was held when the node ended.
pub(crate) fn recover(node: &Node) {
    let until = Instant::now() + PATIENCE;
    let entries = std::fs::read_dir(node.config.processes_dir());
    for entry in entries.into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("held-")
            && let Ok(Some(stored)) = crate::processes::files_of_ours::read::<Stored>(&entry.path())
        {
            let key = (stored.id.clone(), stored.pid);
            node.processes.held.lock().insert(key, (stored, until));
        }
    }
}
