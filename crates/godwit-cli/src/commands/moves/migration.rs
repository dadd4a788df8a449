//! The command `godwit migration`.

use godwit_api::Move;

use super::follow::{OnInterrupt, follow, interrupts};
use super::{SHORT_ID, moving};
use crate::arguments::MigrationCommand;
use crate::client::Client;
use crate::failure::Failure;
use crate::routes;
use crate::show::output::{Output, table};

pub(crate) async fn run(
    command: MigrationCommand,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    match command {
        MigrationCommand::List => {
            let mut migrations: Vec<Move> = client.get(routes::MIGRATIONS).await?;
            // Running and recently begun migrations come first.
            migrations.reverse();
            migrations.sort_by(|a, b| b.started_at().cmp(a.started_at()));
            migrations.sort_by_key(|migration| moving(migration).ended());
            output.print(&migrations, |migrations| list(migrations))
        }
        MigrationCommand::Show { id } => {
            let migration = find(client, &id).await?;
            output.print(&migration, |migration| moving(migration).show())
        }
        MigrationCommand::Watch { id } => {
            let interrupts = interrupts()?;
            let found = find(client, &id).await?;
            let detach = OnInterrupt::Detach;
            let followed = follow(client, found, interrupts, detach, output, true).await?;
            match moving(&followed.migration).failure(followed.cancelled) {
                Some(failure) => Err(failure),
                None if output.json => Ok(()),
                None => output.print(&followed.migration, |it| moving(it).summary()),
            }
        }
        MigrationCommand::Switch { id, mut change } => {
            if change.policy.is_some_and(|policy| policy.pushes()) {
                change.push_seconds.get_or_insert(0);
            }
            let path = routes::migration_switch(find(client, &id).await?.id());
            let changed: Move = client.post(&path, &change).await?;
            output.print(&changed, |migration| {
                format!("migration {} goes on as you asked", migration.id())
            })
        }
        MigrationCommand::Cancel { id } => {
            let path = routes::migration_cancel(find(client, &id).await?.id());
            let migration: Move = client.post(&path, &serde_json::json!({})).await?;
            output.print(&migration, cancelled)
        }
    }
}

/// Returns the outcome of a request to cancel a move.
fn cancelled(migration: &Move) -> String {
    let seen = moving(migration);
    let told = seen.failure(true).filter(|_| seen.ended());
    told.map_or_else(
        || format!("cancelling migration {}", migration.id()),
        |told| told.message,
    )
}

/// Finds the migration whose id starts with these digits.
async fn find(client: &mut Client, id: &str) -> Result<Move, Failure> {
    if id.len() == 32 {
        return Ok(client.get(&routes::migration(id)).await?);
    }
    only_match(client.get(routes::MIGRATIONS).await?, id)
}

fn only_match(migrations: Vec<Move>, id: &str) -> Result<Move, Failure> {
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

fn list(migrations: &[Move]) -> String {
    table(
        [
            "ID", "SUBJECT", "FROM", "TO", "PHASE", "DONE", "STARTED", "NOTE",
        ],
        migrations.iter().map(row),
        "no migrations",
    )
}

fn row(migration: &Move) -> [String; 8] {
    let seen = moving(migration);
    let (from, to) = migration.nodes();
    let error = seen.error().and_then(|error| error.message.lines().next());
    let note = error.map(str::to_owned).or_else(|| seen.note());
    [
        migration.id().chars().take(SHORT_ID).collect(),
        migration.subject.clone(),
        from.to_owned(),
        to.to_owned(),
        seen.phase().to_owned(),
        percent(seen.done().filter(|_| !seen.ended())),
        migration.started_at().to_owned(),
        note.unwrap_or_default(),
    ]
}

fn percent(done: Option<(u64, u64)>) -> String {
    done.and_then(|(done, total)| (u128::from(done) * 100).checked_div(u128::from(total)))
        .map(|percent| format!("{percent}%"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use godwit_api::{
        ErrorBody, ErrorCode, Migration, MigrationProgress, ProcessMigration,
        ProcessMigrationPhase, VmMigration,
    };

    use super::*;
    use crate::fixture;

    fn migration(id: &str) -> Move {
        Move::from(Migration {
            id: id.to_owned(),
            progress: MigrationProgress {
                bytes_total: 200,
                bytes_done: 50,
                ..MigrationProgress::default()
            },
            ..fixture::migration()
        })
    }

    fn vm_migration(id: &str) -> Move {
        Move::from(VmMigration {
            id: id.to_owned(),
            ..fixture::vm_migration()
        })
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
    fn a_move_of_a_process_is_listed_with_what_it_waits_for_or_why_it_failed() {
        let moving = |phase, waits_for: Option<&str>, error| {
            list(&[Move::from(ProcessMigration {
                phase,
                waits_for: waits_for.map(str::to_owned),
                error,
                ..fixture::process_migration()
            })])
        };
        let other = Some("the move of process 9 of node 'b'");
        let text = moving(ProcessMigrationPhase::Waiting, other, None);
        let row = text.lines().nth(1).unwrap();
        assert!(row.starts_with("aabbccdd  process/7"), "{row}");
        assert!(
            row.contains("waiting for the move of process 9 of node 'b'"),
            "{row}"
        );
        let lost = ErrorBody::new(ErrorCode::Conflict, "process 7 is lost: no");
        let text = moving(ProcessMigrationPhase::Aborted, None, Some(lost));
        assert!(text.contains("is lost"), "{text}");
    }

    #[test]
    fn a_cancelled_move_says_what_became_of_it() {
        let mut seen = ProcessMigration {
            phase: ProcessMigrationPhase::GoingBack,
            ..fixture::process_migration()
        };
        assert!(cancelled(&seen.clone().into()).starts_with("cancelling migration aabbccdd"));
        seen.phase = ProcessMigrationPhase::Aborted;
        seen.error = Some(ErrorBody::new(ErrorCode::Conflict, "process 7 is lost: no"));
        assert_eq!(cancelled(&seen.into()), "process 7 is lost: no");
    }
}
