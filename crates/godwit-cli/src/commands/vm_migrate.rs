//! `godwit migrate vm/NAME`

use std::time::Instant;

use godwit_node::api::{
    MemoryMode, MigrateVm, MigrationPhase, Policy, VmMigration, VmMigrationPhase,
};

use super::follow::{POLL_INTERVAL, interrupts, look};
use crate::arguments::{MemoryArgument, MigrateArguments, PolicyArgument, Switch};
use crate::client::Client;
use crate::failure::Failure;
use crate::output::Output;
use crate::progress::{ProgressLine, Status, migration_status};
use crate::routes;
use crate::units::{format_bytes, format_seconds};

pub(crate) async fn run(
    vm: &str,
    arguments: MigrateArguments,
    client: &mut Client,
    output: Output,
) -> Result<(), Failure> {
    // Before the request: Ctrl-C while the nodes check cancels what it started.
    let mut interrupts = interrupts()?;
    let detach = arguments.detach;
    let request = request(arguments);
    let mut seen: VmMigration = client.post(&routes::vm_migrate(vm), &request).await?;
    if detach {
        return output.print(&seen, |seen| seen.id.clone());
    }
    let mut line = ProgressLine::new();
    let mut cancelled = false;
    let mut answered = Instant::now();
    let mut warned = 0;
    while !seen.phase.ended() {
        for warning in seen.warnings.iter().skip(warned) {
            line.say(&format!("warning: {warning}"));
        }
        warned = seen.warnings.len();
        line.show(seen.phase.name(), &status(&seen));
        tokio::select! {
            () = tokio::time::sleep(POLL_INTERVAL) => {}
            _ = interrupts.recv() => {
                if cancelled {
                    line.clear();
                    let id = &seen.id;
                    return Err(Failure::new(format!("stopped following migration {id}; it goes on"))
                        .hint(format!("see where the VM is: godwit vm show {vm}")));
                }
                cancelled = true;
                line.say("cancelling; press Ctrl-C again to leave the migration to the node");
                let path = routes::vm_migration_cancel(&seen.id);
                let asked = client.post::<VmMigration>(&path, &serde_json::json!({})).await;
                if let Err(error) = asked {
                    let why = Failure::from(error).message;
                    line.say(&format!("it was not cancelled: {why}"));
                }
            }
        }
        if let Some(now) =
            look(client, &routes::vm_migration(&seen.id), answered, &mut line).await?
        {
            seen = now;
            answered = Instant::now();
        }
    }
    line.clear();
    match failure(&seen, cancelled) {
        Some(failure) => Err(failure),
        None => output.print(&seen, summary),
    }
}

fn request(arguments: MigrateArguments) -> MigrateVm {
    MigrateVm {
        to: arguments.to,
        memory: match arguments.memory {
            None | Some(MemoryArgument::PreCopy) => MemoryMode::PreCopy,
            Some(MemoryArgument::PostCopy) => MemoryMode::PostCopy,
            Some(MemoryArgument::Hybrid) => MemoryMode::Hybrid,
        },
        policy: match arguments.policy {
            PolicyArgument::DoubleWrite => Policy::DoubleWrite,
        },
        window_bytes: arguments.window,
        chunk_bytes: arguments.chunk,
        max_bandwidth: arguments.max_bandwidth,
        verify: arguments.verify,
        sla: Some(arguments.sla),
        delayed_writes: arguments.delayed_writes == Switch::On,
        delayed_write_rate: arguments.delayed_write_rate,
        deadline_seconds: arguments.deadline,
        interface: arguments.interface,
        interface_budget: arguments.interface_budget,
    }
}

/// How far the move is: the disks, then the memory, then the switchover.
fn status(seen: &VmMigration) -> Status {
    let VmMigration { vm, to, memory, .. } = seen;
    let plain = |text: String| Status {
        line: format!("vm/{vm}: {text}"),
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
            let Status { line, done, note } = migration_status(disk);
            let count = seen.disks.len();
            let ready = match count {
                1 => String::new(),
                _ => format!(" ({ready} of {count} disks copied)"),
            };
            Status {
                line: format!("vm/{vm}: disk {line}{ready}"),
                done,
                note,
            }
        }
        VmMigrationPhase::Starting => plain(format!("starting QEMU at {to}")),
        VmMigrationPhase::CopyingMemory | VmMigrationPhase::PullingMemory => {
            let left = format_bytes(memory.bytes_left);
            let total = format_bytes(memory.bytes_total);
            let sent = format_bytes(memory.bytes_sent);
            let what = match seen.phase {
                VmMigrationPhase::CopyingMemory => format!("memory to {to}"),
                _ => format!("runs at {to}, memory follows"),
            };
            let pass = match memory.passes {
                0 | 1 => String::new(),
                passes => format!(", pass {passes}"),
            };
            Status {
                line: format!("vm/{vm}: {what}, {left} of {total} left, {sent} sent{pass}"),
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
        return Some(Failure::new(format!(
            "cancelled: VM '{vm}' stays on '{from}'"
        )));
    }
    Some(match &seen.error {
        Some(error) => Failure::from(error.clone()),
        None => Failure::new(format!("VM '{vm}' was not moved; the node gave no reason"))
            .hint("the node's log says more"),
    })
}

/// What a completed move did, in two lines.
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

#[cfg(test)]
mod tests {
    use godwit_node::api::{ErrorBody, ErrorCode, MemoryProgress};

    use super::*;
    use crate::fixture;

    fn moving(phase: VmMigrationPhase) -> VmMigration {
        VmMigration {
            id: "00112233445566778899aabbccddeeff".to_owned(),
            vm: "v".to_owned(),
            from: "a".to_owned(),
            to: "b".to_owned(),
            phase,
            memory_mode: MemoryMode::PreCopy,
            memory: MemoryProgress {
                bytes_total: 512 << 20,
                bytes_left: 128 << 20,
                bytes_sent: 400 << 20,
                passes: 2,
            },
            disks: vec![fixture::migration()],
            started_at: "2026-01-01T00:00:00Z".to_owned(),
            ended_at: None,
            total_seconds: Some(2.0),
            blackout_ms: Some(41.4),
            switchover_ms: Some(6.25),
            memory_bytes: 400 << 20,
            disk_bytes: 1 << 30,
            error: None,
            warnings: Vec::new(),
        }
    }

    #[test]
    fn progress_goes_from_the_disks_to_the_memory() {
        let shown = status(&moving(VmMigrationPhase::CopyingDisks));
        assert!(
            shown.line.starts_with("vm/v: disk d: copying to b"),
            "{}",
            shown.line
        );
        let shown = status(&moving(VmMigrationPhase::CopyingMemory));
        assert_eq!(
            shown.line,
            "vm/v: memory to b, 128 MiB of 512 MiB left, 400 MiB sent, pass 2"
        );
        assert_eq!(shown.done, Some((384 << 20, 512 << 20)));
        let shown = status(&moving(VmMigrationPhase::SwitchingOver));
        assert_eq!(shown.line, "vm/v: switching over to b");
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
        aborted.error = Some(ErrorBody::new(ErrorCode::Conflict, "2 things"));
        assert_eq!(failure(&aborted, false).unwrap().message, "2 things");
    }
}
