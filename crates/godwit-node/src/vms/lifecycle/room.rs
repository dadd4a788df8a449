//! Stops a VM while its host has no room for what it writes, or while a part of a disk cannot be had that it reads, and lets
//! it go on when that has passed.
//!
//! Its requests wait in the disk's engine meanwhile, which tells of it again and again. A guest that stands
//! still does not notice the time that passes. That it was stopped, why, and for which disk, is kept in its
//! QEMU before it is, so that a restart of the node does not leave it so: the node's own records may lie
//! on the file system that is full.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use serde_json::json;

use crate::disks::disk::Disk;
use crate::failpoint;
use crate::node::{Node, blocking};
use crate::vms::incoming::doubt::{self, Verdict};
use crate::vms::lifecycle::run::stored_badly;
use crate::vms::memory::pooled;
use crate::vms::vm::{Inner, Qemu, Vm, VmActivity};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_qemu::inspect;
use godwit_qemu::monitor::qmp::{Qmp, QmpError};
use godwit_qemu::process::Process;

/// How often the file systems are asked for room.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Bytes that must be free before a guest goes on.
const WANTED: u64 = 16 << 20;

/// Why a machine stands still, and for which disk.
#[derive(Clone, Debug)]
pub(crate) enum Still {
    /// There is no room for what it writes.
    Room(String),
    /// A part is not here that it reads.
    Missing(String),
}

impl Still {
    /// The object in QEMU that holds the disk's name.
    const fn note(&self) -> &'static str {
        match self {
            Self::Room(_) => ROOM_NOTE,
            Self::Missing(_) => MISSING_NOTE,
        }
    }

    fn disk(&self) -> &str {
        match self {
            Self::Room(disk) | Self::Missing(disk) => disk,
        }
    }
}

impl fmt::Display for Still {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Room(disk) => write!(f, "no space is left for disk {disk}"),
            Self::Missing(disk) => write!(
                f,
                "a part of disk {disk} that it reads is not here and cannot be had now"
            ),
        }
    }
}

const ROOM_NOTE: &str = "godwit-lacks-room";
const MISSING_NOTE: &str = "godwit-lacks-part";

/// A disk's engine has requests of its VM that wait for room, or long for a part of the disk. Returns at once.
pub(crate) fn ran_out(node: &Arc<Node>, why: Still) {
    let Some(vm) = node
        .vms
        .user_of(why.disk(), None)
        .and_then(|name| node.vms.find(&name))
    else {
        return;
    };
    let node = Arc::clone(node);
    tokio::spawn(async move {
        match pause(&node, &vm, &why).await {
            Ok(true) => until_it_can_go_on(&node, &vm).await,
            // Something else is being done with it, and the engine will tell of it again.
            Ok(false) => {}
            Err(error) => {
                let disk = why.disk();
                tracing::error!(vm = vm.name, disk, %error, "cannot stop the VM that has to wait");
            }
        }
    });
}

/// Takes up again what the node was waiting for when it ended.
pub(in crate::vms) async fn take_up(node: &Arc<Node>, vm: &Arc<Vm>) {
    failpoint::reach(String::from("vm::take-up")).await;
    let found = look_for_note(vm).await;
    let (node, vm) = (Arc::clone(node), Arc::clone(vm));
    match found {
        Ok(false) => {}
        Ok(true) => _ = tokio::spawn(async move { until_it_can_go_on(&node, &vm).await }),
        Err(error) => {
            // A machine that is taken for one that nobody stopped would stand still for ever.
            tracing::warn!(vm = vm.name, %error, "whether the VM stands still for its disks is not known yet");
            tokio::spawn(async move { until_its_note_is_read(&node, &vm).await });
        }
    }
}

/// Whether an earlier life of this node stopped the machine, which is noted with it then.
async fn look_for_note(vm: &Vm) -> Result<bool, QmpError> {
    let Ok(Qemu { qmp, process }) = vm.qemu() else {
        return Ok(false);
    };
    let Some(why) = noted(&qmp).await? else {
        return Ok(false);
    };
    let mut inner = vm.lock();
    if inner.stands_still.is_some() || !still_runs(&inner, &process) {
        // It was stopped anew meanwhile, and somebody waits for that; or it has ended.
        return Ok(false);
    }
    inner.stands_still = Some(why);
    Ok(true)
}

async fn until_its_note_is_read(node: &Arc<Node>, vm: &Arc<Vm>) {
    loop {
        tokio::select! {
            () = node.closed() => return,
            () = tokio::time::sleep(ASK_EVERY) => {}
        }
        match look_for_note(vm).await {
            Ok(false) => return,
            Ok(true) => return until_it_can_go_on(node, vm).await,
            Err(error) => tracing::debug!(vm = vm.name, %error, "the monitor does not answer yet"),
        }
    }
}

/// Stops the VM. False when that cannot be now.
async fn pause(node: &Arc<Node>, vm: &Arc<Vm>, why: &Still) -> Result<bool, ErrorBody> {
    let may = |inner: &Inner| {
        let runs = inner.run_state.as_deref() == Some("running");
        let entry = &inner.entry;
        let alone =
            entry.mark.is_none() && entry.moved_to.is_none() && inner.stands_still.is_none();
        (runs && alone)
            .then_some(())
            .ok_or_else(|| ErrorBody::new(ErrorCode::Conflict, String::new()))
    };
    let Ok(_guard) = vm.begin(VmActivity::Pausing, may) else {
        return Ok(false);
    };
    let Ok(Qemu { qmp, process }) = vm.qemu() else {
        return Ok(false);
    };
    if let Err(error) = note(&qmp, why).await {
        tracing::error!(vm = vm.name, %error, "a restart of the node would leave the VM standing still");
    }
    tracing::warn!(vm = vm.name, %why, "the VM stands still until it can go on");
    {
        let mut inner = vm.lock();
        if !still_runs(&inner, &process) {
            return Ok(false);
        }
        inner.stands_still = Some(why.clone());
        inner.cannot_go_on = None;
    }
    let engines = || {
        machine_disks(node, vm)
            .into_iter()
            .filter_map(|disk| disk.engine())
    };
    engines().for_each(|engine| engine.machine_stands_still());
    match qmp.execute("stop", json!({})).await {
        Ok(_) => vm.lock().run_state = Some(String::from("paused")),
        Err(error @ (QmpError::Timeout { .. } | QmpError::Closed(_))) => {
            // It may have stopped, or stop yet: whether it has is asked from now on.
            tracing::warn!(vm = vm.name, %error, "whether the VM stands still is not known");
        }
        Err(error) => {
            engines().for_each(|engine| engine.machine_goes_on());
            // A note that stays is replaced by the next.
            let _ = forget(vm, &qmp).await;
            return Err(ErrorBody::new(ErrorCode::Internal, error.to_string()));
        }
    }
    Ok(true)
}

/// Whether this process is the machine's. One that ended while its monitor was asked took with it that it stood still.
fn still_runs(inner: &Inner, process: &Arc<Process>) -> bool {
    let same = |qemu: &Qemu| Arc::ptr_eq(&qemu.process, process);
    inner.qemu.as_ref().is_some_and(same)
}

/// Waits until the VM runs again, by itself or because somebody wants it.
async fn until_it_can_go_on(node: &Arc<Node>, vm: &Arc<Vm>) {
    loop {
        tokio::select! {
            () = node.closed() => return,
            () = tokio::time::sleep(ASK_EVERY) => {}
        }
        // Also nothing when QEMU has ended.
        let Some(why) = vm.lock().stands_still.clone() else {
            return;
        };
        let Ok(Qemu { qmp, .. }) = vm.qemu() else {
            continue;
        };
        let goes_on = inspect::run_state(&qmp).await.is_ok_and(|s| s == "running");
        let disks = machine_disks(node, vm);
        let waits = waits_long(&disks)
            || match why {
                Still::Room(_) => !has_room(disks).await,
                Still::Missing(_) => false,
            };
        if waits && !goes_on {
            vm.lock().cannot_go_on = None;
            continue;
        }
        match resume(node, &vm.name, false).await {
            Ok(()) => return,
            Err(error) => tell(vm, error.message),
        }
    }
}

/// What it waited for is here, and it does not go on: whoever looks after it should know why.
fn tell(vm: &Vm, error: String) {
    let mut inner = vm.lock();
    if inner.stands_still.is_some() && inner.cannot_go_on.as_ref() != Some(&error) {
        tracing::warn!(vm = vm.name, error, "the VM does not go on yet; trying on");
        inner.cannot_go_on = Some(error);
    }
}

/// Lets a VM go on that stands still.
///
/// # Errors
/// It is not here, something is under way with it, QEMU does not let it, or it arrives and its source does not say whether
/// it gave it away, or another node has had it since: `force` overrides the last two.
pub(crate) async fn resume(node: &Arc<Node>, name: &str, force: bool) -> Result<(), ErrorBody> {
    let vm = node.vms.get(name)?;
    let verdicts = vm.lock().verdicts.clone();
    if let Some(verdicts) = verdicts {
        return match force {
            true => doubt::decide(&vm, &verdicts, Verdict::Ours).await,
            false => Err(doubt::warning(name, &vm.lock())),
        };
    }
    let _guard = vm.begin(VmActivity::Resuming, |inner| {
        vm.is_here(inner)?;
        if force { Ok(()) } else { vm.is_current(inner) }
    })?;
    let qmp = vm.qemu()?.qmp;
    pooled::may_run(node, &vm)?;
    override_later_owner(node, &vm).await?;
    qmp.execute("cont", json!({})).await.map_err(|error| {
        let text = format!("VM {name} does not go on: {error}");
        ErrorBody::new(ErrorCode::Conflict, text).hint(format!("see 'godwit vm show {name}'"))
    })?;
    if let Ok(state) = inspect::run_state(&qmp).await {
        vm.lock().run_state = Some(state);
    }
    for disk in machine_disks(node, &vm) {
        if let Some(engine) = disk.engine() {
            engine.machine_goes_on();
        }
    }
    tracing::info!(vm = name, "the VM goes on");
    if let Some(why) = forget(&vm, &qmp).await {
        let node = Arc::clone(node);
        tokio::spawn(async move { until_its_note_is_removed(&node, &vm, &why).await });
    }
    Ok(())
}

/// An operator insists that the VM is this node's, though another node has had it since: that holds it then.
async fn override_later_owner(node: &Node, vm: &Vm) -> Result<(), ErrorBody> {
    let mut entry = vm.lock().entry.clone();
    let Some(surpassed) = entry.surpassed.take() else {
        return Ok(());
    };
    entry.epoch = surpassed.next(entry.epoch);
    let stored = node.store.put_vm(&vm.name, &entry).await;
    stored.map_err(|error| stored_badly(&vm.name, &error))?;
    vm.lock().entry = entry;
    Ok(())
}

/// Keeps in QEMU why its machine stands still.
async fn note(qmp: &Qmp, why: &Still) -> Result<(), QmpError> {
    while let Some(earlier) = noted(qmp).await? {
        remove_note(qmp, &earlier).await?;
    }
    let object = json!({ "qom-type": "secret", "id": why.note(), "data": why.disk() });
    qmp.execute("object-add", object).await.map(drop)
}

/// Why QEMU's machine stands still, as an earlier life of this node noted.
async fn noted(qmp: &Qmp) -> Result<Option<Still>, QmpError> {
    if let Some(disk) = noted_disk(qmp, ROOM_NOTE).await? {
        return Ok(Some(Still::Room(disk)));
    }
    Ok(noted_disk(qmp, MISSING_NOTE).await?.map(Still::Missing))
}

async fn noted_disk(qmp: &Qmp, note: &str) -> Result<Option<String>, QmpError> {
    let data = json!({ "path": format!("/objects/{note}"), "property": "data" });
    match qmp.execute("qom-get", data).await {
        Ok(disk) => Ok(disk.as_str().map(str::to_owned)),
        // There is no such object.
        Err(QmpError::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

async fn remove_note(qmp: &Qmp, why: &Still) -> Result<(), QmpError> {
    qmp.execute("object-del", json!({ "id": why.note() }))
        .await
        .map(drop)
}

/// The VM does not stand still any more. What is still noted of that, when QEMU did not hear that it is not so.
async fn forget(vm: &Vm, qmp: &Qmp) -> Option<Still> {
    let why = {
        let mut inner = vm.lock();
        inner.cannot_go_on = None;
        inner.stands_still.take()?
    };
    match remove_note(qmp, &why).await {
        Ok(()) => None,
        // It was never noted.
        Err(QmpError::Refused { .. }) => None,
        Err(error) => {
            tracing::warn!(vm = vm.name, %error, "QEMU keeps the note that the VM stands still for now");
            Some(why)
        }
    }
}

/// The next life of this node would let a machine go on that somebody has stopped since.
async fn until_its_note_is_removed(node: &Arc<Node>, vm: &Arc<Vm>, why: &Still) {
    loop {
        tokio::select! {
            () = node.closed() => return,
            () = tokio::time::sleep(ASK_EVERY) => {}
        }
        let Ok(Qemu { qmp, .. }) = vm.qemu() else {
            return;
        };
        // Nobody notes anew that it stands still while this is held.
        let Ok(_guard) = vm.begin(VmActivity::Resuming, |_| Ok(())) else {
            continue;
        };
        // One that stands still again has noted that instead.
        let again = vm.lock().stands_still.is_some();
        if again
            || !matches!(
                remove_note(&qmp, why).await,
                Err(QmpError::Closed(_) | QmpError::Timeout { .. })
            )
        {
            return;
        }
    }
}

/// Whether a part of one of these cannot be had that a machine waits for.
fn waits_long(disks: &[Arc<Disk>]) -> bool {
    let waits = |disk: &Arc<Disk>| disk.engine().is_some_and(|it| it.snapshot().waits_long);
    disks.iter().any(waits)
}

fn machine_disks(node: &Node, vm: &Vm) -> Vec<Arc<Disk>> {
    let disks = vm.lock().entry.machine.disks.clone();
    disks
        .iter()
        .filter_map(|disk| node.disks.find(disk))
        .collect()
}

/// Whether all images that are files could grow. Of devices that cannot be told.
async fn has_room(disks: Vec<Arc<Disk>>) -> bool {
    let paths: Vec<PathBuf> = disks
        .iter()
        .map(|disk| disk.lock().entry.path.clone())
        .collect();
    let asked = blocking(move || paths.iter().all(|path| path.is_file() && can_grow(path)));
    asked.await.unwrap_or(false)
}

/// Whether bytes can be had where this file is: also quotas and reserved blocks count. Blocks.
fn can_grow(path: &Path) -> bool {
    let folder = path.parent().unwrap_or(path);
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, WANTED).is_ok(),
        Err(_) => rustix::fs::statvfs(folder)
            .is_ok_and(|space| space.f_bavail.saturating_mul(space.f_frsize) >= WANTED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_can_grow_where_there_is_room_and_the_attempt_leaves_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(can_grow(&folder.path().join("disk.raw")));
        let mut left = std::fs::read_dir(folder.path()).expect("a folder");
        assert!(left.next().is_none());
        assert!(!can_grow(Path::new("/proc/self/disk.raw")));
    }
}
