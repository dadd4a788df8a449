//! Moves of VMs.

use godwit_api::text::{format_bytes, format_seconds};
use godwit_api::{Migration, MigrationPhase, VmMigration, VmMigrationPhase};

use super::{Moving, SHORT_ID};
use crate::failure::{EXIT_INTERRUPTED, EXIT_NOT_MOVED, Failure};
use crate::show::line::{Line, Matters};
use crate::show::output::facts;
use crate::show::progress::{Status, status_of};

impl Moving for VmMigration {
    fn status(&self) -> Status {
        let VmMigration { vm, to, memory, .. } = self;
        let plain = |text: String| Status {
            line: Line::plain(format!("vm/{vm}: {text}")),
            done: None,
            note: None,
        };
        match self.phase {
            VmMigrationPhase::Checking => {
                plain(format!("looking for what stands in the way at {to}"))
            }
            VmMigrationPhase::CopyingDisks => {
                let copied = |phase| matches!(phase, MigrationPhase::Converged);
                let ready = self.disks.iter().filter(|disk| copied(disk.phase)).count();
                let Some(disk) = self.disks.iter().find(|disk| !copied(disk.phase)) else {
                    return plain(format!("its disks are copied to {to}"));
                };
                let mut status = status_of(&format!("vm/{vm}: disk {}", disk.disk), disk);
                let count = self.disks.len();
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
                let what = match self.phase {
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

    fn failure(&self, cancelled: bool) -> Option<Failure> {
        let VmMigration { vm, from, .. } = self;
        if self.phase == VmMigrationPhase::Completed {
            return None;
        }
        if cancelled {
            return Some(
                Failure::new(format!("cancelled: VM '{vm}' stays on '{from}'"))
                    .exit(EXIT_INTERRUPTED),
            );
        }
        let failure = match &self.error {
            Some(error) => Failure::from(error.clone()),
            None => Failure::new(format!("VM '{vm}' was not moved; the node gave no reason"))
                .hint("the node's log says more"),
        };
        Some(failure.exit(EXIT_NOT_MOVED))
    }

    fn summary(&self) -> String {
        let VmMigration { vm, from, to, .. } = self;
        let mut facts = Vec::new();
        if let Some(seconds) = self.total_seconds {
            facts.push(format!("took {}", format_seconds(seconds)));
        }
        if let Some(blackout) = self.blackout_ms {
            facts.push(format!("the guest stood still for {blackout:.0} ms"));
        }
        if let Some(switchover) = self.switchover_ms {
            facts.push(format!("{switchover:.1} ms of that for the disks"));
        }
        facts.push(format!("{} of disks sent", format_bytes(self.disk_bytes)));
        facts.push(format!("{} of memory", format_bytes(self.memory_bytes)));
        format!(
            "VM '{vm}' moved from '{from}' to '{to}'\n{}",
            facts.join(", ")
        )
    }

    fn owed(&self) -> Option<String> {
        let owed: Vec<_> = self.disks.iter().filter_map(Moving::owed).collect();
        (!owed.is_empty()).then(|| owed.join("\n"))
    }

    fn show(&self) -> String {
        let ended = self.phase.ended();
        let milliseconds = |time: f64| format!("{time:.1} ms");
        let short = |id: &str| id.chars().take(SHORT_ID).collect::<String>();
        let disk = |disk: &Migration| {
            format!("{} ({}, {})", disk.disk, disk.phase.name(), short(&disk.id))
        };
        let disks: Vec<String> = self.disks.iter().map(disk).collect();
        facts([
            ("id", Some(self.id.clone())),
            ("vm", Some(self.vm.clone())),
            ("from", Some(self.from.clone())),
            ("to", Some(self.to.clone())),
            ("phase", Some(self.phase.name().to_owned())),
            ("progress", (!ended).then(|| self.status().line.to_string())),
            ("memory", Some(self.memory_mode.name().to_owned())),
            ("disks", (!disks.is_empty()).then(|| disks.join(", "))),
            (
                "sent",
                Some(format!(
                    "{} of disks, {} of memory",
                    format_bytes(self.disk_bytes),
                    format_bytes(self.memory_bytes)
                )),
            ),
            ("stood still", self.blackout_ms.map(milliseconds)),
            ("switchover", self.switchover_ms.map(milliseconds)),
            ("started", Some(self.started_at.clone())),
            ("ended", self.ended_at.clone()),
            ("took", self.total_seconds.map(format_seconds)),
            (
                "warning",
                (!self.warnings.is_empty()).then(|| self.warnings.join("; ")),
            ),
            (
                "error",
                self.error.as_ref().map(|error| error.message.clone()),
            ),
        ])
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::{ErrorBody, ErrorCode};

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
        let shown = moving(VmMigrationPhase::CopyingDisks).status();
        let line = shown.line.to_string();
        assert!(line.starts_with("vm/v: disk d: copying to b"), "{line}");
        let shown = moving(VmMigrationPhase::CopyingMemory).status();
        assert_eq!(
            shown.line.to_string(),
            "vm/v: memory to b, 128 MiB of 512 MiB left, 400 MiB sent, pass 2"
        );
        assert_eq!(shown.done, Some((384 << 20, 512 << 20)));
        let mut pulled = moving(VmMigrationPhase::PullingMemory);
        pulled.memory.bytes_left = 0;
        let line = pulled.status().line.to_string();
        assert!(!line.contains("0 B left"), "{line}");
        let shown = moving(VmMigrationPhase::SwitchingOver).status();
        assert_eq!(shown.line.to_string(), "vm/v: switching over to b");
    }

    #[test]
    fn the_end_says_how_long_the_guest_stood_still() {
        assert_eq!(
            moving(VmMigrationPhase::Completed).summary(),
            "VM 'v' moved from 'a' to 'b'\ntook 2.0 s, the guest stood still for 41 ms, \
             6.2 ms of that for the disks, 1.00 GiB of disks sent, 400 MiB of memory"
        );
        assert!(moving(VmMigrationPhase::Completed).failure(true).is_none());
        let mut aborted = moving(VmMigrationPhase::Aborted);
        let told = aborted.failure(true).unwrap();
        assert_eq!(told.message, "cancelled: VM 'v' stays on 'a'");
        assert_eq!(told.exit, EXIT_INTERRUPTED);
        aborted.error = Some(ErrorBody::new(ErrorCode::Conflict, "2 things"));
        let told = aborted.failure(false).unwrap();
        assert_eq!(
            (told.message.as_str(), told.exit),
            ("2 things", EXIT_NOT_MOVED)
        );
    }

    #[test]
    fn a_move_of_a_virtual_machine_is_shown_with_what_to_know_of_it() {
        let migration = VmMigration {
            warnings: vec!["it may never end".to_owned()],
            ..fixture::vm_migration()
        };
        let text = migration.show();
        let has = |fact: &str| assert!(text.lines().any(|line| line == fact), "{fact}:\n{text}");
        has("memory       pre-copy");
        has("disks        d (copying, 00112233)");
        has("warning      it may never end");
    }
}
