//! Recovery of moves that were under way when the node ended.

use std::sync::Arc;

use godwit_core::units::MigrationId;

use super::begin;
use super::preparing::reach::Reach;
use super::records::stored::Outgoing;
use crate::node::Node;
use crate::processes::host::address::OwnAddress;
use crate::processes::host::criu;
use crate::processes::incoming::{arrivals, rounds};
use crate::processes::{files_of_ours, folder};

/// Takes up all stored moves.
pub(crate) fn recover(node: &Arc<Node>) {
    rounds::forget_all(&node.config.processes_dir());
    let entries = std::fs::read_dir(node.config.processes_dir());
    if let Err(error) = &entries
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::error!(%error, "no move of a process is taken up: their records cannot be listed");
    }
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(id) = name.parse::<MigrationId>() else {
            continue;
        };
        let record = entry.path().join("outgoing.json");
        let mut plan: Outgoing = match files_of_ours::read(&record) {
            Ok(Some(plan)) => plan,
            Ok(None) => {
                // Without a readable answer the folder is left alone.
                if matches!(entry.path().join("lost.json").try_exists(), Ok(false)) {
                    arrivals::recover(node, &name);
                }
                continue;
            }
            Err(error) => {
                tracing::error!(
                    id = name,
                    error,
                    "a move is not taken up: its process may be an image; mend the file and start the node again"
                );
                continue;
            }
        };
        if plan.id != name {
            tracing::error!(
                id = name,
                named = plan.id,
                "a move is not taken up: its folder has another's name"
            );
            continue;
        }
        if let Err(other) = node.processes.held.take_to_move(node, &name, plan.pid) {
            tracing::error!(
                id = name,
                other,
                "a move that is taken up has lost its process to another"
            );
        }
        let node = Arc::clone(node);
        tokio::spawn(async move {
            while !criu::wait_for_others(&folder(&node, &plan.id)).await {
                tracing::error!(
                    id = name,
                    "a CRIU works with the image of a process and does not end"
                );
            }
            let found = plan.subject().surely_found().await;
            let before = plan.pid;
            plan.pid = found.unwrap_or(before);
            node.processes.held.renumber(&node, &name, before, plan.pid);
            let lives = found.is_some();
            if lives && let Some(own) = &plan.address {
                // The node may have ended between the restore and the end of the guard.
                OwnAddress::unguard(&arrivals::guard(&plan.id)).await;
                own.announce();
            }
            plan.moving.recover(lives);
            let reach = Reach::new(Arc::clone(&node), id);
            if let Err(error) = begin(&node, reach, plan, false) {
                tracing::error!(id = name, error = error.message, "a move was not taken up");
            }
        });
    }
}
