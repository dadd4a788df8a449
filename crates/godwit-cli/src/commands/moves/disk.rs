//! Moves of disks.

use godwit_api::text::{format_bytes, format_rate, format_seconds};
use godwit_api::{DeltaBy, Migration, MigrationDelta, MigrationPhase};

use super::Moving;
use crate::failure::{EXIT_INTERRUPTED, EXIT_NOT_MOVED, Failure};
use crate::show::output::facts;
use crate::show::progress::{Status, migration_status};
use crate::show::promise::{counted, delayed, obstacle, pauses, promised};

impl Moving for Migration {
    fn status(&self) -> Status {
        migration_status(self)
    }

    fn failure(&self, cancelled: bool) -> Option<Failure> {
        let Migration {
            phase,
            disk,
            from,
            to,
            error,
            ..
        } = self;
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

    fn summary(&self) -> String {
        let Migration {
            disk,
            from,
            to,
            progress,
            ..
        } = self;
        let mut facts = vec![format!("{} copied", format_bytes(progress.bytes_copied))];
        if let Some(seconds) = self.lm_seconds {
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
        if let Some(promise) = &self.promise {
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
        if self.verified {
            facts.push("verified: identical".to_owned());
        }
        format!(
            "disk '{disk}' moved from '{from}' to '{to}'\n{}",
            facts.join(", ")
        )
    }

    fn owed(&self) -> Option<String> {
        let Migration { disk, from, to, .. } = self;
        let bytes = self.missing_bytes.unwrap_or(self.progress.bytes_owed);
        let part = match bytes {
            0 => String::from("a part"),
            bytes => format_bytes(bytes),
        };
        self.source_needed.then(|| {
            format!(
                "still needed: {part} of disk '{disk}' is at node '{from}' only, which must run until node '{to}' has \
                 pulled it (godwit disk show {disk} at '{to}' tells what is left; --wait waits for it)"
            )
        })
    }

    fn done(&self) -> Option<(u64, u64)> {
        let progress = &self.progress;
        let known = self.phase != MigrationPhase::Receiving;
        known.then_some((progress.bytes_done, progress.bytes_total))
    }

    fn show(&self) -> String {
        let progress = &self.progress;
        let ended = self.phase.ended();
        let promise = self.promise.as_ref();
        let sent = format!(
            "{} of copies, {} of double writes",
            format_bytes(progress.bytes_sent),
            format_bytes(progress.double_write_bytes)
        );
        facts([
            ("id", Some(self.id.clone())),
            ("disk", Some(self.disk.clone())),
            ("from", Some(self.from.clone())),
            ("to", Some(self.to.clone())),
            ("phase", Some(self.phase.name().to_owned())),
            (
                "progress",
                (!ended).then(|| migration_status(self).line.to_string()),
            ),
            (
                "options",
                (self.options.as_ref()).map(|options| options.words().join(", ")),
            ),
            (
                "chosen",
                (self.options.as_ref()).and_then(|options| options.policy_reason.clone()),
            ),
            ("promise", promised(self)),
            ("pauses", promise.and_then(pauses)),
            ("delayed", promise.and_then(delayed)),
            ("obstacle", obstacle(self)),
            ("delta", progress.delta.map(|it| delta(it, &self.to))),
            ("copied", Some(format_bytes(progress.bytes_copied))),
            ("sent", Some(sent)),
            ("verified", self.verified.then(|| "identical".to_owned())),
            ("needs", self.source_needed.then(|| needed(self))),
            ("started", Some(self.started_at.clone())),
            ("ended", self.ended_at.clone()),
            ("took", self.lm_seconds.map(format_seconds)),
            (
                "error",
                self.error.as_ref().map(|error| error.message.clone()),
            ),
        ])
    }
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
    use godwit_api::{ErrorBody, ErrorCode, MigrationProgress, MigrationPromise, Pauses};

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
            ended(MigrationPhase::Completed).summary(),
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
        let text = paused.summary();
        let end = "5.00 MiB of double writes, 3.00 MiB of delayed writes, 1 pause (250 ms)";
        assert!(text.ends_with(end), "{text}");
        assert!(
            ended(MigrationPhase::Completed).failure(true).is_none(),
            "a cancel that came too late is no failure"
        );
    }

    #[test]
    fn a_disk_that_left_early_says_what_is_owed() {
        let mut migration = ended(MigrationPhase::Completed);
        assert_eq!(migration.owed(), None);
        migration.source_needed = true;
        migration.progress.bytes_owed = 256 << 20;
        let told = migration.owed().unwrap();
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
        let told = migration.failure(false).unwrap();
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
        let told = migration.failure(true).unwrap();
        assert_eq!(told.message, "cancelled: disk 'd' stays on 'a'");
        assert_eq!(told.exit, EXIT_INTERRUPTED);
    }
}
