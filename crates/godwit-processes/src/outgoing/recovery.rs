//! Recovery of moves that were under way when the node ended.

use std::sync::Arc;

use super::begin;
use super::preparing::reach::Reach;
use super::records::stored::Outgoing;
use crate::Processes;
use crate::host::address::OwnAddress;
use crate::host::criu;
use crate::incoming::{arrivals, rounds};
use crate::{folder, older_files};
use godwit_context::store::process_moves::Kind;

/// Takes up all stored moves away from here.
pub fn recover(processes: &Arc<Processes>) {
    rounds::forget_all(&processes.context.config.processes_dir());
    let stored = match processes
        .context
        .store
        .process_moves::<Outgoing>(Kind::Outgoing)
    {
        Ok(stored) => stored,
        Err(error) => {
            tracing::error!(%error, "no move of a process is taken up: their records cannot be listed");
            return;
        }
    };
    for (name, plan) in stored {
        if let Err(error) = older_files::none_is_left(&folder(processes, &name)) {
            tracing::error!(
                id = name,
                error,
                "a move is not taken up: a file of the last version is left"
            );
            continue;
        }
        match plan {
            Ok(plan) => take_up(processes, name, plan),
            Err(error) => tracing::error!(
                id = name,
                %error,
                "a move is not taken up: its process may be an image"
            ),
        }
    }
}

fn take_up(processes: &Arc<Processes>, name: String, mut plan: Outgoing) {
    let Some(id) = name.parse().ok().filter(|_| plan.id == name) else {
        tracing::error!(
            id = name,
            named = plan.id,
            "a move is not taken up: its record has another's name"
        );
        return;
    };
    if let Err(other) = processes.held.take_to_move(processes, &name, plan.pid) {
        tracing::error!(
            id = name,
            other,
            "a move that is taken up has lost its process to another"
        );
    }
    let processes = Arc::clone(processes);
    godwit_context::spawn(async move {
        while !criu::wait_for_others(&folder(&processes, &plan.id)).await {
            tracing::error!(
                id = name,
                "a CRIU works with the image of a process and does not end"
            );
        }
        let found = plan.subject().surely_found().await;
        let before = plan.pid;
        plan.pid = found.unwrap_or(before);
        processes.held.renumber(&processes, &name, before, plan.pid);
        let lives = found.is_some();
        if lives && let Some(own) = &plan.address {
            // The node may have ended between the restore and the end of the guard.
            OwnAddress::unguard(&arrivals::guard(&plan.id)).await;
            own.announce();
        }
        plan.moving.recover(lives);
        let reach = Reach::new(Arc::clone(&processes), id);
        if let Err(error) = begin(&processes, reach, plan, false) {
            tracing::error!(id = name, error = error.message, "a move was not taken up");
        }
    });
}
