//! Moves of VMs.

use godwit_api::text::{format_bytes, format_seconds};
use godwit_api::{ErrorBody, Migration, MigrationPhase, VmMigration, VmMigrationPhase};

use super::disk::owed;
use super::{Moving, SHORT_ID};
use crate::failure::{EXIT_INTERRUPTED, EXIT_NOT_MOVED, Failure};
use crate::show::line::{Line, Matters};
use crate::show::output::facts;
use crate::show::progress::{Status, status_of};

impl Moving for VmMigration {
    fn phase(&self) -> &'static str {
        self.phase.name()
    }

    fn ended(&self) -> bool {
        self.phase.ended()
    }

    fn status(&self) -> Status {
        status(self)
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
        let owed: Vec<_> = self.disks.iter().filter_map(owed).collect();
        (!owed.is_empty()).then(|| owed.join("\n"))
    }

    fn error(&self) -> Option<&ErrorBody> {
        self.error.as_ref()
    }

    fn show(&self) -> String {
        show(self)
    }
}

/// Returns the progress of the move: the disks, then the memory, then the switchover.
fn status(seen: &VmMigration) -> Status {
    let VmMigration { vm, to, memory, .. } = seen;
    let plain = |text: String| Status {
        line: Line::plain(format!("vm/{vm}: {text}")),
        done: None,
        note: None,
    };
    match seen.phase {
        VmMigrationPhase::Checking => plain(format!("looking for what stands in the way at {to}")),
        VmMigrationPhase::CopyingDisks => {
            let copied = |phase| matches!(phase, MigrationPhase::Converged);
            let ready = seen.disks.iter().filter(|disk| copied(disk.phase)).count();
            let Some(disk) = seen.disks.iter().find(|disk| !copied(disk.phase)) else {
                return plain(format!("its disks are copied to {to}"));
            };
            let mut status = status_of(&format!("vm/{vm}: disk {}", disk.disk), disk);
            let count = seen.disks.len();
            if count > 1 {
                let ready = format!("{ready} of {count} disks copied");
                status.line = status.line.then(Matters::Detail, ready);
            }
            status
        }
        VmMigrationPhase::Starting => plain(format!("starting QEMU at {to}")),
        VmMigrationPhase::PullingMemory if memory.bytes_left == 0 => plain(format!(
            "runs at {to}, which has all that is known of its memory; both QEMUs end the move"
        )),
        VmMigrationPhase::CopyingMemory | VmMigrationPhase::PullingMemory => {
            let left = format_bytes(memory.bytes_left);
            let total = format_bytes(memory.bytes_total);
            let sent = format_bytes(memory.bytes_sent);
            let what = match seen.phase {
                VmMigrationPhase::CopyingMemory => format!("memory to {to}"),
                _ => format!("runs at {to}, memory follows"),
            };
            let mut line = Line::default()
                .then(Matters::Names, format!("vm/{vm}: {what}"))
                .then_or(&[
                    (Matters::Always, format!("{left} left")),
                    (Matters::Rest, format!("{left} of {total} left")),
                ])
                .then(Matters::Detail, format!("{sent} sent"));
            if memory.passes > 1 {
                line = line.then(Matters::Detail, format!("pass {}", memory.passes));
            }
            Status {
                line,
                done: Some((
                    memory.bytes_total.saturating_sub(memory.bytes_left),
                    memory.bytes_total,
                )),
                note: None,
            }
        }
        phase => plain(format!("{} to {to}", phase.name().replace('_', " "))),
    }
}

fn failure(seen: &VmMigration, cancelled: bool) -> Option<Failure> {
    let VmMigration { vm, from, .. } = seen;
    if seen.phase == VmMigrationPhase::Completed {
        return None;
    }
    if cancelled {
        return Some(
            Failure::new(format!("cancelled: VM '{vm}' stays on '{from}'")).exit(EXIT_INTERRUPTED),
        );
    }
    let failure = match &seen.error {
        Some(error) => Failure::from(error.clone()),
        None => Failure::new(format!("VM '{vm}' was not moved; the node gave no reason"))
            .hint("the node's log says more"),
    };
    Some(failure.exit(EXIT_NOT_MOVED))
}

/// Returns a summary of a completed move in two lines.
fn summary(seen: &VmMigration) -> String {
    let VmMigration { vm, from, to, .. } = seen;
    let mut facts = Vec::new();
    if let Some(seconds) = seen.total_seconds {
        facts.push(format!("took {}", format_seconds(seconds)));
    }
    if let Some(blackout) = seen.blackout_ms {
        facts.push(format!("the guest stood still for {blackout:.0} ms"));
    }
    if let Some(switchover) = seen.switchover_ms {
        facts.push(format!("{switchover:.1} ms of that for the disks"));
    }
    facts.push(format!("{} of disks sent", format_bytes(seen.disk_bytes)));
    facts.push(format!("{} of memory", format_bytes(seen.memory_bytes)));
    format!(
        "VM '{vm}' moved from '{from}' to '{to}'\n{}",
        facts.join(", ")
    )
}

fn show(migration: &VmMigration) -> String {
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

#[cfg(test)]
mod tests {
    use godwit_api::ErrorCode;

    use super::*;
    use crate::fixture;

    fn moving(phase: VmMigrationPhase) -> VmMigration {
        VmMigration {
            phase,
            ..fixture::vm_migration()
        }
    }

    #[test]
    fn progress_goes_from_the_disks_to_the_memory() {
        let shown = status(&moving(VmMigrationPhase::CopyingDisks));
        let line = shown.line.to_string();
        assert!(line.starts_with("vm/v: disk d: copying to b"), "{line}");
        let shown = status(&moving(VmMigrationPhase::CopyingMemory));
        assert_eq!(
            shown.line.to_string(),
            "vm/v: memory to b, 128 MiB of 512 MiB left, 400 MiB sent, pass 2"
        );
        assert_eq!(shown.done, Some((384 << 20, 512 << 20)));
        let mut pulled = moving(VmMigrationPhase::PullingMemory);
        pulled.memory.bytes_left = 0;
        let line = status(&pulled).line.to_string();
        assert!(!line.contains("0 B left"), "{line}");
        let shown = status(&moving(VmMigrationPhase::SwitchingOver));
        assert_eq!(shown.line.to_string(), "vm/v: switching over to b");
    }

    #[test]
    fn the_end_says_how_long_the_guest_stood_still() {
        assert_eq!(
            summary(&moving(VmMigrationPhase::Completed)),
            "VM 'v' moved from 'a' to 'b'\ntook 2.0 s, the guest stood still for 41 ms, \
             6.2 ms of that for the disks, 1.00 GiB of disks sent, 400 MiB of memory"
        );
        assert!(failure(&moving(VmMigrationPhase::Completed), true).is_none());
        let mut aborted = moving(VmMigrationPhase::Aborted);
        let told = failure(&aborted, true).unwrap();
        assert_eq!(told.message, "cancelled: VM 'v' stays on 'a'");
        assert_eq!(told.exit, EXIT_INTERRUPTED);
        aborted.error = Some(ErrorBody::new(ErrorCode::Conflict, "2 things"));
        let told = failure(&aborted, false).unwrap();
        assert_eq!(
            (told.message.as_str(), told.exit),
            ("2 things", EXIT_NOT_MOVED)
        );
    }

    #[test]
    fn a_move_of_a_virtual_machine_is_shown_with_what_to_know_of_it() {
        let text = show(&VmMigration {
            warnings: vec!["it may never end".to_owned()],
            ..fixture::vm_migration()
        });
        let has = |fact: &str| assert!(text.lines().any(|line| line == fact), "{fact}:\n{text}");
        has("memory       pre-copy");
        has("disks        d (copying, 00112233)");
        has("warning      it may never end");
    }
}
