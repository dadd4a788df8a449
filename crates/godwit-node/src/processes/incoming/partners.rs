//! Processes of this host that hold requests back while a process that they are connected to moves. Nobody holds them for
//! ever: when the mover is silent they go on, and what they then ask of a process that is not there fails.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_verbs::control::Request;
use godwit_verbs::mover::Claims;
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
    /// The process that moves, at that node.
    #[serde(default)]
    moving: u32,
    /// Its queue pairs that are held.
    numbers: Vec<u32>,
    /// Whether it was asked to make queue pairs that will take the place of those.
    #[serde(default)]
    prepared: bool,
}

/// Why a process is not held for a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotHeld {
    /// It is another move's for now: which.
    Waits(String),
    /// It cannot be.
    Failed(String),
}

/// A process that moves, as whoever waits for it is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mover<'a> {
    /// The move.
    pub(crate) id: &'a str,
    /// Its node.
    pub(crate) peer: &'a str,
    /// Its number there.
    pub(crate) pid: u32,
}

/// The partners that are held, and which moves have which processes of this host.
#[derive(Debug, Default)]
pub(crate) struct HeldPartners {
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    held: BTreeMap<(String, u32), (Stored, Instant)>,
    claims: Claims,
}

impl Table {
    fn hold(&mut self, stored: Stored, until: Instant) {
        let key = (stored.id.clone(), stored.pid);
        self.held.insert(key, (stored, until));
    }

    /// The move that holds the process as a partner, in words.
    fn holder(&self, pid: u32) -> Option<String> {
        let id = self.claims.holder(pid)?;
        let (stored, _) = self.held.get(&(id.to_owned(), pid))?;
        Some(in_words(stored.moving, &stored.peer))
    }
}

fn in_words(pid: u32, node: &str) -> String {
    format!("the move of process {pid} of node '{node}'")
}

impl HeldPartners {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the process is held, before it is.
    ///
    /// # Errors
    /// It is moved itself, or cannot be held: too many are, or it cannot be stored.
    pub(crate) fn hold(
        &self,
        node: &Node,
        mover: Mover<'_>,
        pid: u32,
        numbers: &[u32],
    ) -> Result<(), NotHeld> {
        let mut table = self.lock();
        if table.held.len() >= MAX_HELD {
            let text = format!("{MAX_HELD} processes are held for others already");
            return Err(NotHeld::Failed(text));
        }
        let waits = |_| NotHeld::Waits(in_words(pid, &node.config.name));
        table.claims.to_hold(pid, mover.id).map_err(waits)?;
        let stored = Stored {
            id: mover.id.to_owned(),
            peer: mover.peer.to_owned(),
            pid,
            moving: mover.pid,
            numbers: numbers.to_vec(),
            prepared: false,
        };
        let path = path(node, mover.id, pid);
        if let Err(error) = crate::processes::files_of_ours::write(&path, &stored) {
            table.claims.give_back(pid, mover.id);
            return Err(NotHeld::Failed(error));
        }
        table.hold(stored, Instant::now() + LONGEST);
        Ok(())
    }

    /// Notes that a process that is held is asked to make queue pairs ahead, before it is.
    ///
    /// # Errors
    /// One sentence: it cannot be stored.
    pub(crate) fn prepares(&self, node: &Node, id: &str, pid: u32) -> Result<(), String> {
        let mut table = self.lock();
        let Some((stored, _)) = table.held.get_mut(&(id.to_owned(), pid)) else {
            return Err(format!("process {pid} is not held"));
        };
        stored.prepared = true;
        crate::processes::files_of_ours::write(&path(node, id, pid), stored)
    }

    /// Has the process of this host for a move of its own.
    ///
    /// # Errors
    /// Which move has it, in words.
    pub(crate) fn take_to_move(&self, node: &Node, id: &str, pid: u32) -> Result<(), String> {
        let mut table = self.lock();
        let taken = table.claims.to_move(pid, id);
        taken.map_err(|_| {
            let other = table.holder(pid);
            other.unwrap_or_else(|| in_words(pid, &node.config.name))
        })
    }

    /// The move of the process waits, or its process has another number.
    pub(crate) fn give_back_moved(&self, id: &str, pid: u32) {
        let mut table = self.lock();
        // What is held as a partner is let go otherwise.
        if !table.held.contains_key(&(id.to_owned(), pid)) {
            table.claims.give_back(pid, id);
        }
    }

    /// The process that a move of this node's has got another number.
    pub(crate) fn renumber(&self, node: &Node, id: &str, before: u32, now: u32) {
        if before == now {
            return;
        }
        if let Err(other) = self.take_to_move(node, id, now) {
            tracing::error!(
                id,
                now,
                other,
                "a process under its new number is another move's"
            );
        }
        self.give_back_moved(id, before);
    }

    /// A move of this node's has ended, whatever number its process has now.
    pub(crate) fn moved(&self, id: &str) {
        self.lock().claims.moved(id);
    }

    /// The queue pairs of the process that are held for this move of this node's; it is heard of, so it is held on.
    pub(crate) fn of(&self, id: &str, peer: &str, pid: u32) -> Option<Vec<u32>> {
        let mut table = self.lock();
        let (stored, until) = table.held.get_mut(&(id.to_owned(), pid))?;
        if stored.peer != peer {
            return None;
        }
        *until = Instant::now() + LONGEST;
        Some(stored.numbers.clone())
    }

    /// A move that holds the process as a partner, in words.
    pub(crate) fn holder(&self, pid: u32) -> Option<String> {
        self.lock().holder(pid)
    }

    /// The process is held no more. What it made ahead goes as well, while it works.
    pub(crate) fn let_go(&self, node: &Node, id: &str, pid: u32) {
        let removed = {
            let mut table = self.lock();
            let Some((removed, _)) = table.held.remove(&(id.to_owned(), pid)) else {
                return;
            };
            table.claims.give_back(pid, id);
            removed
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
        for (stored, until) in self.lock().held.values_mut() {
            if stored.id == id && stored.peer == peer {
                *until = (*until).min(soon);
            }
        }
    }

    fn late(&self, now: Instant) -> Vec<Stored> {
        let table = self.lock();
        let late = table.held.values().filter(|(_, until)| *until <= now);
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
            let mut table = node.processes.held.lock();
            // Whoever holds a process does not move it, so nobody has a claim that is in the way.
            let _held = table.claims.to_hold(stored.pid, &stored.id);
            table.hold(stored, until);
        }
    }
}
