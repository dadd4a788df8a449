//! Pauses a VM while the host has no room for the guest's writes, or while a missing part of a disk is out of reach for
//! the guest's reads, and resumes the VM afterwards.
//!
//! The VM's requests wait in the disk's engine meanwhile, which reports the wait again and again. A paused guest does
//! not notice the passing time. The reason for the pause and the disk are noted in QEMU before the pause, so a
//! restarted node still resumes the VM: the node's own records may lie on the full file system.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use serde_json::json;

use crate::vms::Vms;
use crate::vms::incoming::doubt::{self, Verdict};
use crate::vms::lifecycle::run::stored_badly;
use crate::vms::memory::pooled;
use crate::vms::vm::{Inner, Qemu, Vm, VmActivity};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::failpoint;
use godwit_disks::disks::disk::Disk;
use godwit_qemu::inspect;
use godwit_qemu::monitor::qmp::{Qmp, QmpError};
use godwit_qemu::process::Process;

/// Time between two checks for room.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Free bytes required before a guest is resumed.
const WANTED: u64 = 16 << 20;

/// The reason for a pause, with the disk.
#[derive(Clone, Debug)]
pub enum Still {
    /// No room for writes.
    Room(String),
    /// A part needed by a read is not here.
    Missing(String),
}

impl Still {
    /// Returns the id of QEMU's object with the disk's name.
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

/// Handles a disk's engine whose requests wait for room, or for a long time for a part of the disk. Returns at once.
pub fn ran_out(vms: &Arc<Vms>, why: Still) {
    let Some(vm) = vms
        .user_of(why.disk(), None)
        .and_then(|name| vms.find(&name))
    else {
        return;
    };
    let vms = Arc::clone(vms);
    godwit_context::spawn(async move {
        match pause(&vms, &vm, &why).await {
            Ok(true) => until_it_can_go_on(&vms, &vm).await,
            // The VM has another activity, and the engine will report again.
            Ok(false) => {}
            Err(error) => {
                let disk = why.disk();
                tracing::error!(vm = vm.name, disk, %error, "cannot stop the VM that has to wait");
            }
        }
    });
}

/// Takes up the wait that was under way when the node ended.
pub(in crate::vms) async fn take_up(vms: &Arc<Vms>, vm: &Arc<Vm>) {
    failpoint::reach(String::from("vm::take-up")).await;
    let found = look_for_note(vm).await;
    let (vms, vm) = (Arc::clone(vms), Arc::clone(vm));
    match found {
        Ok(false) => {}
        Ok(true) => _ = godwit_context::spawn(async move { until_it_can_go_on(&vms, &vm).await }),
        Err(error) => {
            // A VM without the note would look paused by an operator, and would stand still for ever.
            tracing::warn!(vm = vm.name, %error, "whether the VM stands still for its disks is not known yet");
            godwit_context::spawn(async move { until_its_note_is_read(&vms, &vm).await });
        }
    }
}

/// Returns true if an earlier run of this node paused the VM, and records the noted reason.
async fn look_for_note(vm: &Vm) -> Result<bool, QmpError> {
    let Ok(Qemu { qmp, process }) = vm.qemu() else {
        return Ok(false);
    };
    let Some(why) = noted(&qmp).await? else {
        return Ok(false);
    };
    let mut inner = vm.lock();
    if inner.stands_still.is_some() || !still_runs(&inner, &process) {
        // The VM was paused anew meanwhile, and another task waits for the resumption; or QEMU has ended.
        return Ok(false);
    }
    inner.stands_still = Some(why);
    Ok(true)
}

async fn until_its_note_is_read(vms: &Arc<Vms>, vm: &Arc<Vm>) {
    loop {
        tokio::select! {
            () = vms.context.closed() => return,
            () = tokio::time::sleep(ASK_EVERY) => {}
        }
        match look_for_note(vm).await {
            Ok(false) => return,
            Ok(true) => return until_it_can_go_on(vms, vm).await,
            Err(error) => tracing::debug!(vm = vm.name, %error, "the monitor does not answer yet"),
        }
    }
}

/// Pauses the VM. Returns false if impossible now.
async fn pause(vms: &Arc<Vms>, vm: &Arc<Vm>, why: &Still) -> Result<bool, ErrorBody> {
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
        machine_disks(vms, vm)
            .into_iter()
            .filter_map(|disk| disk.engine())
    };
    engines().for_each(|engine| engine.machine_stands_still());
    match qmp.execute("stop", json!({})).await {
        Ok(_) => vm.lock().run_state = Some(String::from("paused")),
        Err(error @ (QmpError::Timeout { .. } | QmpError::Closed(_))) => {
            // The guest may have stopped, or may stop yet: the state is queried from now on.
            tracing::warn!(vm = vm.name, %error, "whether the VM stands still is not known");
        }
        Err(error) => {
            engines().for_each(|engine| engine.machine_goes_on());
            // The next note replaces a remaining one.
            let _ = forget(vm, &qmp).await;
            return Err(ErrorBody::new(ErrorCode::Internal, error.to_string()));
        }
    }
    Ok(true)
}

/// Returns true if this process still is the VM's QEMU. If QEMU ends during the query, the paused state is gone too.
fn still_runs(inner: &Inner, process: &Arc<Process>) -> bool {
    let same = |qemu: &Qemu| Arc::ptr_eq(&qemu.process, process);
    inner.qemu.as_ref().is_some_and(same)
}

/// Waits until the VM can go on, and resumes the VM; returns early if the VM runs again for another reason.
async fn until_it_can_go_on(vms: &Arc<Vms>, vm: &Arc<Vm>) {
    loop {
        tokio::select! {
            () = vms.context.closed() => return,
            () = tokio::time::sleep(ASK_EVERY) => {}
        }
        // Also cleared when QEMU has ended.
        let Some(why) = vm.lock().stands_still.clone() else {
            return;
        };
        let Ok(Qemu { qmp, .. }) = vm.qemu() else {
            continue;
        };
        let goes_on = inspect::run_state(&qmp).await.is_ok_and(|s| s == "running");
        let disks = machine_disks(vms, vm);
        let waits = waits_long(&disks)
            || match why {
                Still::Room(_) => !has_room(disks).await,
                Still::Missing(_) => false,
            };
        if waits && !goes_on {
            vm.lock().cannot_go_on = None;
            continue;
        }
        match resume(vms, &vm.name, false).await {
            Ok(()) => return,
            Err(error) => tell(vm, error.message),
        }
    }
}

/// Records the reason for a VM still paused although the disks could go on.
fn tell(vm: &Vm, error: String) {
    let mut inner = vm.lock();
    if inner.stands_still.is_some() && inner.cannot_go_on.as_ref() != Some(&error) {
        tracing::warn!(vm = vm.name, error, "the VM does not go on yet; trying on");
        inner.cannot_go_on = Some(error);
    }
}

/// Resumes a paused VM.
///
/// # Errors
/// The VM is not here, has an activity, or QEMU refuses. Without `force` also: the VM arrives without the source's word
/// on the handover, or another node has had the VM since.
pub async fn resume(vms: &Arc<Vms>, name: &str, force: bool) -> Result<(), ErrorBody> {
    let vm = vms.get(name)?;
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
    pooled::may_run(vms, &vm)?;
    override_later_owner(vms, &vm).await?;
    qmp.execute("cont", json!({})).await.map_err(|error| {
        let text = format!("VM {name} does not go on: {error}");
        ErrorBody::new(ErrorCode::Conflict, text).hint(format!("see 'godwit vm show {name}'"))
    })?;
    if let Ok(state) = inspect::run_state(&qmp).await {
        vm.lock().run_state = Some(state);
    }
    for disk in machine_disks(vms, &vm) {
        if let Some(engine) = disk.engine() {
            engine.machine_goes_on();
        }
    }
    tracing::info!(vm = name, "the VM goes on");
    if let Some(why) = forget(&vm, &qmp).await {
        let vms = Arc::clone(vms);
        godwit_context::spawn(async move { until_its_note_is_removed(&vms, &vm, &why).await });
    }
    Ok(())
}

/// Makes the VM this node's by an operator's order although another node has had the VM since: the other node then
/// holds the VM.
async fn override_later_owner(vms: &Vms, vm: &Vm) -> Result<(), ErrorBody> {
    let mut entry = vm.lock().entry.clone();
    let Some(surpassed) = entry.surpassed.take() else {
        return Ok(());
    };
    entry.epoch = surpassed.next(entry.epoch);
    let stored = vms.context.store.put_vm(&vm.name, &entry).await;
    stored.map_err(|error| stored_badly(&vm.name, &error))?;
    vm.lock().entry = entry;
    Ok(())
}

/// Notes the reason for the pause in QEMU.
async fn note(qmp: &Qmp, why: &Still) -> Result<(), QmpError> {
    while let Some(earlier) = noted(qmp).await? {
        remove_note(qmp, &earlier).await?;
    }
    let object = json!({ "qom-type": "secret", "id": why.note(), "data": why.disk() });
    qmp.execute("object-add", object).await.map(drop)
}

/// Returns the reason for the pause from an earlier run's note in QEMU.
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
        // The object does not exist.
        Err(QmpError::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

async fn remove_note(qmp: &Qmp, why: &Still) -> Result<(), QmpError> {
    qmp.execute("object-del", json!({ "id": why.note() }))
        .await
        .map(drop)
}

/// Clears the pause. Returns the note if QEMU was not reached and so keeps the note.
async fn forget(vm: &Vm, qmp: &Qmp) -> Option<Still> {
    let why = {
        let mut inner = vm.lock();
        inner.cannot_go_on = None;
        inner.stands_still.take()?
    };
    match remove_note(qmp, &why).await {
        Ok(()) => None,
        // No note was made.
        Err(QmpError::Refused { .. }) => None,
        Err(error) => {
            tracing::warn!(vm = vm.name, %error, "QEMU keeps the note that the VM stands still for now");
            Some(why)
        }
    }
}

/// Removes a stale note: with the note, the node's next run would resume a VM paused by an operator since.
async fn until_its_note_is_removed(vms: &Arc<Vms>, vm: &Arc<Vm>, why: &Still) {
    loop {
        tokio::select! {
            () = vms.context.closed() => return,
            () = tokio::time::sleep(ASK_EVERY) => {}
        }
        let Ok(Qemu { qmp, .. }) = vm.qemu() else {
            return;
        };
        // The guard keeps a new note from being made.
        let Ok(_guard) = vm.begin(VmActivity::Resuming, |_| Ok(())) else {
            continue;
        };
        // A VM paused again has replaced the note.
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

/// Returns true if a request to one of these disks has waited long for a missing part.
fn waits_long(disks: &[Arc<Disk>]) -> bool {
    let waits = |disk: &Arc<Disk>| disk.engine().is_some_and(|it| it.snapshot().waits_long);
    disks.iter().any(waits)
}

fn machine_disks(vms: &Vms, vm: &Vm) -> Vec<Arc<Disk>> {
    let disks = vm.lock().entry.machine.disks.clone();
    disks
        .iter()
        .filter_map(|disk| vms.disks.find(disk))
        .collect()
}

/// Returns true if all image files could grow. A device gives no answer, and counts as full.
async fn has_room(disks: Vec<Arc<Disk>>) -> bool {
    let paths: Vec<PathBuf> = disks
        .iter()
        .map(|disk| disk.lock().entry.path.clone())
        .collect();
    let asked = blocking(move || paths.iter().all(|path| path.is_file() && can_grow(path)));
    asked.await.unwrap_or(false)
}

/// Returns true if the file's folder can give [`WANTED`] bytes, quotas and reserved blocks included. Blocks.
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
