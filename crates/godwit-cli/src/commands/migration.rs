//! `godwit migration`

use godwit_node::api::{Migration, MigrationPhase, MigrationSettings};

use super::follow::{OnInterrupt, follow, interrupts};
use super::migrate::{failure, summary};
use crate::arguments::MigrationCommand;
use crate::client::Client;
use crate::failure::Failure;
use crate::output::{Output, facts, table};
use crate::progress::migration_status;
use crate::promise::{delayed, obstacle, pauses, promised};
use crate::routes;
use crate::units::{format_bytes, format_rate, format_seconds};

/// Digits of a migration's id that lists show.
const SHORT_ID: usize = 8;

pub(crate) async fn run(
    command: MigrationCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        MigrationCommand::List => {
            let mut migrations: Vec<Migration> = client.get(routes::MIGRATIONS).await?;
            // The node lists the oldest first; people look for what runs and what just ended.
            migrations.reverse();
            migrations.sort_by_key(|migration| migration.phase.ended());
            output.print(&migrations, |migrations| list(migrations))
        }
        MigrationCommand::Show { id } => {
            let migration = find(client, &id).await?;
            output.print(&migration, show)
        }
        MigrationCommand::Watch { id } => {
            let interrupts = interrupts()?;
            let migration = find(client, &id).await?;
            let followed = follow(
                client,
                migration,
                interrupts,
                OnInterrupt::Detach,
                Some(output),
            )
            .await?;
            match failure(&followed) {
                Some(failure) => Err(failure),
                None if output.json => Ok(()),
                None => output.print(&followed.migration, summary),
            }
        }
        MigrationCommand::Cancel { id } => {
            let migration = find(client, &id).await?;
            let path = routes::migration_cancel(&migration.id);
            let cancelled: Migration = client.post(&path, &serde_json::json!({})).await?;
            output.print(&cancelled, |migration| match migration.phase {
                MigrationPhase::Aborted => {
                    format!(
                        "cancelled: disk '{}' stays on '{}'",
                        migration.disk, migration.from
                    )
                }
                _ => format!("cancelling migration {}", migration.id),
            })
        }
    }
}

/// The migration whose id starts with these digits.
async fn find(client: &mut Client, id: &str) -> Result<Migration, Failure> {
    if id.len() == 32 {
        return Ok(client.get(&routes::migration(id)).await?);
    }
    let migrations: Vec<Migration> = client.get(routes::MIGRATIONS).await?;
    only_match(migrations, id)
}

fn only_match(migrations: Vec<Migration>, id: &str) -> Result<Migration, Failure> {
    let prefix = id.to_ascii_lowercase();
    let mut matching = migrations
        .into_iter()
        .filter(|migration| migration.id.starts_with(&prefix));
    match (matching.next(), matching.next()) {
        (Some(migration), None) if !id.is_empty() => Ok(migration),
        (None, _) => Err(Failure::new(format!("there is no migration '{id}'"))
            .hint("see which there are: godwit migration list")),
        _ => Err(Failure::new(format!("'{id}' could be several migrations"))
            .hint("give more digits: godwit migration list --json shows them all")),
    }
}

fn list(migrations: &[Migration]) -> String {
    let row = |migration: &Migration| {
        let progress = &migration.progress;
        let percent = (progress.bytes_done as u128 * 100)
            .checked_div(u128::from(progress.bytes_total))
            .filter(|_| !migration.phase.ended() && migration.phase != MigrationPhase::Receiving);
        [
            migration.id.chars().take(SHORT_ID).collect(),
            migration.disk.clone(),
            migration.from.clone(),
            migration.to.clone(),
            migration.phase.name().to_owned(),
            percent
                .map(|percent| format!("{percent}%"))
                .unwrap_or_default(),
            migration.started_at.clone(),
        ]
    };
    table(
        ["ID", "DISK", "FROM", "TO", "PHASE", "DONE", "STARTED"],
        migrations.iter().map(row),
        "no migrations",
    )
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
            (!ended).then(|| migration_status(migration).line),
        ),
        ("options", migration.options.as_ref().map(options)),
        ("promise", promised(migration)),
        ("pauses", promise.and_then(pauses)),
        ("delayed", promise.and_then(delayed)),
        ("obstacle", obstacle(migration)),
        ("copied", Some(format_bytes(progress.bytes_copied))),
        ("sent", Some(sent)),
        (
            "verified",
            migration.verified.then(|| "identical".to_owned()),
        ),
        ("started", Some(migration.started_at.clone())),
        ("ended", migration.ended_at.clone()),
        ("took", migration.lm_seconds.map(format_seconds)),
        (
            "error",
            migration.error.as_ref().map(|error| error.message.clone()),
        ),
    ])
}

fn options(options: &MigrationSettings) -> String {
    let mut parts = vec![
        options.policy.name().to_owned(),
        format!("window {}", format_bytes(options.window_bytes)),
        format!("chunk {}", format_bytes(options.chunk_bytes)),
    ];
    let rate = |bytes: u64| format_rate(bytes as f64);
    if let Some(limit) = options.max_bandwidth {
        parts.push(format!("at most {}", rate(limit)));
    }
    if let Some(seconds) = options.deadline_seconds {
        parts.push(format!("within {}", format_seconds(seconds as f64)));
    }
    if let (Some(interface), Some(budget)) = (&options.interface, options.interface_budget) {
        parts.push(format!("{interface} at most {}", rate(budget)));
    }
    match options.delayed_write_rate {
        Some(limit) => parts.push(format!("delayed writes at most {}", rate(limit))),
        None if options.delayed_writes => parts.push("delayed writes".to_owned()),
        None => {}
    }
    if options.verify {
        parts.push("verify".to_owned());
    }
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use godwit_node::api::MigrationProgress;

    use super::*;
    use crate::fixture;

    fn migration(id: &str) -> Migration {
        Migration {
            id: id.to_owned(),
            progress: MigrationProgress {
                bytes_total: 200,
                bytes_done: 50,
                ..MigrationProgress::default()
            },
            ..fixture::migration()
        }
    }

    #[test]
    fn the_first_digits_name_a_migration_when_only_one_has_them() {
        let all = || vec![migration("aa11"), migration("aa22"), migration("bb33")];
        assert_eq!(only_match(all(), "b").unwrap().id, "bb33");
        assert_eq!(only_match(all(), "AA2").unwrap().id, "aa22");
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
}
