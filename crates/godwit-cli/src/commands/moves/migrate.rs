//! The command `godwit migrate`.

use godwit_api::{ErrorCode, MigrateRequest, Migration, MigrationPhase, Vm};

use crate::arguments::MigrateArguments;
use crate::client::Client;
use crate::commands::moves::follow::{
    Moving, POLL_INTERVAL, Switching, begin, interrupts, see_off, see_off_and_wait,
};
use crate::failure::{EXIT_INTERRUPTED, EXIT_NOT_MOVED, Failure};
use crate::routes;
use crate::show::output::Output;
use crate::show::progress::{Status, migration_status};
use crate::show::promise::counted;
use godwit_api::text::{format_bytes, format_rate, format_seconds};

pub(crate) async fn run(
    arguments: MigrateArguments,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    if let Some(vm) = arguments.disk.strip_prefix("vm/") {
        let vm = vm.to_owned();
        return crate::commands::moves::vm_migrate::run(&vm, arguments, client, output).await;
    }
    if arguments.memory.is_some() || arguments.stay_in_pool {
        return Err(Failure::usage(format!(
            "'{}' is a disk and has no memory to move",
            arguments.disk
        ))
        .hint("for a virtual machine give vm/NAME"));
    }
    if !arguments.uplinks.is_empty() {
        return Err(Failure::usage(format!(
            "'{}' is a disk and has no NICs, which --uplink is for",
            arguments.disk
        ))
        .hint("for a virtual machine give vm/NAME"));
    }
    // Before the request, so that Ctrl-C while the node connects to its peer cancels the migration.
    let mut interrupts = interrupts()?;
    let disk = arguments.disk.clone();
    let (detach, wait) = (arguments.detach, arguments.wait);
    let request = MigrateRequest {
        disk: arguments.disk,
        to: arguments.to,
        pool: arguments.pool,
        into: arguments.into,
        with_guest: arguments.with_guest,
        options: arguments.options,
    };
    let begun = begin::<Migration>(
        client,
        routes::MIGRATIONS,
        &request,
        &mut interrupts,
        output,
    )
    .await;
    let begun = match begun {
        Err(failure) if failure.code == Some(ErrorCode::NotFound) => {
            return Err(is_a_machine(client, &disk, failure).await);
        }
        begun => begun?,
    };
    match wait {
        true => see_off_and_wait(client, begun, interrupts, output).await,
        false => see_off(client, begun, interrupts, detach, output).await,
    }
}

/// Adds a hint to the error for a missing disk if the name is a VM's.
async fn is_a_machine(client: &mut Client, name: &str, failure: Failure) -> Failure {
    match client.get::<Vm>(&routes::vm(name)).await {
        Ok(_) => failure.hint(format!(
            "it is a virtual machine, which moves with its disks: give vm/{name}"
        )),
        Err(_) => failure,
    }
}

impl Switching for Migration {
    fn switch_path(&self) -> String {
        routes::migration_switch(&self.id)
    }
}

impl Moving for Migration {
    fn id(&self) -> &str {
        &self.id
    }

    fn path(&self) -> String {
        routes::migration_within(&self.id, POLL_INTERVAL)
    }

    fn cancel_path(&self) -> String {
        routes::migration_cancel(&self.id)
    }

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

#[cfg(test)]
mod tests {
    use godwit_api::{ErrorBody, MigrationProgress, MigrationPromise, Pauses};

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
