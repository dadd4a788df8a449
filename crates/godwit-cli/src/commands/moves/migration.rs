//! The command `godwit migration`.

use godwit_api::{
    DeltaBy, ErrorCode, Migration, MigrationDelta, MigrationPhase, Policy, SwitchMigration,
    VmMigration,
};
use serde::Serialize;
use tokio::signal::unix::Signal;

use crate::arguments::MigrationCommand;
use crate::client::{CallError, Client};
use crate::commands::moves::follow::{Moving, OnInterrupt, Switching, follow, interrupts};
use crate::failure::Failure;
use crate::routes;
use crate::show::output::{Output, facts, table};
use crate::show::progress::migration_status;
use crate::show::promise::{delayed, obstacle, pauses, promised};
use godwit_api::text::{format_bytes, format_seconds};

/// Digits of a migration's id in lists.
const SHORT_ID: usize = 8;

/// A migration as known to the node. Programs recognize a VM's migration by the field `vm`, and a disk's by the field
/// `disk`.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Known {
    Disk(Box<Migration>),
    Vm(Box<VmMigration>),
}

impl Known {
    fn id(&self) -> &str {
        match self {
            Self::Disk(migration) => &migration.id,
            Self::Vm(migration) => &migration.id,
        }
    }

    fn started_at(&self) -> &str {
        match self {
            Self::Disk(migration) => &migration.started_at,
            Self::Vm(migration) => &migration.started_at,
        }
    }

    const fn ended(&self) -> bool {
        match self {
            Self::Disk(migration) => migration.phase.ended(),
            Self::Vm(migration) => migration.phase.ended(),
        }
    }
}

pub(crate) async fn run(
    command: MigrationCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        MigrationCommand::List => {
            let mut migrations = all(client).await?;
            // Running and recently ended migrations come first.
            migrations.sort_by(|a, b| b.started_at().cmp(a.started_at()));
            migrations.sort_by_key(Known::ended);
            output.print(&migrations, |migrations| list(migrations))
        }
        MigrationCommand::Show { id } => {
            let migration = find(client, &id).await?;
            output.print(&migration, |migration| match migration {
                Known::Disk(migration) => show(migration),
                Known::Vm(migration) => show_vm(migration),
            })
        }
        MigrationCommand::Watch { id } => {
            let interrupts = interrupts()?;
            match find(client, &id).await? {
                Known::Disk(migration) => watch(client, *migration, interrupts, output).await,
                Known::Vm(migration) => watch(client, *migration, interrupts, output).await,
            }
        }
        MigrationCommand::Switch { id, mut change } => {
            if change.policy == Some(Policy::PushPull) {
                change.push_seconds.get_or_insert(0);
            }
            match find(client, &id).await? {
                Known::Disk(migration) => switch(client, *migration, &change, output).await,
                Known::Vm(migration) => switch(client, *migration, &change, output).await,
            }
        }
        MigrationCommand::Cancel { id } => match find(client, &id).await? {
            Known::Disk(migration) => cancel(client, *migration, output).await,
            Known::Vm(migration) => cancel(client, *migration, output).await,
        },
    }
}

async fn watch<M: Moving>(
    client: &mut Client,
    migration: M,
    interrupts: Signal,
    output: Output,
) -> Result<(), Failure> {
    let detach = OnInterrupt::Detach;
    let followed = follow(client, migration, interrupts, detach, output, true).await?;
    match followed.migration.failure(followed.cancelled) {
        Some(failure) => Err(failure),
        None if output.json => Ok(()),
        None => output.print(&followed.migration, M::summary),
    }
}

async fn switch<M: Switching>(
    client: &mut Client,
    migration: M,
    request: &SwitchMigration,
    output: Output,
) -> Result<(), Failure> {
    let changed: M = client.post(&migration.switch_path(), request).await?;
    output.print(&changed, |migration| {
        format!("migration {} goes on as you asked", migration.id())
    })
}

async fn cancel<M: Moving>(
    client: &mut Client,
    migration: M,
    output: Output,
) -> Result<(), Failure> {
    let path = migration.cancel_path();
    let cancelled: M = client.post(&path, &serde_json::json!({})).await?;
    output.print(&cancelled, |migration| {
        let told = migration.failure(true).filter(|_| migration.ended());
        told.map_or_else(
            || format!("cancelling migration {}", migration.id()),
            |told| told.message,
        )
    })
}

/// Returns all migrations, VMs' before disks', the most recent of each kind first.
async fn all(client: &mut Client) -> Result<Vec<Known>, Failure> {
    let disks: Vec<Migration> = client.get(routes::MIGRATIONS).await?;
    let vms: Vec<VmMigration> = client.get(routes::VM_MIGRATIONS).await?;
    // The later stable sort keeps this order among equal times.
    let vms = vms.into_iter().rev().map(Box::new).map(Known::Vm);
    let disks = disks.into_iter().rev().map(Box::new).map(Known::Disk);
    Ok(vms.chain(disks).collect())
}

/// Finds the migration whose id starts with these digits.
async fn find(client: &mut Client, id: &str) -> Result<Known, Failure> {
    if id.len() != 32 {
        return only_match(all(client).await?, id);
    }
    match client.get(&routes::migration(id)).await {
        Ok(migration) => Ok(Known::Disk(Box::new(migration))),
        Err(CallError::Refused(why)) if why.code == ErrorCode::NotFound => {
            match client.get(&routes::vm_migration(id)).await {
                Ok(migration) => Ok(Known::Vm(Box::new(migration))),
                Err(CallError::Refused(_)) => Err(why.into()),
                Err(error) => Err(error.into()),
            }
        }
        Err(error) => Err(error.into()),
    }
}

fn only_match(migrations: Vec<Known>, id: &str) -> Result<Known, Failure> {
    let prefix = id.to_ascii_lowercase();
    let mut matching = migrations
        .into_iter()
        .filter(|migration| migration.id().starts_with(&prefix));
    match (matching.next(), matching.next()) {
        (Some(migration), None) if !id.is_empty() => Ok(migration),
        (None, _) => Err(Failure::not_found(format!("there is no migration '{id}'"))
            .hint("see which there are: godwit migration list")),
        _ => Err(Failure::new(format!("'{id}' could be several migrations"))
            .hint("give more digits: godwit migration list --json shows them all")),
    }
}

fn list(migrations: &[Known]) -> String {
    let rows = migrations.iter().map(|migration| match migration {
        Known::Disk(migration) => row(migration),
        Known::Vm(migration) => vm_row(migration),
    });
    table(
        ["ID", "DISK", "FROM", "TO", "PHASE", "DONE", "STARTED"],
        rows,
        "no migrations",
    )
}

fn row(migration: &Migration) -> [String; 7] {
    let progress = &migration.progress;
    let done = Some((progress.bytes_done, progress.bytes_total))
        .filter(|_| !migration.phase.ended() && migration.phase != MigrationPhase::Receiving);
    [
        migration.id.chars().take(SHORT_ID).collect(),
        migration.disk.clone(),
        migration.from.clone(),
        migration.to.clone(),
        migration.phase.name().to_owned(),
        percent(done),
        migration.started_at.clone(),
    ]
}

/// Builds the row of a VM's migration, with the progress of the current step.
fn vm_row(migration: &VmMigration) -> [String; 7] {
    let done = migration.status().done;
    [
        migration.id.chars().take(SHORT_ID).collect(),
        format!("vm/{}", migration.vm),
        migration.from.clone(),
        migration.to.clone(),
        migration.phase.name().to_owned(),
        percent(done.filter(|_| !migration.phase.ended())),
        migration.started_at.clone(),
    ]
}

fn percent(done: Option<(u64, u64)>) -> String {
    done.and_then(|(done, total)| (u128::from(done) * 100).checked_div(u128::from(total)))
        .map(|percent| format!("{percent}%"))
        .unwrap_or_default()
}

fn show_vm(migration: &VmMigration) -> String {
    let ended = migration.phase.ended();
    let milliseconds = |time: f64| format!("{time:.1} ms");
    let short = |id: &str| id.chars().take(SHORT_ID).collect::<String>();
    let disk =
        |disk: &Migration| format!("{} ({}, {})", disk.disk, disk.phase.name(), short(&disk.id));
    let disks: Vec<String> = migration.disks.iter().map(disk).collect();
    facts([
        ("id", Some(migration.id.clone())),
        ("vm", Some(migration.vm.clone())),
        ("from", Some(migration.from.clone())),
        ("to", Some(migration.to.clone())),
        ("phase", Some(migration.phase.name().to_owned())),
        (
            "progress",
            (!ended).then(|| migration.status().line.to_string()),
        ),
        ("memory", Some(migration.memory_mode.name().to_owned())),
        ("disks", (!disks.is_empty()).then(|| disks.join(", "))),
        (
            "sent",
            Some(format!(
                "{} of disks, {} of memory",
                format_bytes(migration.disk_bytes),
                format_bytes(migration.memory_bytes)
            )),
        ),
        ("stood still", migration.blackout_ms.map(milliseconds)),
        ("switchover", migration.switchover_ms.map(milliseconds)),
        ("started", Some(migration.started_at.clone())),
        ("ended", migration.ended_at.clone()),
        ("took", migration.total_seconds.map(format_seconds)),
        (
            "warning",
            (!migration.warnings.is_empty()).then(|| migration.warnings.join("; ")),
        ),
        (
            "error",
            migration.error.as_ref().map(|error| error.message.clone()),
        ),
    ])
}

fn show(migration: &Migration) -> String {
    let progress = &migration.progress;
    let ended = migration.phase.ended();
    let promise = migration.promise.as_ref();
    let sent = format!(
        "{} of copies, {} of double writes",
        format_bytes(progress.bytes_sent),
        format_bytes(progress.double_write_bytes)
    );
    facts([
        ("id", Some(migration.id.clone())),
        ("disk", Some(migration.disk.clone())),
        ("from", Some(migration.from.clone())),
        ("to", Some(migration.to.clone())),
        ("phase", Some(migration.phase.name().to_owned())),
        (
            "progress",
            (!ended).then(|| migration_status(migration).line.to_string()),
        ),
        (
            "options",
            (migration.options.as_ref()).map(|options| options.words().join(", ")),
        ),
        (
            "chosen",
            (migration.options.as_ref()).and_then(|options| options.policy_reason.clone()),
        ),
        ("promise", promised(migration)),
        ("pauses", promise.and_then(pauses)),
        ("delayed", promise.and_then(delayed)),
        ("obstacle", obstacle(migration)),
        ("delta", progress.delta.map(|it| delta(it, &migration.to))),
        ("copied", Some(format_bytes(progress.bytes_copied))),
        ("sent", Some(sent)),
        (
            "verified",
            migration.verified.then(|| "identical".to_owned()),
        ),
        ("needs", migration.source_needed.then(|| needed(migration))),
        ("started", Some(migration.started_at.clone())),
        ("ended", migration.ended_at.clone()),
        ("took", migration.lm_seconds.map(format_seconds)),
        (
            "error",
            migration.error.as_ref().map(|error| error.message.clone()),
        ),
    ])
}

/// Returns the part of a moved disk that is still at the source.
fn needed(migration: &Migration) -> String {
    let part = migration
        .missing_bytes
        .map_or_else(|| "a part".to_owned(), format_bytes);
    format!(
        "node '{}': {part} of the disk is there only, and being pulled",
        migration.from
    )
}

/// Returns the bytes that are not sent, and the reason.
fn delta(delta: MigrationDelta, to: &str) -> String {
    let skipped = format_bytes(delta.bytes_skipped);
    match delta.by {
        DeltaBy::Written => format!(
            "{skipped} not sent: node '{to}' has the disk as it left there, and what was written since is known"
        ),
        DeltaBy::Compared if delta.comparing => {
            format!("being compared with an older copy at node '{to}'")
        }
        DeltaBy::Compared => format!(
            "{skipped} not sent: they were compared, and equal an older copy at node '{to}'"
        ),
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::MigrationProgress;

    use super::*;
    use crate::fixture;

    fn migration(id: &str) -> Known {
        Known::Disk(Box::new(Migration {
            id: id.to_owned(),
            progress: MigrationProgress {
                bytes_total: 200,
                bytes_done: 50,
                ..MigrationProgress::default()
            },
            ..fixture::migration()
        }))
    }

    fn vm_migration(id: &str) -> Known {
        Known::Vm(Box::new(VmMigration {
            id: id.to_owned(),
            ..fixture::vm_migration()
        }))
    }

    #[test]
    fn the_first_digits_name_a_migration_when_only_one_has_them() {
        let all = || vec![migration("aa11"), vm_migration("aa22"), migration("bb33")];
        assert_eq!(only_match(all(), "b").unwrap().id(), "bb33");
        assert_eq!(only_match(all(), "AA2").unwrap().id(), "aa22");
        assert!(
            only_match(all(), "aa")
                .unwrap_err()
                .message
                .contains("several")
        );
        assert!(
            only_match(all(), "")
                .unwrap_err()
                .message
                .contains("several")
        );
        assert!(
            only_match(all(), "cc")
                .unwrap_err()
                .message
                .contains("no migration")
        );
    }

    #[test]
    fn a_list_shows_how_far_each_is() {
        let text = list(&[migration("00112233445566778899aabbccddeeff")]);
        let row = text.lines().nth(1).unwrap();
        assert!(row.starts_with("00112233  d"), "{row}");
        assert!(row.contains("copying  25%"), "{row}");
    }

    #[test]
    fn a_move_of_a_virtual_machine_is_listed_beside_its_disks() {
        let text = list(&[migration("00112233"), vm_migration("aabbccdd")]);
        let row = text.lines().nth(2).unwrap();
        assert!(row.starts_with("aabbccdd  vm/v"), "{row}");
        assert!(row.contains("copying_memory  75%"), "{row}");
    }

    #[test]
    fn a_move_of_a_virtual_machine_is_shown_with_what_to_know_of_it() {
        let text = show_vm(&VmMigration {
            warnings: vec!["it may never end".to_owned()],
            ..fixture::vm_migration()
        });
        let has = |fact: &str| assert!(text.lines().any(|line| line == fact), "{fact}:\n{text}");
        has("memory       pre-copy");
        has("disks        d (copying, 00112233)");
        has("warning      it may never end");
    }
}
