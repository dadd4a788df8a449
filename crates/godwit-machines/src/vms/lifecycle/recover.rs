//! Recovers VMs after a restart of the node: their QEMUs went on without the node.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use godwit_core::authority::Ownership;
use godwit_core::units::MigrationId;
use godwit_move::Step;
use tokio::net::UnixStream;

use crate::vms::Vms;
use crate::vms::incoming::arrival::Incoming;
use crate::vms::incoming::post_copy_destination::Pulling;
use crate::vms::lifecycle::room;
use crate::vms::lifecycle::run;
use crate::vms::lifecycle::taken;
use crate::vms::lifecycle::watch;
use crate::vms::memory::{pooled, released, relocated};
use crate::vms::outgoing::{post_copy_source, table};
use crate::vms::vm::{Qemu, Vm, VmActivity};
use godwit_context::blocking;
use godwit_context::store::machine::{PooledMemory, VmEntry, VmMark, VmOrigin};
use godwit_disks::disks::vhost::Held;
use godwit_qemu::inspect;
use godwit_qemu::migration::device_state;
use godwit_qemu::monitor::qmp::Qmp;
use godwit_qemu::monitor::spare::Spare;
use godwit_qemu::process::Process;

/// Time between two attempts to reach a silent QEMU.
const RETRY: Duration = Duration::from_secs(1);

/// Finds the QEMUs of the stored VMs, whose disks are served already. `held` has the holds of VMs whose memory was on
/// the way.
pub async fn recover(
    vms: &Arc<Vms>,
    stored: Vec<(String, VmEntry)>,
    mut held: HashMap<String, Held>,
) {
    for (name, entry) in stored {
        let vm = Vm::new(&vms.context.config, name, entry);
        vms.restore(&vm);
        let held = held.remove(&vm.name);
        device_state::free_waiting(&vm.places);
        // Most VMs have no spare monitor.
        vm.lock().spare = Spare::open(&vm.places).ok();
        let (path, mark) = {
            let inner = vm.lock();
            (inner.entry.qmp.clone(), inner.entry.mark.clone())
        };
        if let Some(VmMark::Pulling { .. } | VmMark::Giving { .. }) = mark {
            godwit_context::spawn(take_up(Arc::clone(vms), vm, held));
            continue;
        }
        let error = match Qmp::connect(&path).await {
            Ok(qmp) => {
                settle(vms, &vm, find(qmp), held).await;
                continue;
            }
            Err(error) => error,
        };
        match silent(vms, &vm, &path).await {
            None => {
                tracing::info!(vm = vm.name, %error, "no QEMU runs the VM");
                settle(vms, &vm, None, held).await;
            }
            Some(_) if runs_unheard(vms, &vm) => {
                godwit_context::spawn(take_up(Arc::clone(vms), vm, held));
            }
            Some(process) => {
                let pid = process.pid;
                tracing::warn!(vm = vm.name, pid, %error, "the VM's QEMU does not answer");
                wait_for_answer(vms, &vm, process, held).await;
            }
        }
    }
}

/// Finds the QEMU of a VM whose monitor does not answer. QEMU may not listen yet, or has stopped answering and has no
/// room for a new connection.
async fn silent(vms: &Vms, vm: &Vm, monitor: &Path) -> Option<Process> {
    match listener(monitor).await {
        Some(process) => Some(process),
        None => {
            let (places, user) = (vm.places.clone(), vms.context.config.qemu_user.clone());
            let find = move || Process::started_in(&places, user.as_ref());
            blocking(find).await.ok()?
        }
    }
}

/// Waits for a running but silent QEMU. A QEMU without a right to run the guest, now or later, is ended: a wait for a
/// lost disk may last for ever. Any other QEMU gets unlimited time, and no second QEMU is started meanwhile.
async fn wait_for_answer(vms: &Arc<Vms>, vm: &Arc<Vm>, process: Process, held: Option<Held>) {
    if never_runs(vms, vm) {
        process.kill().await;
        return settle(vms, vm, None, held).await;
    }
    let process = Arc::new(process);
    let path = {
        let mut inner = vm.lock();
        inner.silent = Some(Arc::clone(&process));
        inner.entry.qmp.clone()
    };
    let (vms, vm) = (Arc::clone(vms), Arc::clone(vm));
    godwit_context::spawn(async move {
        let qemu = tokio::select! {
            qemu = connect_patiently(&vms, &vm, &path, Arc::clone(&process)) => qemu,
            // The sending node may have taken the disks back meanwhile.
            () = never_will_run(&vms, &vm) => {
                process.kill().await;
                vm.lock().silent = None;
                None
            }
        };
        if qemu.is_some() || !vms.context.is_closing() {
            settle(&vms, &vm, qemu, held).await;
        }
    });
}

/// Returns true if the QEMU was started in vain: the start was not finished, or the disks belong to another node and no
/// disk comes.
fn never_runs(vms: &Vms, vm: &Vm) -> bool {
    let (mark, moved, disks) = {
        let entry = &vm.lock().entry;
        let disks = entry.machine.disks.clone();
        (entry.mark.clone(), entry.moved_to.is_some(), disks)
    };
    let none_is_here = || {
        let undecided = |disk: &String| {
            let disk = vms.disks.find(disk);
            disk.is_some_and(|disk| {
                let ownership = &disk.lock().record.ownership;
                matches!(ownership, Ownership::Serving | Ownership::Accepted { .. })
            })
        };
        !disks.is_empty() && !disks.iter().any(undecided)
    };
    match mark {
        Some(VmMark::Starting | VmMark::Taken) => true,
        Some(VmMark::Incoming { .. }) => none_is_here(),
        _ => moved,
    }
}

async fn never_will_run(vms: &Vms, vm: &Vm) {
    while !never_runs(vms, vm) {
        tokio::time::sleep(RETRY).await;
    }
}

/// Settles a VM after the restart, once the QEMU is found or known to be gone.
async fn settle(vms: &Arc<Vms>, vm: &Arc<Vm>, qemu: Option<Qemu>, held: Option<Held>) {
    let entry = vm.lock().entry.clone();
    let moved = entry.moved_to.is_some();
    if let Some(qemu) = &qemu {
        tracing::info!(vm = vm.name, pid = qemu.process.pid, "found the VM's QEMU");
    }
    match (entry.mark.clone(), qemu) {
        (Some(VmMark::Starting), qemu) => {
            if let Some(qemu) = qemu {
                qemu.process.kill().await;
            }
            if let Ok(guard) = vm.begin(VmActivity::Stopping, |_| Ok(())) {
                run::forget(vms, vm, guard).await;
            }
        }
        (Some(VmMark::Taken), qemu) => {
            if let Some(qemu) = qemu {
                qemu.process.kill().await;
            }
            if let Ok(guard) = vm.begin(VmActivity::Starting, |_| Ok(())) {
                tokio::spawn(taken::start(Arc::clone(vms), Arc::clone(vm), guard));
            }
        }
        // The disks moved with the VM: a QEMU left here must never run the guest.
        (_, qemu) if moved => {
            if let Some(qemu) = qemu {
                qemu.process.kill().await;
            }
            give_memory(vms, vm).await;
        }
        (Some(VmMark::Incoming { migration, .. }), qemu) => {
            take_in(vms, vm, &migration, qemu, held).await;
        }
        (
            Some(VmMark::Outgoing {
                migration, runs, ..
            }),
            qemu,
        ) => {
            let course = table::course(&entry, &migration, qemu.is_some());
            match (course.step(), qemu) {
                (Step::TakeBack(_), Some(qemu)) => take_back(vms, vm, qemu, runs).await,
                // Without a QEMU the VM cannot go on, and the destination learns of the end.
                _ => {
                    pooled::keep(vms, &vm.name, &entry);
                    unmark(vms, vm).await;
                }
            }
        }
        (_, Some(qemu)) => {
            relocated::note(vms, vm, qemu.process.pid);
            watch::attach(vms, vm, qemu).await;
            room::take_up(vms, vm).await;
        }
        (_, None) => note_end(vms, vm).await,
    }
}

/// Records the reason for a QEMU's end while the node was down.
async fn note_end(vms: &Arc<Vms>, vm: &Arc<Vm>) {
    let monitor = vm.lock().entry.qmp.clone();
    let times = move || {
        // QEMU makes the socket when it starts, and removes the socket at an orderly end.
        let started = std::fs::symlink_metadata(monitor).and_then(|it| it.modified());
        (started.ok(), boot_time())
    };
    let (started, booted) = blocking(times).await.unwrap_or_default();
    let entry = {
        let mut inner = vm.lock();
        if inner.entry.ended.is_some() {
            return;
        }
        inner.entry.ended = Some(String::from(end_of(started, booted)));
        inner.entry.clone()
    };
    watch::keep_end(vms, vm, &entry).await;
}

/// Returns the reason for a QEMU's end from its start time and the host's boot time.
fn end_of(started: Option<SystemTime>, booted: Option<SystemTime>) -> &'static str {
    match (started, booted) {
        (Some(started), Some(booted)) if started < booted => {
            "the host was started again while it ran"
        }
        _ => "its QEMU ended while this node did not run",
    }
}

/// Returns the time of the host's boot.
fn boot_time() -> Option<SystemTime> {
    let statistics = std::fs::read_to_string("/proc/stat").ok()?;
    let seconds = statistics
        .lines()
        .find_map(|line| line.strip_prefix("btime "))?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds.trim().parse().ok()?))
}

/// Settles a VM found incoming: the disks decide if the VM runs here.
async fn take_in(
    vms: &Arc<Vms>,
    vm: &Arc<Vm>,
    migration: &str,
    qemu: Option<Qemu>,
    held: Option<Held>,
) {
    if let Some(qemu) = qemu.clone() {
        watch::attach(vms, vm, qemu).await;
    }
    let migration = migration.parse::<MigrationId>().unwrap_or_default();
    let (vms, vm) = (Arc::clone(vms), Arc::clone(vm));
    godwit_context::spawn(async move {
        let Ok(guard) = vm.begin(VmActivity::Incoming(migration), |_| Ok(())) else {
            return;
        };
        Incoming::found(&vms, &vm, qemu, held).decide(guard).await;
    });
}

/// Returns true if a silent QEMU waits for memory, and marks the VM as pulling: the guest was resumed before the node
/// could store the mark. Without the disks the guest was not resumed.
fn runs_unheard(vms: &Vms, vm: &Vm) -> bool {
    let disks = vm.lock().entry.machine.disks.clone();
    let is_here = |disk: &String| {
        let disk = vms.disks.find(disk);
        disk.is_some_and(|disk| disk.lock().record.ownership == Ownership::Serving)
    };
    if !disks.iter().all(is_here) {
        return false;
    }
    let mut inner = vm.lock();
    let entry = &mut inner.entry;
    let (
        Some(VmMark::Incoming {
            migration, pulls, ..
        }),
        VmOrigin::Received { from },
    ) = (&entry.mark, &entry.origin)
    else {
        return false;
    };
    if *pulls {
        entry.mark = Some(VmMark::Pulling {
            migration: migration.clone(),
            from: from.clone(),
        });
        return true;
    }
    false
}

/// Takes up a VM whose QEMU here has the only copy of some memory. The QEMU is gone only if no process listens at the
/// monitor, and may take long to answer.
async fn take_up(vms: Arc<Vms>, vm: Arc<Vm>, held: Option<Held>) {
    let (path, mark, moved_to) = {
        let inner = vm.lock();
        let entry = &inner.entry;
        (
            entry.qmp.clone(),
            entry.mark.clone(),
            entry.moved_to.clone(),
        )
    };
    let process = silent(&vms, &vm, &path).await.map(Arc::new);
    match (mark, moved_to, process) {
        (Some(VmMark::Giving { migration }), Some(to), process) => {
            let id = migration.parse().unwrap_or_default();
            let Ok(guard) = vm.begin(VmActivity::Outgoing(id), |_| Ok(())) else {
                return;
            };
            let qemu = match process {
                Some(process) => attach_patiently(&vms, &vm, &path, process).await,
                None => None,
            };
            post_copy_source::take_up(vms, vm, (to, id), qemu, guard).await;
        }
        (Some(VmMark::Pulling { migration, from }), _, Some(process)) => {
            vm.lock().silent = Some(Arc::clone(&process));
            let id = migration.parse().unwrap_or_default();
            let here = (&vms, &vm);
            let pulling = Pulling::found(here, Arc::clone(&process), (id, &from), held).run();
            // QEMU may answer only once the memory moves again.
            let attaching = attach_patiently(&vms, &vm, &path, process);
            tokio::join!(pulling, attaching);
        }
        _ => {
            let entry = {
                let mut inner = vm.lock();
                inner.entry.mark = None;
                inner.problem = Some(String::from("QEMU ended while the node was away"));
                inner.entry.clone()
            };
            if let Err(error) = vms.context.store.put_vm(&vm.name, &entry).await {
                tracing::error!(vm = vm.name, %error, "cannot store the VM");
            }
        }
    }
}

/// Returns the process that listens at a monitor's socket, even a silent one.
async fn listener(path: &Path) -> Option<Process> {
    let socket = UnixStream::connect(path).await.ok()?;
    let pid = socket.peer_cred().ok()?.pid()?;
    Process::open(u32::try_from(pid).ok()?).ok()
}

/// Attaches the QEMU of a VM, without a time limit. Returns `None` if QEMU ends.
async fn attach_patiently(
    vms: &Arc<Vms>,
    vm: &Arc<Vm>,
    path: &Path,
    process: Arc<Process>,
) -> Option<Qemu> {
    let qemu = connect_patiently(vms, vm, path, process).await?;
    tracing::info!(vm = vm.name, pid = qemu.process.pid, "found the VM's QEMU");
    watch::attach(vms, vm, qemu.clone()).await;
    Some(qemu)
}

/// Connects to the monitor of a QEMU, without a time limit. Returns `None` if QEMU ends or the node closes.
async fn connect_patiently(
    vms: &Arc<Vms>,
    vm: &Arc<Vm>,
    path: &Path,
    process: Arc<Process>,
) -> Option<Qemu> {
    loop {
        let connected = tokio::select! {
            connected = Qmp::connect(path) => connected,
            () = process.ended() => {
                vm.lock().silent = None;
                return None;
            }
            () = vms.context.closed() => return None,
        };
        match connected {
            Ok(qmp) => return Some(Qemu { qmp, process }),
            Err(error) => {
                tracing::debug!(vm = vm.name, %error, "the VM's QEMU does not answer; trying again");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// Holds the disks of VMs with memory on the way until the memory arrives. To be called before the disks are served.
pub fn hold_disks(vms: &Arc<Vms>, stored: &[(String, VmEntry)]) -> HashMap<String, Held> {
    let waits = |entry: &VmEntry| {
        matches!(
            entry.mark,
            Some(VmMark::Pulling { .. } | VmMark::Incoming { pulls: true, .. })
        )
    };
    let held = stored.iter().filter(|(_, entry)| waits(entry));
    held.map(|(name, entry)| (name.clone(), Held::new(&vms.disks, &entry.machine.disks)))
        .collect()
}

/// Takes back a leaving VM whose disks have not left. The guest goes on here if running at the move's start and not
/// stopped by an operator since.
async fn take_back(vms: &Arc<Vms>, vm: &Arc<Vm>, qemu: Qemu, ran: bool) {
    // A guest stopped by an operator meanwhile does not show a migration's state.
    let state = inspect::run_state(&qemu.qmp).await;
    let moved = |state: String| {
        inspect::is_live(&state) || matches!(state.as_str(), "finish-migrate" | "postmigrate")
    };
    let ran = ran && state.is_ok_and(moved);
    let entry = vm.lock().entry.clone();
    pooled::keep(vms, &vm.name, &entry);
    let problem = match pooled::may_run(vms, vm) {
        Ok(()) => crate::vms::outgoing::planes::rollback::take_back(vm, &qemu.qmp, ran)
            .await
            .err()
            .map(|error| error.to_string()),
        Err(error) => Some(error.message),
    };
    watch::attach(vms, vm, qemu).await;
    vm.lock().problem = problem.map(|error| format!("the guest does not go on: {error}"));
    unmark(vms, vm).await;
}

/// Removes the mark of the move. The destination may learn of the end afterwards.
async fn unmark(vms: &Arc<Vms>, vm: &Arc<Vm>) {
    let mut entry = vm.lock().entry.clone();
    entry.mark = None;
    match vms.context.store.put_vm(&vm.name, &entry).await {
        Ok(()) => vm.lock().entry = entry,
        Err(error) => tracing::error!(vm = vm.name, %error, "cannot store that the VM stays"),
    }
}

/// Gives away or releases the memory of a departed VM: the memory moved too, or was copied and has no use here any
/// more.
async fn give_memory(vms: &Arc<Vms>, vm: &Arc<Vm>) {
    let entry = vm.lock().entry.clone();
    let is_given = |memory: &PooledMemory| memory.given_to.is_some();
    if entry.memory.as_ref().is_some_and(is_given) {
        let (vms, vm) = (Arc::clone(vms), Arc::clone(vm));
        // Held until the pool is usable again. Meanwhile the VM is not forgotten, and the name is not reused: the
        // memory would look like this node's.
        let guard = vm.begin(VmActivity::GivingMemory, |_| Ok(()));
        godwit_context::spawn(async move {
            pooled::hand_over(&vms, &vm.name, &entry).await;
            drop(guard);
        });
    } else {
        released::release(vms, &vm.name, &entry).await;
    }
}

fn find(qmp: Qmp) -> Option<Qemu> {
    let process = Process::open(qmp.pid()?).ok()?;
    Some(Qemu {
        qmp,
        process: Arc::new(process),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_of_the_host_is_told_from_other_ends() {
        let booted = boot_time();
        assert!(booted.is_some_and(|booted| booted < SystemTime::now()));
        let before = booted.and_then(|booted| booted.checked_sub(Duration::from_secs(60)));
        assert!(end_of(before, booted).starts_with("the host was started again"));
        for (started, booted) in [
            (Some(SystemTime::now()), booted),
            (None, booted),
            (before, None),
        ] {
            assert!(end_of(started, booted).starts_with("its QEMU ended"));
        }
    }
}
