//! The protections that this node has a part in, and the surroundings of a protection's task.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode, ProtectionRole, VmProtection, VmState};
use godwit_context::store::machine::protections::{BackupEntry, ProtectionEntry};
use godwit_context::store::machine::{VmMark, VmOrigin};
use godwit_disks::disks::disk::Disk;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::checkpoints::Mark;
use super::decide::{self, Request};
use super::{BACKLOG, Input, MAX_DISKS, Orders};
use crate::vms::Vms;
use crate::vms::lifecycle::run;
use crate::vms::view;
use crate::vms::vm::Vm;

/// Most protections of a node.
const MAX_PROTECTIONS: usize = 1024;
/// Most marks of disks that wait: those of the few checkpoints under way, for all disks of a machine.
const MOST_MARKS: usize = 8 * MAX_DISKS;
/// Time between two attempts to store.
const STORE_RETRY: Duration = Duration::from_secs(1);

/// A protection in the table.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) id: String,
    pub(super) peer: String,
    pub(super) inputs: mpsc::Sender<Input>,
    disks: Vec<String>,
    /// The machine that a backup would start.
    machine: Option<BackupEntry>,
    view: Option<VmProtection>,
    /// Backup: the receiver of the marks of its disks.
    marks: Option<mpsc::Sender<Mark>>,
}

impl Known {
    pub(super) const fn is_backup(&self) -> bool {
        self.machine.is_some()
    }
}

/// The protections by the names of their VMs.
#[derive(Debug, Default)]
pub struct Protections {
    known: Mutex<BTreeMap<String, Known>>,
    /// The VMs whose packets are held back from the start of their NICs.
    held: Mutex<BTreeSet<String>>,
}

impl Protections {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn held(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the packets of a VM held back from the start of its NICs, or not.
    pub(super) fn hold_packets(&self, vm: &str, hold: bool) {
        let mut held = self.held();
        match hold {
            true => held.insert(vm.to_owned()),
            false => held.remove(vm),
        };
    }

    /// Returns true if NICs of this VM that start now hold its packets back: a backup may have the VM.
    pub(crate) fn holds_packets(&self, vm: &str) -> bool {
        self.held().contains(vm)
    }

    /// Hands a mark of a disk to the backup that waits for it.
    pub(super) fn marked(&self, mark: Mark) {
        let known = self.lock();
        let has = |known: &&Known| known.disks.contains(&mark.disk);
        let marks = known
            .values()
            .find(has)
            .and_then(|known| known.marks.as_ref());
        if let Some(marks) = marks {
            // A primary that sends more marks than it may loses its session, whose next mark then is out of order.
            let _ = marks.try_send(mark);
        }
    }

    pub(super) fn known(&self, vm: &str) -> Option<Known> {
        self.lock().get(vm).cloned()
    }

    pub(super) fn inputs_of(&self, vm: &str) -> Option<mpsc::Sender<Input>> {
        Some(self.lock().get(vm)?.inputs.clone())
    }

    pub(super) fn with_disk(&self, disk: &str) -> Option<mpsc::Sender<Input>> {
        let known = self.lock();
        let has = |known: &&Known| known.disks.iter().any(|name| name == disk);
        known.values().find(has).map(|known| known.inputs.clone())
    }

    pub(super) fn is_full(&self) -> bool {
        self.lock().len() >= MAX_PROTECTIONS
    }

    /// Returns true if this node runs the VM under a protection.
    pub fn runs_protected(&self, vm: &str) -> bool {
        let known = self.lock();
        known.get(vm).is_some_and(|known| !known.is_backup())
    }

    /// Refuses to do something with a protected VM.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] if the VM is protected here.
    pub fn refuse(&self, vm: &str, done: &str) -> Result<(), ErrorBody> {
        let Some(known) = self.known(vm) else {
            return Ok(());
        };
        let (peer, other) = (&known.peer, known.is_backup());
        let text = match other {
            true => format!(
                "VM {vm} of node '{peer}' is protected by this node: it cannot be {done} here"
            ),
            false => format!("VM {vm} is protected by node '{peer}': it cannot be {done}"),
        };
        Err(ErrorBody::new(ErrorCode::Conflict, text).hint(format!(
            "end the protection first: godwit vm unprotect {vm}"
        )))
    }

    /// Refuses to do something with a disk of a protected VM.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] if the disk is protected here.
    pub fn refuse_disk(&self, disk: &str, done: &str) -> Result<(), ErrorBody> {
        let vm = {
            let known = self.lock();
            let mut all = known.iter();
            all.find(|(_, known)| known.disks.iter().any(|name| name == disk))
                .map(|(vm, _)| vm.clone())
        };
        let Some(vm) = vm else { return Ok(()) };
        let text =
            format!("disk {disk} belongs to VM {vm}, which is protected: it cannot be {done}");
        Err(ErrorBody::new(ErrorCode::Conflict, text).hint(format!(
            "end the protection first: godwit vm unprotect {vm}"
        )))
    }

    /// Returns the protections as the API shows them, with their VMs' names.
    pub fn views(&self) -> Vec<(String, VmProtection)> {
        let known = self.lock();
        let view = |(vm, known): (&String, &Known)| Some((vm.clone(), known.view.clone()?));
        known.iter().filter_map(view).collect()
    }

    /// Returns the VMs that this node only protects, as the API shows them.
    pub fn backups(&self, vms: &Vms) -> Vec<godwit_api::Vm> {
        let names: Vec<_> = self.views().into_iter().map(|(vm, _)| vm).collect();
        let shown = names.iter().filter_map(|vm| self.backup(vms, vm));
        shown.collect()
    }

    /// Returns a VM that this node only protects, as the API shows the VM.
    pub fn backup(&self, vms: &Vms, vm: &str) -> Option<godwit_api::Vm> {
        let known = self.known(vm)?;
        let protection = known.view?;
        let backup = known.machine?;
        if protection.role != ProtectionRole::Backup
            || vms
                .find(vm)
                .is_some_and(|vm| vm.lock().entry.moved_to.is_none())
        {
            return None;
        }
        let from = known.peer.clone();
        let id = (backup.machine_id, backup.epoch);
        let state = (VmOrigin::Received { from }, VmMark::Taken);
        let entry = run::entry(vms, vm, backup.machine, id, state, None).ok()?;
        let shown = view::vm(&Vm::new(&vms.context.config, vm.to_owned(), entry));
        Some(godwit_api::Vm {
            state: VmState::Backup,
            status: format!(
                "runs at node '{}'; this node takes it over if that node is lost",
                known.peer
            ),
            protection: Some(protection),
            ..shown
        })
    }
}

/// The surroundings of a protection's task.
#[derive(Clone, Debug)]
pub(super) struct Here {
    pub(super) vms: Arc<Vms>,
    pub(super) vm: String,
    pub(super) inputs: mpsc::Sender<Input>,
    disks: Vec<String>,
    began: Instant,
}

impl Here {
    /// Puts a protection in the table, in place of an earlier one of its VM.
    pub(super) fn enter(vms: &Arc<Vms>, vm: &str, entry: &ProtectionEntry) -> (Self, Orders) {
        let (inputs, orders) = mpsc::channel(BACKLOG);
        let machine = entry.backup().cloned();
        let disks = match (&machine, vms.find(vm)) {
            (Some(backup), _) => backup.machine.disks.clone(),
            (None, Some(vm)) => vm.lock().entry.machine.disks.clone(),
            (None, None) => Vec::new(),
        };
        let known = Known {
            id: entry.id.clone(),
            peer: entry.peer.clone(),
            inputs: inputs.clone(),
            disks: disks.clone(),
            machine,
            view: None,
            marks: None,
        };
        if known.is_backup() {
            // The packets of an earlier primary here; those of a machine that arrives are new.
            vms.protections.hold_packets(vm, false);
        }
        vms.protections.lock().insert(vm.to_owned(), known);
        let here = Self {
            vms: Arc::clone(vms),
            vm: vm.to_owned(),
            inputs,
            disks,
            began: Instant::now(),
        };
        decide::watch_witness(&here, entry);
        (here, orders)
    }

    /// Returns the time since the task's start.
    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(super) fn machine(&self) -> Option<Arc<Vm>> {
        self.vms.find(&self.vm)
    }

    pub(super) fn disk_names(&self) -> Vec<String> {
        self.disks.clone()
    }

    pub(super) fn disks(&self) -> Vec<Arc<Disk>> {
        let find = |name: &String| self.vms.disks.find(name);
        self.disks.iter().filter_map(find).collect()
    }

    /// Returns the receiver of the disks' marks from now on.
    pub(super) fn listen_for_marks(&self) -> mpsc::Receiver<Mark> {
        let (marks, heard) = mpsc::channel(MOST_MARKS);
        if let Some(known) = self.vms.protections.lock().get_mut(&self.vm) {
            known.marks = Some(marks);
        }
        heard
    }

    /// Stores the protection. Tries again until that succeeds; returns false if the node ended first.
    pub(super) async fn store(&self, entry: &ProtectionEntry) -> bool {
        let store = &self.vms.context.store;
        while let Err(error) = store.put_protection(&self.vm, entry).await {
            tracing::error!(vm = self.vm, %error, "cannot store the VM's protection; trying again");
            tokio::select! {
                () = tokio::time::sleep(STORE_RETRY) => {}
                () = self.vms.context.closed() => return false,
            }
        }
        true
    }

    /// Removes the protection, durably.
    pub(super) async fn forget(&self) -> Result<(), ErrorBody> {
        let removed = self.vms.context.store.remove_protection(&self.vm).await;
        removed.map_err(|error| super::stored_badly(&self.vm, &error))?;
        self.take_off();
        Ok(())
    }

    /// Takes the protection off the table.
    pub(super) fn take_off(&self) {
        self.vms.protections.lock().remove(&self.vm);
        if let Some(vm) = self.machine() {
            vm.lock().protection = None;
        }
    }

    /// Asks who goes on. [`Input::Decided`] follows.
    pub(super) fn decide(&self, request: Request) {
        let (vms, inputs) = (Arc::clone(&self.vms), self.inputs.clone());
        tokio::spawn(async move {
            let ask = request.ask;
            let answer = decide::decide(vms, request).await;
            let _ = inputs.send(Input::Decided(ask, answer)).await;
        });
    }

    /// Shows the protection.
    pub(super) fn show(&self, view: VmProtection) {
        if let Some(vm) = self.machine() {
            vm.lock().protection = Some(view.clone());
        }
        if let Some(known) = self.vms.protections.lock().get_mut(&self.vm) {
            known.view = Some(view);
        }
    }

    /// Returns the error of a migration that has ended.
    pub(super) fn trouble_of(&self, migration: &str) -> Option<String> {
        let (_, view) = self.vms.disk_migrations.get(migration).ok()?;
        Some(view.error?.message)
    }

    /// Returns the bytes of a migration's pass, and how many of them are done.
    pub(super) fn progress_of(&self, migration: &str) -> (u64, u64) {
        let Ok((id, view)) = self.vms.disk_migrations.get(migration) else {
            return (0, 0);
        };
        let progress = godwit_disks::migrations::live(&self.vms.disk_migrations, id, view).progress;
        (progress.bytes_total, progress.bytes_done)
    }
}
