//! Moves of disks.

use godwit_api::text::{format_bytes, format_rate, format_seconds};
use godwit_api::{DeltaBy, ErrorBody, Migration, MigrationDelta, MigrationPhase};

use super::Moving;
use crate::failure::{EXIT_INTERRUPTED, EXIT_NOT_MOVED, Failure};
use crate::show::output::facts;
use crate::show::progress::{Status, migration_status};
use crate::show::promise::{counted, delayed, obstacle, pauses, promised};

impl Moving for Migration {
    fn phase(&self) -> &'static str {
        self.phase.name()
    }

    fn ended(&self) -> bool {
        self.phase.ended()
    }

    fn status(&self) -> Status {
        migration_status(self)
    }

    fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn failure(&self, cancelled: bool) -> Option<Failure> {
        failure(self, cancelled)
    }

    fn summary(&self) -> String {
        summary(self)
    }

    fn owed(&self) -> Option<String> {
        owed(self)
    }

    fn done(&self) -> Option<(u64, u64)> {
        let progress = &self.progress;
        let known = self.phase != MigrationPhase::Receiving;
        known.then_some((progress.bytes_done, progress.bytes_total))
    }

    fn error(&self) -> Option<&ErrorBody> {
        self.error.as_ref()
    }

    fn show(&self) -> String {
        show(self)
    }
}

/// Returns a sentence about data of a moved disk that only the source has.
pub(super) fn owed(migration: &Migration) -> Option<String> {
    let Migration { disk, from, to, .. } = migration;
    let bytes = migration
        .missing_bytes
        .unwrap_or(migration.progress.bytes_owed);
    let part = match bytes {
        0 => String::from("a part"),
        bytes => format_bytes(bytes),
    };
    migration.source_needed.then(|| {
        format!(
            "still needed: {part} of disk '{disk}' is at node '{from}' only, which must run until node '{to}' has \
             pulled it (godwit disk show {disk} at '{to}' tells what is left; --wait waits for it)"
        )
    })
}

/// Returns the failure of an ended migration; `None` if the disk has moved.
fn failure(migration: &Migration, cancelled: bool) -> Option<Failure> {
    let Migration {
        phase,
        disk,
        from,
        to,
        error,
        ..
    } = migration;
    if *phase == MigrationPhase::Completed {
        return None;
    }
    if cancelled {
        return Some(
            Failure::new(format!("cancelled: disk '{disk}' stays on '{from}'"))
                .exit(EXIT_INTERRUPTED),
        );
    }
    let failure = match error {
        Some(error) => Failure::from(error.clone()),
        None => Failure::new("the node gave no reason").hint("the node's log says more"),
    };
    let message = format!(
        "disk '{disk}' was not moved to '{to}' and stays on '{from}': {}",
        failure.message
    );
    Some(Failure { message, ..failure }.exit(EXIT_NOT_MOVED))
}

/// Returns a summary of a completed migration in two lines.
fn summary(migration: &Migration) -> String {
    let Migration {
        disk,
        from,
        to,
        progress,
        ..
    } = migration;
    let mut facts = vec![format!("{} copied", format_bytes(progress.bytes_copied))];
    if let Some(seconds) = migration.lm_seconds {
        let rate = progress.bytes_copied as f64 / seconds.max(0.001);
        let time = format_seconds(seconds);
        facts[0].push_str(&format!(" in {time} ({})", format_rate(rate)));
    }
    facts.push(format!(
        "{} of data sent",
        format_bytes(progress.bytes_sent)
    ));
    if progress.double_write_bytes > 0 {
        facts.push(format!(
            "{} of double writes",
            format_bytes(progress.double_write_bytes)
        ));
    }
    if let Some(promise) = &migration.promise {
        if promise.delayed_bytes_sent > 0 {
            let sent = format_bytes(promise.delayed_bytes_sent);
            facts.push(format!("{sent} of delayed writes"));
        }
        let pauses = promise.pauses.total();
        if pauses > 0 {
            let time = format_seconds(promise.paused_seconds);
            facts.push(format!("{} ({time})", counted(pauses, "pause")));
        }
    }
    if migration.verified {
        facts.push("verified: identical".to_owned());
    }
    format!(
        "disk '{disk}' moved from '{from}' to '{to}'\n{}",
        facts.join(", ")
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
    use godwit_api::{ErrorCode, MigrationProgress, MigrationPromise, Pauses};

    use super::*;
    use crate::fixture;

    fn ended(phase: MigrationPhase) -> Migration {
        Migration {
            phase,
            progress: MigrationProgress {
                bytes_copied: 2 << 30,
                bytes_sent: 1 << 30,
                double_write_bytes: 5 << 20,
                ..MigrationProgress::default()
            },
            lm_seconds: Some(4.0),
            verified: true,
            ..fixture::migration()
        }
    }

    #[test]
    fn a_completed_migration_is_summed_up() {
        assert_eq!(
            summary(&ended(MigrationPhase::Completed)),
            "disk 'd' moved from 'a' to 'b'\n2.00 GiB copied in 4.0 s (512 MiB/s), \
             1.00 GiB of data sent, 5.00 MiB of double writes, verified: identical"
        );
        let mut paused = ended(MigrationPhase::Completed);
        paused.verified = false;
        paused.promise = Some(MigrationPromise {
            pauses: Pauses {
                guest_latency: 1,
                ..Pauses::default()
            },
            paused_seconds: 0.25,
            delayed_bytes_sent: 3 << 20,
            ..MigrationPromise::default()
        });
        let text = summary(&paused);
        let end = "5.00 MiB of double writes, 3.00 MiB of delayed writes, 1 pause (250 ms)";
        assert!(text.ends_with(end), "{text}");
        assert!(
            failure(&ended(MigrationPhase::Completed), true).is_none(),
            "a cancel that came too late is no failure"
        );
    }

    #[test]
    fn a_disk_that_left_early_says_what_is_owed() {
        let mut migration = ended(MigrationPhase::Completed);
        assert_eq!(owed(&migration), None);
        migration.source_needed = true;
        migration.progress.bytes_owed = 256 << 20;
        let told = owed(&migration).unwrap();
        for part in ["still needed", "256 MiB", "disk 'd'", "node 'a'", "--wait"] {
            assert!(told.contains(part), "{part}: {told}");
        }
    }

    #[test]
    fn an_aborted_migration_says_why_and_who_has_the_disk() {
        let mut migration = ended(MigrationPhase::Aborted);
        migration.error = Some(ErrorBody::new(
            ErrorCode::NoSpace,
            "no space is left on 'b'",
        ));
        let told = failure(&migration, false).unwrap();
        assert_eq!(
            told.message,
            "disk 'd' was not moved to 'b' and stays on 'a': no space is left on 'b'"
        );
        assert!(told.hint.is_some());
        assert_eq!(told.exit, EXIT_NOT_MOVED);
    }

    #[test]
    fn a_cancelled_migration_says_where_the_disk_is() {
        let migration = ended(MigrationPhase::Aborted);
        let told = failure(&migration, true).unwrap();
        assert_eq!(told.message, "cancelled: disk 'd' stays on 'a'");
        assert_eq!(told.exit, EXIT_INTERRUPTED);
    }
}
