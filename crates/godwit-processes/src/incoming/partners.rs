//! Processes of this host that hold requests back while a connected process moves. No partner holds for ever: partners
//! of a silent mover go on, and their requests to an absent process then fail.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_verbs::control::Request;
use godwit_verbs::mover::Claims;
use serde::{Deserialize, Serialize};

use crate::Processes;
use crate::ask;
use godwit_context::store::process_moves::Kind;

/// Longest hold of a partner without a word from the mover.
const LONGEST: Duration = Duration::from_secs(900);
/// Longest hold after the mover's connection has ended: the time that a node may take to restart.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time between two checks for overlong holds.
const LOOK: Duration = Duration::from_secs(1);
/// Most partners held at once.
const MAX_HELD: usize = 1024;

/// The durable record of a held partner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stored {
    /// The id of the move.
    id: String,
    /// The mover's node.
    peer: String,
    pid: u32,
    /// The moving process's number at the mover's node.
    #[serde(default)]
    moving: u32,
    /// The held queue pairs of the partner.
    numbers: Vec<u32>,
    /// True if the partner was asked to make replacements of the queue pairs.
    #[serde(default)]
    prepared: bool,
}

impl Stored {
    /// Returns the name of the record.
    fn name(&self) -> String {
        format!("{}-{}", self.id, self.pid)
    }

    /// Stores the record.
    ///
    /// # Errors
    /// One sentence.
    fn store(&self, processes: &Processes) -> Result<(), String> {
        let stored = processes
            .context
            .store
            .put_process_move(Kind::Held, &self.name(), self);
        stored.map_err(|error| error.to_string())
    }
}

/// The reason for a process not held for a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotHeld {
    /// Another move has the process for now: the move in words.
    Waits(String),
    /// The process cannot be held.
    Failed(String),
}

/// A moving process, as named to a waiting move.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mover<'a> {
    /// The id of the move.
    pub id: &'a str,
    /// The mover's node.
    pub peer: &'a str,
    /// The process's number at the node.
    pub pid: u32,
}

/// The held partners, and the moves' claims on processes of this host.
#[derive(Debug, Default)]
pub struct HeldPartners {
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

    /// Returns the move that holds the process as a partner, in words.
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

    /// Records that a process is held, before the hold begins.
    ///
    /// # Errors
    /// The process moves itself, or cannot be held: too many are held, or the record cannot be stored.
    pub(crate) fn hold(
        &self,
        processes: &Processes,
        mover: Mover<'_>,
        pid: u32,
        numbers: &[u32],
    ) -> Result<(), NotHeld> {
        let mut table = self.lock();
        if table.held.len() >= MAX_HELD {
            let text = format!("{MAX_HELD} processes are held for others already");
            return Err(NotHeld::Failed(text));
        }
        let waits = |_| NotHeld::Waits(in_words(pid, &processes.context.config.name));
        table.claims.to_hold(pid, mover.id).map_err(waits)?;
        let stored = Stored {
            id: mover.id.to_owned(),
            peer: mover.peer.to_owned(),
            pid,
            moving: mover.pid,
            numbers: numbers.to_vec(),
            prepared: false,
        };
        if let Err(error) = stored.store(processes) {
            table.claims.give_back(pid, mover.id);
            return Err(NotHeld::Failed(error));
        }
        table.hold(stored, Instant::now() + LONGEST);
        Ok(())
    }

    /// Records that a held process makes queue pairs ahead, before the process is asked.
    ///
    /// # Errors
    /// One sentence: the process is not held, or the record cannot be stored.
    pub(crate) fn prepares(&self, processes: &Processes, id: &str, pid: u32) -> Result<(), String> {
        let mut table = self.lock();
        let Some((stored, _)) = table.held.get_mut(&(id.to_owned(), pid)) else {
            return Err(format!("process {pid} is not held"));
        };
        stored.prepared = true;
        stored.store(processes)
    }

    /// Claims a process of this host for a move from here.
    ///
    /// # Errors
    /// The move that has the process, in words.
    pub(crate) fn take_to_move(
        &self,
        processes: &Processes,
        id: &str,
        pid: u32,
    ) -> Result<(), String> {
        let mut table = self.lock();
        let taken = table.claims.to_move(pid, id);
        taken.map_err(|_| {
            let other = table.holder(pid);
            other.unwrap_or_else(|| in_words(pid, &processes.context.config.name))
        })
    }

    /// Gives back a moving process: the move waits, or the process has another number.
    pub(crate) fn give_back_moved(&self, id: &str, pid: u32) {
        let mut table = self.lock();
        // The claim of a held partner ends with [`Self::let_go`].
        if !table.held.contains_key(&(id.to_owned(), pid)) {
            table.claims.give_back(pid, id);
        }
    }

    /// Moves the claim of a moving process to the new number.
    pub(crate) fn renumber(&self, processes: &Processes, id: &str, before: u32, now: u32) {
        if before == now {
            return;
        }
        if let Err(other) = self.take_to_move(processes, id, now) {
            tracing::error!(
                id,
                now,
                other,
                "a process under its new number is another move's"
            );
        }
        self.give_back_moved(id, before);
    }

    /// Gives back the process of an ended move from here, under any number.
    pub(crate) fn moved(&self, id: &str) {
        self.lock().claims.moved(id);
    }

    /// Returns the queue pairs of a process held for this move of this peer, and extends the hold.
    pub fn of(&self, id: &str, peer: &str, pid: u32) -> Option<Vec<u32>> {
        let mut table = self.lock();
        let (stored, until) = table.held.get_mut(&(id.to_owned(), pid))?;
        if stored.peer != peer {
            return None;
        }
        *until = Instant::now() + LONGEST;
        Some(stored.numbers.clone())
    }

    /// Returns a move that holds the process as a partner, in words.
    pub fn holder(&self, pid: u32) -> Option<String> {
        self.lock().holder(pid)
    }

    /// Ends the hold of a process. Has the process destroy unused queue pairs in the background.
    pub(crate) fn let_go(&self, processes: &Processes, id: &str, pid: u32) {
        let removed = {
            let mut table = self.lock();
            let Some((removed, _)) = table.held.remove(&(id.to_owned(), pid)) else {
                return;
            };
            table.claims.give_back(pid, id);
            removed
        };
        if let Err(error) = processes
            .context
            .store
            .remove_process_move(Kind::Held, &removed.name())
        {
            tracing::warn!(pid, %error, "cannot forget a process that is held no more");
        }
        if removed.prepared {
            godwit_context::spawn(tidy(pid, removed.numbers));
        }
    }

    /// Shortens the holds of a move whose connection has ended.
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

/// Has a process destroy unused queue pairs made ahead, and replaced ones.
async fn tidy(pid: u32, numbers: Vec<u32>) {
    let only = Some(numbers);
    for request in [Request::Abandon { only }, Request::Tidy] {
        if let Err(error) = ask(pid, request).await {
            tracing::warn!(pid, error, "queue pairs of no more use were not destroyed");
        }
    }
}

/// Lets partners of silent movers go on, until the node is closing.
pub async fn watch(processes: Arc<Processes>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = processes.context.closed() => return,
        }
        for Stored {
            id,
            peer,
            pid,
            numbers,
            ..
        } in processes.held.late(Instant::now())
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
            processes.held.let_go(&processes, &id, pid);
        }
    }
}

/// Takes up the holds that were under way when the node ended.
pub fn recover(processes: &Processes) {
    let until = Instant::now() + PATIENCE;
    let stored = match processes.context.store.process_moves::<Stored>(Kind::Held) {
        Ok(stored) => stored,
        Err(error) => {
            tracing::error!(%error, "processes that are held for moves are not known any more");
            return;
        }
    };
    for (name, stored) in stored {
        let stored = match stored {
            Ok(stored) => stored,
            Err(error) => {
                tracing::error!(name, %error, "a process that is held for a move is not known any more");
                continue;
            }
        };
        let mut table = processes.held.lock();
        // A held process does not move, so no other claim is in the way.
        let _held = table.claims.to_hold(stored.pid, &stored.id);
        table.hold(stored, until);
    }
}
