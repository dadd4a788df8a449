//! Takes VMs up again after a restart of the node: their QEMUs went on without it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use godwit_core::authority::Ownership;
use godwit_core::units::MigrationId;
use tokio::net::UnixStream;

use crate::disks::vhost::Held;
use crate::node::{Node, blocking};
use crate::store::machine::{PooledMemory, VmEntry, VmMark, VmOrigin};
use crate::vms::incoming::arrival::Incoming;
use crate::vms::incoming::post_copy_destination::Pulling;
use crate::vms::lifecycle::room;
use crate::vms::lifecycle::run;
use crate::vms::lifecycle::watch;
use crate::vms::memory::{pooled, released, relocated};
use crate::vms::outgoing::post_copy_source;
use crate::vms::vm::{Qemu, Vm, VmActivity};
use godwit_qemu::inspect;
use godwit_qemu::monitor::qmp::Qmp;
use godwit_qemu::monitor::spare::Spare;
use godwit_qemu::process::Process;

/// How long to wait before a QEMU that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// Finds the QEMUs of the VMs that were stored. Their disks are served already.
/// Those whose memory was on its way are in `held`.
pub(crate) async fn recover(
    node: &Arc<Node>,
    stored: Vec<(String, VmEntry)>,
    mut held: HashMap<String, Held>,
) {
    for (name, entry) in stored {
        let vm = Vm::new(&node.config, name, entry);
        node.vms.restore(&vm);
        let held = held.remove(&vm.name);
        // Most have none.
        vm.lock().spare = Spare::open(&vm.places).ok();
        let (path, mark) = {
            let inner = vm.lock();
            (inner.entry.qmp.clone(), inner.entry.mark.clone())
        };
        if let Some(VmMark::Pulling { .. } | VmMark::Giving { .. }) = mark {
            tokio::spawn(take_up(Arc::clone(node), vm, held));
            continue;
        }
        let error = match Qmp::connect(&path).await {
            Ok(qmp) => {
                settle(node, &vm, find(qmp), held).await;
                continue;
            }
            Err(error) => error,
        };
        match silent(node, &vm, &path).await {
            None => {
                tracing::info!(vm = vm.name, %error, "no QEMU runs the VM");
                settle(node, &vm, None, held).await;
            }
            Some(_) if runs_unheard(node, &vm) => {
                tokio::spawn(take_up(Arc::clone(node), vm, held));
            }
            Some(process) => {
                let pid = process.pid;
                tracing::warn!(vm = vm.name, pid, %error, "the VM's QEMU does not answer");
                wait_for_answer(node, &vm, process, held).await;
            }
        }
    }
}

/// The QEMU of a VM that cannot be talked to. It may not listen yet, and one that has stopped answering
/// has no room for a new connection sooner or later.
async fn silent(node: &Node, vm: &Vm, monitor: &Path) -> Option<Process> {
    match listener(monitor).await {
        Some(process) => Some(process),
        None => {
            let (places, user) = (vm.places.clone(), node.config.qemu_user.clone());
            let find = move || Process::started_in(&places, user.as_ref());
            blocking(find).await.ok()?
        }
    }
}

/// Waits for a QEMU that is there and does not answer. One that never ran its guest and never may is ended:
/// it can wait for a disk that is gone, for ever. Any other gets the time it needs, and nobody starts a
/// second one meanwhile.
async fn wait_for_answer(node: &Arc<Node>, vm: &Arc<Vm>, process: Process, held: Option<Held>) {
    if never_runs(node, vm) {
        process.kill().await;
        return settle(node, vm, None, held).await;
    }
    let process = Arc::new(process);
    let path = {
        let mut inner = vm.lock();
        inner.silent = Some(Arc::clone(&process));
        inner.entry.qmp.clone()
    };
    let (node, vm) = (Arc::clone(node), Arc::clone(vm));
    tokio::spawn(async move {
        let qemu = tokio::select! {
            qemu = connect_patiently(&node, &vm, &path, Arc::clone(&process)) => qemu,
            // The node that sends it may have taken its disks back meanwhile.
            () = never_will_run(&node, &vm) => {
                process.kill().await;
                vm.lock().silent = None;
                None
            }
        };
        if qemu.is_some() || !node.is_closing() {
            settle(&node, &vm, qemu, held).await;
        }
    });
}

/// Whether the QEMU of a VM was started for nothing: its start was not finished, or its disks are another
/// node's and none of them comes.
fn never_runs(node: &Node, vm: &Vm) -> bool {
    let (mark, moved, disks) = {
        let entry = &vm.lock().entry;
        let disks = entry.machine.disks.clone();
        (entry.mark.clone(), entry.moved_to.is_some(), disks)
    };
    let none_is_here = || {
        let undecided = |disk: &String| {
            let disk = node.disks.find(disk);
            disk.is_some_and(|disk| {
                let ownership = &disk.lock().record.ownership;
                matches!(ownership, Ownership::Serving | Ownership::Accepted { .. })
            })
        };
        !disks.is_empty() && !disks.iter().any(undecided)
    };
    match mark {
        Some(VmMark::Starting) => true,
        Some(VmMark::Incoming { .. }) => none_is_here(),
        _ => moved,
    }
}

async fn never_will_run(node: &Node, vm: &Vm) {
    while !never_runs(node, vm) {
        tokio::time::sleep(RETRY).await;
    }
}

/// What a VM does after the restart, now that it is known whether it has a QEMU.
async fn settle(node: &Arc<Node>, vm: &Arc<Vm>, qemu: Option<Qemu>, held: Option<Held>) {
    let (mark, moved) = {
        let entry = &vm.lock().entry;
        (entry.mark.clone(), entry.moved_to.is_some())
    };
    if let Some(qemu) = &qemu {
        tracing::info!(vm = vm.name, pid = qemu.process.pid, "found the VM's QEMU");
    }
    match (mark, qemu) {
        (Some(VmMark::Starting), qemu) => {
            if let Some(qemu) = qemu {
                qemu.process.kill().await;
            }
            if let Ok(guard) = vm.begin(VmActivity::Stopping, |_| Ok(())) {
                run::forget(node, vm, guard).await;
            }
        }
        // Its disks went with it: what is left here must never run.
        (_, qemu) if moved => {
            if let Some(qemu) = qemu {
                qemu.process.kill().await;
            }
            give_memory(node, vm).await;
        }
        (Some(VmMark::Incoming { migration, .. }), qemu) => {
            take_in(node, vm, &migration, qemu, held).await;
        }
        (Some(VmMark::Outgoing { runs, .. }), Some(qemu)) => {
            take_back(node, vm, qemu, runs).await;
        }
        (_, Some(qemu)) => {
            relocated::note(node, vm, qemu.process.pid);
            watch::attach(node, vm, qemu).await;
            room::take_up(node, vm).await;
        }
        (Some(VmMark::Outgoing { .. }), None) => {
            // There is nothing to go on with, and the destination hears that it does not come.
            let entry = vm.lock().entry.clone();
            pooled::keep(node, &vm.name, &entry);
            unmark(node, vm).await;
        }
        (_, None) => note_end(node, vm).await,
    }
}

/// Notes why a VM has no QEMU any more, if nobody has seen it end.
async fn note_end(node: &Arc<Node>, vm: &Arc<Vm>) {
    let monitor = vm.lock().entry.qmp.clone();
    let times = move || {
        // QEMU makes the socket when it starts, and removes it when it ends in order.
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
    watch::keep_end(node, vm, &entry).await;
}

/// Why a QEMU that started at one time is gone from a host that was started at another.
fn end_of(started: Option<SystemTime>, booted: Option<SystemTime>) -> &'static str {
    match (started, booted) {
        (Some(started), Some(booted)) if started < booted => {
            "the host was started again while it ran"
        }
        _ => "its QEMU ended while this node did not run",
    }
}

/// When this host was started.
fn boot_time() -> Option<SystemTime> {
    let statistics = std::fs::read_to_string("/proc/stat").ok()?;
    let seconds = statistics
        .lines()
        .find_map(|line| line.strip_prefix("btime "))?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds.trim().parse().ok()?))
}

/// A VM that was coming in: what became of its disks tells whether it runs here.
async fn take_in(
    node: &Arc<Node>,
    vm: &Arc<Vm>,
    migration: &str,
    qemu: Option<Qemu>,
    held: Option<Held>,
) {
    if let Some(qemu) = qemu.clone() {
        watch::attach(node, vm, qemu).await;
    }
    let migration = migration.parse::<MigrationId>().unwrap_or_default();
    let (node, vm) = (Arc::clone(node), Arc::clone(vm));
    tokio::spawn(async move {
        let Ok(guard) = vm.begin(VmActivity::Incoming(migration), |_| Ok(())) else {
            return;
        };
        Incoming::found(&node, &vm, qemu, held).decide(guard).await;
    });
}

/// A QEMU that is there and does not answer waits for its memory, so it was let run before the node
/// could store that: it is marked so now. Without its disks it was not let run.
fn runs_unheard(node: &Node, vm: &Vm) -> bool {
    let disks = vm.lock().entry.machine.disks.clone();
    let is_here = |disk: &String| {
        let disk = node.disks.find(disk);
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

/// A VM of which this node's QEMU has memory that no other has: it is gone only when nobody listens
/// at its monitor, and it may take long to answer.
async fn take_up(node: Arc<Node>, vm: Arc<Vm>, held: Option<Held>) {
    let (path, mark, moved_to) = {
        let inner = vm.lock();
        let entry = &inner.entry;
        (
            entry.qmp.clone(),
            entry.mark.clone(),
            entry.moved_to.clone(),
        )
    };
    let process = silent(&node, &vm, &path).await.map(Arc::new);
    match (mark, moved_to, process) {
        (Some(VmMark::Giving { migration }), Some(to), process) => {
            let id = migration.parse().unwrap_or_default();
            let Ok(guard) = vm.begin(VmActivity::Outgoing(id), |_| Ok(())) else {
                return;
            };
            let qemu = match process {
                Some(process) => attach_patiently(&node, &vm, &path, process).await,
                None => None,
            };
            post_copy_source::take_up(node, vm, (to, id), qemu, guard).await;
        }
        (Some(VmMark::Pulling { migration, from }), _, Some(process)) => {
            vm.lock().silent = Some(Arc::clone(&process));
            let id = migration.parse().unwrap_or_default();
            let here = (&node, &vm);
            let pulling = Pulling::found(here, Arc::clone(&process), (id, &from), held).run();
            // It may answer only once its memory moves again.
            let attaching = attach_patiently(&node, &vm, &path, process);
            tokio::join!(pulling, attaching);
        }
        _ => {
            let entry = {
                let mut inner = vm.lock();
                inner.entry.mark = None;
                inner.problem = Some(String::from("QEMU ended while the node was away"));
                inner.entry.clone()
            };
            if let Err(error) = node.store.put_vm(&vm.name, &entry).await {
                tracing::error!(vm = vm.name, %error, "cannot store the VM");
            }
        }
    }
}

/// The process that listens at a monitor's socket, whether it answers or not.
async fn listener(path: &Path) -> Option<Process> {
    let socket = UnixStream::connect(path).await.ok()?;
    let pid = socket.peer_cred().ok()?.pid()?;
    Process::open(u32::try_from(pid).ok()?).ok()
}

/// Attaches the QEMU of a VM however long it takes to answer; nothing when it ends.
async fn attach_patiently(
    node: &Arc<Node>,
    vm: &Arc<Vm>,
    path: &Path,
    process: Arc<Process>,
) -> Option<Qemu> {
    let qemu = connect_patiently(node, vm, path, process).await?;
    tracing::info!(vm = vm.name, pid = qemu.process.pid, "found the VM's QEMU");
    watch::attach(node, vm, qemu.clone()).await;
    Some(qemu)
}

/// Connects to the monitor of a QEMU however long it takes to answer; nothing when it ends, or the node does.
async fn connect_patiently(
    node: &Arc<Node>,
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
            () = node.closed() => return None,
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

/// Lets the disks of VMs whose memory was on its way wait for it. To be called before they are served.
pub(crate) fn hold_disks(node: &Arc<Node>, stored: &[(String, VmEntry)]) -> HashMap<String, Held> {
    let waits = |entry: &VmEntry| {
        matches!(
            entry.mark,
            Some(VmMark::Pulling { .. } | VmMark::Incoming { pulls: true, .. })
        )
    };
    let held = stored.iter().filter(|(_, entry)| waits(entry));
    held.map(|(name, entry)| (name.clone(), Held::new(node, &entry.machine.disks)))
        .collect()
}

/// A VM that was leaving while its disks have not left: it goes on here, if it ran when it left and
/// nobody has stopped it since.
async fn take_back(node: &Arc<Node>, vm: &Arc<Vm>, qemu: Qemu, ran: bool) {
    // A guest that its owner has stopped meanwhile does not show a migration's state.
    let state = inspect::run_state(&qemu.qmp).await;
    let moved = |state: String| {
        inspect::is_live(&state) || matches!(state.as_str(), "finish-migrate" | "postmigrate")
    };
    let ran = ran && state.is_ok_and(moved);
    let entry = vm.lock().entry.clone();
    pooled::keep(node, &vm.name, &entry);
    let problem = match pooled::may_run(node, vm) {
        Ok(()) => crate::vms::outgoing::planes::rollback::take_back(vm, &qemu.qmp, ran)
            .await
            .err()
            .map(|error| error.to_string()),
        Err(error) => Some(error.message),
    };
    watch::attach(node, vm, qemu).await;
    vm.lock().problem = problem.map(|error| format!("the guest does not go on: {error}"));
    unmark(node, vm).await;
}

/// The VM stays: the destination may hear so once that is stored.
async fn unmark(node: &Arc<Node>, vm: &Arc<Vm>) {
    let mut entry = vm.lock().entry.clone();
    entry.mark = None;
    match node.store.put_vm(&vm.name, &entry).await {
        Ok(()) => vm.lock().entry = entry,
        Err(error) => tracing::error!(vm = vm.name, %error, "cannot store that the VM stays"),
    }
}

/// A VM that is another node's now: so is its memory, or the memory was copied and is of no more use here.
async fn give_memory(node: &Arc<Node>, vm: &Arc<Vm>) {
    let entry = vm.lock().entry.clone();
    let is_given = |memory: &PooledMemory| memory.given_to.is_some();
    if entry.memory.as_ref().is_some_and(is_given) {
        let (node, vm) = (Arc::clone(node), Arc::clone(vm));
        // Until the pool can be used again. Nobody forgets the VM before, or takes its name: the memory would look as if
        // it were still this node's.
        let guard = vm.begin(VmActivity::GivingMemory, |_| Ok(()));
        tokio::spawn(async move {
            pooled::hand_over(&node, &vm.name, &entry).await;
            drop(guard);
        });
    } else {
        released::release(node, &vm.name, &entry).await;
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
