//! VMs as the API shows them.

use crate::vms::vm::{Inner, Vm};
use godwit_api::{MemoryMode, MemoryMove, MemoryProgress, VmMemory, VmState};
use godwit_context::store::machine::{VmMark, VmOrigin};
use godwit_qemu::machine::Machine;
use godwit_qemu::migration::{self, Pull, Shared};
use godwit_qemu::version::Version;

/// Returns the VM as the API shows it.
pub fn vm(vm: &Vm) -> godwit_api::Vm {
    let inner = vm.lock();
    let state = inner.state();
    let own = !matches!(inner.entry.origin, VmOrigin::Adopted);
    let console = inner.entry.machine.console && own && inner.qemu.is_some();
    godwit_api::Vm {
        name: vm.name.clone(),
        state,
        status: status(&inner, state),
        disks: inner.entry.machine.disks.clone(),
        origin: match &inner.entry.origin {
            VmOrigin::Run => String::from("run"),
            VmOrigin::Adopted => String::from("adopted"),
            VmOrigin::Received { from } => from.clone(),
        },
        moved_to: inner.entry.moved_to.clone(),
        migration: inner.migration(),
        pid: inner
            .qemu
            .as_ref()
            .map(|qemu| &qemu.process)
            .or(inner.silent.as_ref())
            .map(|process| process.pid),
        qemu_version: inner
            .qemu
            .as_ref()
            .map(|qemu| qemu.qmp.version().to_string()),
        qmp: inner.entry.qmp.display().to_string(),
        console: console.then(|| vm.places.console().display().to_string()),
        log: own
            .then(|| vm.places.log())
            .filter(|log| log.exists())
            .map(|log| log.display().to_string()),
        memory: pooled(&inner),
        command: command(vm, &inner.entry.machine),
        accelerator: inner.entry.machine.accelerator().map(str::to_owned),
        warnings: inner.warnings.clone(),
        protection: inner.protection.clone(),
        problem: inner
            .problem
            .clone()
            .or_else(|| outdated(&vm.name, &inner))
            .or_else(|| {
                let why = inner.stands_still.as_ref()?;
                Some(match &inner.cannot_go_on {
                    None => format!(
                        "{why}: it goes on when that has passed, or with 'godwit vm resume {}'",
                        vm.name
                    ),
                    Some(error) => {
                        format!(
                            "{why}: that has passed, but {error}; it is tried again until it does"
                        )
                    }
                })
            }),
    }
}

/// Returns the reason if the VM stands still because another node has had the VM since.
fn outdated(name: &str, inner: &Inner) -> Option<String> {
    let surpassed = inner.entry.surpassed.as_ref()?;
    inner.entry.moved_to.is_none().then(|| {
        let (why, by) = (surpassed.why("the VM", inner.entry.epoch), &surpassed.by);
        format!(
            "{why}; it is to stand still here: end it with 'godwit vm stop {name} --force'; or, if it is not to run at node \
             '{by}', 'godwit vm resume {name} --force'"
        )
    })
}

/// Returns QEMU's command line, with the sockets of the disks relative to the data directory.
fn command(vm: &Vm, machine: &Machine) -> Vec<String> {
    let socket = |disk: &str| format!("disks/{disk}.vhost").into();
    let line = machine.command_line(Version::RECONNECT_MS, &vm.places, socket, None, None);
    std::iter::once(machine.program.clone())
        .chain(line)
        .collect()
}

/// Returns the pooled part of the VM's memory while the VM is here.
fn pooled(inner: &Inner) -> Option<VmMemory> {
    let memory = inner.entry.memory.as_ref()?;
    inner.entry.moved_to.is_none().then(|| VmMemory {
        pool: memory.pool.clone(),
        bytes: memory.bytes,
        bytes_in_pool: memory.bytes.saturating_sub(inner.local_bytes),
        moving: inner.moving.as_ref().map(|moving| MemoryMove {
            to: moving.to,
            ended: moving.ended,
            bytes_total: moving.bytes_total,
            bytes_moved: moving.bytes_moved,
            seconds: moving.took.as_secs_f64(),
            seconds_left: moving.time_left().map(|left| left.as_secs_f64()),
            longest_hold_us: moving.longest_hold.as_micros() as u64,
            longest_still_us: moving.longest_still.as_micros() as u64,
            problem: moving.problem.clone(),
        }),
    })
}

fn status(inner: &Inner, state: VmState) -> String {
    let run_state = inner.run_state.as_deref().unwrap_or("unknown");
    match state {
        VmState::Starting => String::from("its QEMU is being started"),
        VmState::Running if let Some(VmMark::Pulling { from, .. }) = &inner.entry.mark => {
            format!("runs here, the rest of its memory follows from node '{from}'")
        }
        VmState::Running if inner.activity.migration().is_some() => {
            String::from("runs here, migrating to another node")
        }
        VmState::Running => String::from("runs here"),
        VmState::Paused if inner.qemu.is_none() => {
            String::from("its QEMU does not answer: the guest waits for the rest of its memory")
        }
        VmState::Paused => format!("stands still: QEMU says {run_state}"),
        VmState::Halted => format!("its guest has ended: QEMU says {run_state}"),
        VmState::Incoming => String::from("arrives from another node, where it runs"),
        VmState::Stopped => match &inner.entry.ended {
            Some(why) => format!("no QEMU runs it: {why}"),
            None => String::from("no QEMU runs it"),
        },
        VmState::Departed => match &inner.entry.moved_to {
            Some(node) if matches!(inner.entry.mark, Some(VmMark::Giving { .. })) => {
                format!("runs at node '{node}', the rest of its memory is still here")
            }
            Some(node) => format!("moved to node '{node}'"),
            None => String::from("moved to another node"),
        },
        VmState::Backup => String::from("this node takes it over if its node is lost"),
    }
}

/// Converts the progress of the memory for the API.
pub(super) const fn memory_progress(seen: migration::Progress) -> MemoryProgress {
    let migration::Progress {
        bytes_total,
        bytes_left,
        bytes_sent,
        passes,
    } = seen;
    MemoryProgress {
        bytes_total,
        bytes_left,
        bytes_sent,
        passes,
    }
}

/// Returns the fate of memory that both QEMUs map.
pub(super) const fn shared(mode: MemoryMode) -> Shared {
    match mode {
        MemoryMode::ZeroCopy => Shared::Stays,
        MemoryMode::PreCopy | MemoryMode::PostCopy | MemoryMode::Hybrid => Shared::Moves,
    }
}

/// Returns QEMU's kind of pull for a memory mode.
pub(super) const fn pull(mode: MemoryMode) -> Pull {
    match mode {
        MemoryMode::PreCopy | MemoryMode::ZeroCopy => Pull::Never,
        MemoryMode::PostCopy => Pull::AtOnce,
        MemoryMode::Hybrid => Pull::AfterFirstPass,
    }
}
