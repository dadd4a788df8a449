//! Recovers the state in the store after an orderly end, a crash or a power failure alike.

use std::sync::Arc;

use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{DiskId, MigrationId};

use crate::node::Node;
use godwit_api::VmMigration;
use godwit_context::blocking;
use godwit_context::ids::random_id;
use godwit_context::node_error::NodeError;
use godwit_context::store::history::History;
use godwit_context::store::{DiskEntry, Mark};
use godwit_disks::disks::disk::{Activity, Disk};
use godwit_disks::disks::lifecycle::run;
use godwit_disks::disks::storage::image;
use godwit_disks::disks::vhost;
use godwit_machines::protect;
use godwit_machines::vms::outgoing::table;

/// The recovery of a stored disk.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    /// The unfinished step left nothing worth keeping.
    Remove,
    /// The disk is kept, with this activity.
    Keep(Activity),
}

/// Loads the store and starts the disks.
pub(crate) async fn recover(node: &Arc<Node>) -> Result<(), NodeError> {
    let store = node.context.store.clone();
    let contents = blocking(move || store.load())
        .await
        .map_err(|error| NodeError::Store(error.message))?
        .map_err(|error| NodeError::Store(error.to_string()))?;
    let mut undecided = Vec::new();
    for (name, entry, record) in contents.disks {
        match plan(&entry, &record) {
            Plan::Remove => remove(node, &name, entry).await,
            Plan::Keep(activity) => {
                let entry = identified(node, &name, entry, &record).await?;
                undecided.extend(activity.migration());
                let disk = Disk::new(name, entry, record, activity);
                node.disks
                    .insert(&disk)
                    .map_err(|error| NodeError::Store(error.message))?;
            }
        }
    }
    let open = |id: MigrationId| undecided.contains(&id);
    store_ended(node, node.migrations.restore(contents.migrations, open)).await?;
    let course = |view: &VmMigration| {
        let mut vms = contents.vms.iter();
        let (_, entry) = vms.find(|(name, _)| *name == view.vm)?;
        Some(table::course(entry, &view.id, true))
    };
    let ended = node.vms.migrations.restore(contents.vm_migrations, course);
    store_ended(node, ended).await?;
    let held = godwit_machines::vms::lifecycle::recover::hold_disks(&node.vms, &contents.vms);
    godwit_machines::vms::memory::relocated::restore(&node.vms, &contents.vms).await;
    protect::hold_disks(&node.vms, &contents.protections, &contents.vms);
    for disk in node.disks.all() {
        run::open_and_start(&node.disks, &disk).await;
    }
    godwit_machines::vms::lifecycle::recover::recover(&node.vms, contents.vms, held).await;
    protect::recover(&node.vms, contents.protections);
    godwit_machines::nics::named::recover(&node.nics, contents.nics).await;
    godwit_context::spawn(godwit_machines::nics::follow::follow(Arc::clone(
        &node.nics,
    )));
    Ok(())
}

/// Stores moves that ended with the node.
async fn store_ended<V: History>(node: &Node, ended: Vec<(u64, V)>) -> Result<(), NodeError> {
    for (number, view) in ended {
        let stored = node.context.store.put_move(number, &view).await;
        stored.map_err(|error| NodeError::Store(error.to_string()))?;
    }
    Ok(())
}

/// Gives a disk of an earlier version an id, if this node owns the disk.
async fn identified(
    node: &Arc<Node>,
    name: &str,
    mut entry: DiskEntry,
    record: &AuthorityRecord,
) -> Result<DiskEntry, NodeError> {
    if entry.id.is_some() || record.ownership != Ownership::Serving {
        return Ok(entry);
    }
    let id = random_id().map_err(|error| NodeError::Store(error.message))?;
    entry.id = Some(DiskId(id));
    let stored = node.context.store.put_disk(name, &entry, *record).await;
    stored.map_err(|error| NodeError::Store(error.to_string()))?;
    Ok(entry)
}

fn plan(entry: &DiskEntry, record: &AuthorityRecord) -> Plan {
    match (&entry.mark, record.ownership) {
        (Some(Mark::Creating | Mark::Removing), _)
        | (Some(Mark::Receiving { new: true, .. }), Ownership::Vacant) => Plan::Remove,
        (_, Ownership::Accepted { migration }) => Plan::Keep(Activity::Incoming(migration)),
        (_, Ownership::Relinquished { migration }) => Plan::Keep(Activity::Outgoing(migration)),
        _ => Plan::Keep(Activity::Idle),
    }
}

/// Removes the rest of a disk. A failed removal is repeated at the next start.
async fn remove(node: &Arc<Node>, name: &str, entry: DiskEntry) {
    tracing::info!(disk = name, mark = ?entry.mark, "removing what an unfinished step left");
    if entry.managed {
        let path = entry.path.clone();
        let deleted = blocking(move || image::delete(&path)).await;
        if let Ok(Err(error)) = deleted {
            tracing::error!(
                disk = name, path = %entry.path.display(), %error,
                "cannot delete an unfinished image"
            );
            return;
        }
    }
    // If the socket stays, the next disk of this name replaces the socket.
    let _ = vhost::remove(&node.context.config.vhost_socket(name));
    if let Err(error) = node.context.store.remove_disk(name).await {
        tracing::error!(disk = name, %error, "cannot forget an unfinished disk");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_core::units::{Epoch, Sectors};

    fn entry(mark: Option<Mark>) -> DiskEntry {
        DiskEntry {
            managed: true,
            counterpart: Some(String::from("a")),
            mark,
            ..DiskEntry::new(DiskId([4; 16]), "/nowhere".into(), Sectors(8))
        }
    }

    fn record(ownership: Ownership) -> AuthorityRecord {
        AuthorityRecord {
            epoch: Epoch(3),
            ownership,
            remainder: None,
        }
    }

    #[test]
    fn only_what_cannot_be_the_disk_is_removed() {
        let migration = MigrationId([5; 16]);
        let receiving = || {
            Some(Mark::Receiving {
                migration: migration.to_string(),
                new: true,
            })
        };
        let accepted = Ownership::Accepted { migration };
        let relinquished = Ownership::Relinquished { migration };
        let departed = Ownership::Departed { migration };
        let idle = Plan::Keep(Activity::Idle);
        for (mark, ownership, expected) in [
            (Some(Mark::Creating), Ownership::Serving, Plan::Remove),
            (Some(Mark::Removing), departed, Plan::Remove),
            (receiving(), Ownership::Vacant, Plan::Remove),
            (
                receiving(),
                accepted,
                Plan::Keep(Activity::Incoming(migration)),
            ),
            (receiving(), Ownership::Serving, Plan::Keep(Activity::Idle)),
            (None, accepted, Plan::Keep(Activity::Incoming(migration))),
            (
                None,
                relinquished,
                Plan::Keep(Activity::Outgoing(migration)),
            ),
            (None, departed, Plan::Keep(Activity::Idle)),
            (None, Ownership::Vacant, Plan::Keep(Activity::Idle)),
            (None, Ownership::Serving, idle),
        ] {
            assert_eq!(
                plan(&entry(mark.clone()), &record(ownership)),
                expected,
                "{mark:?}"
            );
        }
    }
}
