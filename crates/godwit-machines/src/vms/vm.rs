//! A VM of this node, and the table of all VMs.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_core::units::MigrationId;

use crate::nics::named::NamedNics;
use crate::nics::served::ServedNic;
use crate::protect::Protections;
use crate::vms::incoming::doubt::Verdicts;
use crate::vms::lifecycle::room::Still;
use crate::vms::memory::mover::MovingMemory;
use crate::vms::outgoing::table::VmMigrations;
use crate::vms::tunnel::MemoryDoors;
use godwit_api::{ErrorBody, ErrorCode, VmProtection, VmState};
use godwit_context::Context;
use godwit_context::config::NodeConfig;
use godwit_context::store::machine::{VmEntry, VmMark};
use godwit_disks::disks::Disks;
use godwit_disks::migrations::Migrations;
use godwit_qemu::machine::Places;
use godwit_qemu::monitor::Monitor;
use godwit_qemu::monitor::qmp::Qmp;
use godwit_qemu::monitor::spare::Spare;
use godwit_qemu::process::Process;

/// Most VMs on one node.
const MAX_VMS: usize = 1024;

/// The activity of a VM: one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmActivity {
    /// No activity.
    Idle,
    /// QEMU is being started or taken over.
    Starting,
    /// The VM is being stopped.
    Stopping,
    /// The guest is being paused.
    Pausing,
    /// The guest is being resumed.
    Resuming,
    /// The memory moves between the memory pool and the node.
    MovingMemory,
    /// The VM's protection begins.
    Protecting,
    /// The VM has moved away, but the title of its memory does not say so yet.
    GivingMemory,
    /// The VM moves away.
    Outgoing(MigrationId),
    /// The VM is incoming.
    Incoming(MigrationId),
}

impl VmActivity {
    /// Returns the activity in words that follow "the VM is".
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Starting => "being started",
            Self::Stopping => "being stopped",
            Self::Protecting => "being protected",
            Self::Pausing => "being made to stand still",
            Self::Resuming => "being let go on",
            Self::MovingMemory => "having its memory moved between its memory pool and its node",
            Self::GivingMemory => "gone, and its memory pool cannot be told so yet",
            Self::Outgoing(_) => "migrating to another node",
            Self::Incoming(_) => "being received from another node",
        }
    }

    /// Returns the migration, if the activity is one.
    pub const fn migration(self) -> Option<MigrationId> {
        match self {
            Self::Outgoing(migration) | Self::Incoming(migration) => Some(migration),
            _ => None,
        }
    }
}

/// A VM. Its lock is held for moments only, never across an await.
#[derive(Debug)]
pub struct Vm {
    /// The machine's name, unique on the node.
    pub name: String,
    /// The paths of its files.
    pub places: Places,
    /// Held while the NICs are ended.
    pub(crate) nics_end: tokio::sync::Mutex<()>,
    inner: Mutex<Inner>,
}

/// The part of a [`Vm`] that changes.
#[derive(Debug)]
pub struct Inner {
    /// The durable record.
    pub entry: VmEntry,
    /// The activity under way.
    pub activity: VmActivity,
    /// The QEMU, while running and answering.
    pub qemu: Option<Qemu>,
    /// The process of a running QEMU that has not answered yet.
    pub silent: Option<Arc<Process>>,
    /// The NICs served for the VM, while its QEMU runs or is about to.
    pub nics: Vec<Arc<ServedNic>>,
    /// QEMU's spare monitor, if any.
    pub(crate) spare: Option<Spare>,
    /// The run state last reported by QEMU.
    pub run_state: Option<String>,
    /// The reason for a pause until a disk can go on: the disk has no room, or lacks a part that the guest reads.
    pub stands_still: Option<Still>,
    /// The reason for a guest that does not go on although its disks could.
    pub(crate) cannot_go_on: Option<String>,
    /// Bytes at the start of the memory that have left the memory pool.
    pub(crate) local_bytes: u64,
    /// The last move of the memory, if any.
    pub moving: Option<MovingMemory>,
    /// The VM's trouble, for its user.
    pub problem: Option<String>,
    /// The sender of an operator's verdict, while the VM arrives and its source gives no word on the handover.
    pub(crate) verdicts: Option<Verdicts>,
    /// The reason for the guest's end, if known.
    pub(crate) ended_for: Option<String>,
    /// Warnings for the user who started the VM.
    pub warnings: Vec<String>,
    /// True while checkpoints stop the guest for moments, which are no change of the run state.
    pub(crate) checkpointed: bool,
    /// The VM's protection, if this node is the primary.
    pub(crate) protection: Option<VmProtection>,
}

/// A running QEMU.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// The monitor.
    pub qmp: Qmp,
    /// The process, which may have ended.
    pub process: Arc<Process>,
}

impl Vm {
    /// Returns a VM without a QEMU.
    pub fn new(config: &NodeConfig, name: String, entry: VmEntry) -> Arc<Self> {
        let places = Places {
            folder: config.vms_dir().join(&name),
        };
        Arc::new(Self {
            name,
            places,
            nics_end: tokio::sync::Mutex::default(),
            inner: Mutex::new(Inner {
                entry,
                activity: VmActivity::Idle,
                qemu: None,
                silent: None,
                nics: Vec::new(),
                spare: None,
                run_state: None,
                stands_still: None,
                cannot_go_on: None,
                local_bytes: 0,
                moving: None,
                problem: None,
                verdicts: None,
                ended_for: None,
                warnings: Vec::new(),
                checkpointed: false,
                protection: None,
            }),
        })
    }

    /// Locks the state of the machine.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the best of QEMU's monitors: the spare one if there is one.
    pub(super) fn monitor(&self) -> Option<Monitor> {
        let inner = self.lock();
        let main = || {
            let qemu = inner.qemu.as_ref();
            qemu.map(|qemu| Monitor::Main(qemu.qmp.clone()))
        };
        inner.spare.clone().map(Monitor::Spare).or_else(main)
    }

    /// Checks that the VM belongs to this node, not to another node after a move.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] naming the other node.
    pub fn is_here(&self, inner: &Inner) -> Result<(), ErrorBody> {
        let Some(to) = &inner.entry.moved_to else {
            return Ok(());
        };
        let rest = match inner.entry.mark {
            Some(VmMark::Giving { .. }) => "; the rest of its memory is still here",
            _ => "",
        };
        let text = format!("VM {} moved to node '{to}'{rest}", self.name);
        Err(ErrorBody::new(ErrorCode::Conflict, text).hint(format!(
            "ask node '{to}' to do it; 'godwit vm forget {}' takes it off this node's list",
            self.name
        )))
    }

    /// Checks that another VM may take the name.
    ///
    /// # Errors
    /// [`ErrorCode::Exists`] if the VM runs, or has an activity.
    pub(crate) fn may_be_replaced(&self) -> Result<(), ErrorBody> {
        let inner = self.lock();
        let does = match inner.activity {
            VmActivity::Idle if !inner.holds_disks() => return Ok(()),
            VmActivity::Idle => inner.state().name(),
            activity => activity.describe(),
        };
        let text = format!("a VM named {:?} is {does} on this node", self.name);
        Err(ErrorBody::new(ErrorCode::Exists, text)
            .hint("choose another name, or stop it with 'godwit vm stop'"))
    }

    /// Checks that no other node has had the VM since its arrival here.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] naming the other node.
    pub(crate) fn is_current(&self, inner: &Inner) -> Result<(), ErrorBody> {
        let Some(surpassed) = &inner.entry.surpassed else {
            return Ok(());
        };
        let text = format!(
            "VM {} is to stand still: {}",
            self.name,
            surpassed.why("the VM", inner.entry.epoch)
        );
        Err(ErrorBody::new(ErrorCode::Conflict, text).hint(format!(
            "end it here with 'godwit vm stop {} --force', or insist with 'godwit vm resume {} --force'",
            self.name, self.name
        )))
    }

    /// Returns the QEMU.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] if no QEMU runs or answers.
    pub fn qemu(&self) -> Result<Qemu, ErrorBody> {
        let inner = self.lock();
        inner.qemu.clone().ok_or_else(|| {
            ErrorBody::new(
                ErrorCode::Conflict,
                format!("VM {} is {}", self.name, inner.state().name()),
            )
            .hint(format!("see 'godwit vm show {}'", self.name))
        })
    }

    /// Begins an activity if no other is under way and `allowed` agrees.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] naming the other activity, or the error of `allowed`.
    pub fn begin(
        self: &Arc<Self>,
        activity: VmActivity,
        allowed: impl FnOnce(&Inner) -> Result<(), ErrorBody>,
    ) -> Result<VmGuard, ErrorBody> {
        let mut inner = self.lock();
        if inner.activity != VmActivity::Idle {
            let error = ErrorBody::new(
                ErrorCode::Conflict,
                format!("VM {} is {}", self.name, inner.activity.describe()),
            );
            return Err(error.hint("try again when that is done"));
        }
        allowed(&inner)?;
        inner.activity = activity;
        Ok(VmGuard {
            vm: Arc::clone(self),
            activity,
        })
    }

    /// Ends an activity, if still under way.
    pub fn end(&self, activity: VmActivity) {
        let mut inner = self.lock();
        if inner.activity == activity {
            inner.activity = VmActivity::Idle;
        }
    }
}

impl Inner {
    /// Returns the VM's state as known to this node.
    pub fn state(&self) -> VmState {
        if self.entry.moved_to.is_some() {
            return VmState::Departed;
        }
        if matches!(self.entry.mark, Some(VmMark::Incoming { .. })) {
            return VmState::Incoming;
        }
        match (&self.qemu, self.run_state.as_deref()) {
            (None, _) if self.activity == VmActivity::Starting => VmState::Starting,
            (None, _) if self.silent.is_some() => VmState::Paused,
            (None, _) => VmState::Stopped,
            (Some(_), Some("running")) => VmState::Running,
            (Some(_), Some("shutdown" | "guest-panicked" | "internal-error" | "io-error")) => {
                VmState::Halted
            }
            (Some(_), _) => VmState::Paused,
        }
    }

    /// Returns the migration under way, also one that the guest does not notice any more.
    pub fn migration(&self) -> Option<String> {
        match (&self.entry.mark, self.activity.migration()) {
            (_, Some(migration)) => Some(migration.to_string()),
            (Some(VmMark::Pulling { migration, .. }), None) => Some(migration.clone()),
            _ => None,
        }
    }

    /// Returns true if the VM uses its disks here, or is about to.
    pub fn holds_disks(&self) -> bool {
        !matches!(self.state(), VmState::Departed | VmState::Stopped)
    }
}

/// An activity under way; dropping the guard ends the activity.
#[derive(Debug)]
pub struct VmGuard {
    vm: Arc<Vm>,
    activity: VmActivity,
}

impl Drop for VmGuard {
    fn drop(&mut self) {
        self.vm.end(self.activity);
    }
}

/// The machines of this node, with everything that a machine's life and moves need.
#[derive(Debug)]
pub struct Vms {
    /// Configuration, store and connections of the node.
    pub context: Arc<Context>,
    /// The disks that machines use.
    pub disks: Arc<Disks>,
    pub(crate) disk_migrations: Arc<Migrations>,
    /// NICs with names of their own.
    pub nics: Arc<NamedNics>,
    /// Moves of VMs, under way and ended.
    pub migrations: VmMigrations,
    /// Incoming VMs that wait for the connection of their memory.
    pub memory_doors: MemoryDoors,
    /// Protections that this node has a part in.
    pub protections: Protections,
    by_name: Mutex<BTreeMap<String, Arc<Vm>>>,
}

impl Vms {
    /// Creates the empty table.
    pub fn new(disk_migrations: Arc<Migrations>, nics: Arc<NamedNics>) -> Self {
        Self {
            context: Arc::clone(&disk_migrations.context),
            disks: Arc::clone(&disk_migrations.disks),
            disk_migrations,
            nics,
            migrations: VmMigrations::default(),
            memory_doors: MemoryDoors::default(),
            protections: Protections::default(),
            by_name: Mutex::default(),
        }
    }

    /// Returns the VM of this name.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub fn get(&self, name: &str) -> Result<Arc<Vm>, ErrorBody> {
        self.find(name).ok_or_else(|| {
            let shown: String = name.chars().take(128).collect();
            ErrorBody::new(
                ErrorCode::NotFound,
                format!("there is no VM {shown:?} on this node"),
            )
            .hint("see 'godwit vm list'")
        })
    }

    /// Returns the VM of this name, if any.
    pub fn find(&self, name: &str) -> Option<Arc<Vm>> {
        self.lock().get(name).cloned()
    }

    /// Returns all VMs in the order of their names.
    pub fn all(&self) -> Vec<Arc<Vm>> {
        self.lock().values().cloned().collect()
    }

    /// Returns the name of the VM that uses the socket of the named NIC.
    pub fn user_of_nic(&self, nic: &str) -> Option<String> {
        let uses = |vm: &Arc<Vm>| {
            let inner = vm.lock();
            let is_here = inner.holds_disks() || !inner.nics.is_empty();
            let names = &inner.entry.named_nics;
            (is_here && names.iter().any(|used| used == nic)).then(|| vm.name.clone())
        };
        self.all().iter().find_map(uses)
    }

    /// Gives a new VM its name, with `activity` under way: until the activity ends no other VM gets the name. Replaces
    /// a VM of the same name that does not run here.
    ///
    /// # Errors
    /// [`ErrorCode::Exists`] if a VM of the name runs or has an activity, [`ErrorCode::Conflict`] if another VM uses a
    /// disk, [`ErrorCode::Busy`] at the limit.
    pub(crate) fn claim(
        &self,
        vm: &Arc<Vm>,
        activity: VmActivity,
    ) -> Result<(NameClaim<'_>, VmGuard), ErrorBody> {
        let mut vms = self.lock();
        if let Some(other) = vms.get(&vm.name) {
            other.may_be_replaced()?;
        } else if vms.len() >= MAX_VMS {
            return Err(ErrorBody::new(
                ErrorCode::Busy,
                format!("this node has {MAX_VMS} VMs, the most it can"),
            ));
        }
        let disks = vm.lock().entry.machine.disks.clone();
        for disk in &disks {
            if let Some(user) = user_among(&vms, disk, Some(&vm.name)) {
                return Err(disk_in_use(&vm.name, disk, &user));
            }
        }
        let guard = vm.begin(activity, |_| Ok(()))?;
        let replaced = vms.insert(vm.name.clone(), Arc::clone(vm));
        let claim = NameClaim {
            vms: self,
            vm: Arc::clone(vm),
            replaced,
            kept: false,
        };
        Ok((claim, guard))
    }

    /// Restores a VM that an earlier process of this node stored.
    pub fn restore(&self, vm: &Arc<Vm>) {
        self.lock().insert(vm.name.clone(), Arc::clone(vm));
    }

    /// Returns the disks of VMs whose memory may be on its way here.
    pub fn receiving(&self) -> HashSet<String> {
        let vms = self.lock();
        let entries = vms.values().map(|vm| vm.lock());
        let receiving = entries.filter(|inner| inner.entry.receives());
        receiving
            .flat_map(|inner| inner.entry.machine.disks.clone())
            .collect()
    }

    /// Removes this VM.
    pub fn remove(&self, vm: &Arc<Vm>) {
        let mut vms = self.lock();
        if vms.get(&vm.name).is_some_and(|kept| Arc::ptr_eq(kept, vm)) {
            vms.remove(&vm.name);
        }
    }

    /// Returns the VM that uses a disk here, other than `except`.
    pub fn user_of(&self, disk: &str, except: Option<&str>) -> Option<String> {
        user_among(&self.lock(), disk, except)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Vm>>> {
        self.by_name.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn user_among(vms: &BTreeMap<String, Arc<Vm>>, disk: &str, except: Option<&str>) -> Option<String> {
    let uses = |vm: &&Arc<Vm>| {
        let inner = vm.lock();
        Some(vm.name.as_str()) != except
            && inner.holds_disks()
            && inner.entry.machine.disks.iter().any(|used| used == disk)
    };
    vms.values().find(uses).map(|vm| vm.name.clone())
}

/// Returns the error for a new VM that would share a disk.
pub(crate) fn disk_in_use(vm: &str, disk: &str, user: &str) -> ErrorBody {
    let text = format!("VM {vm}: disk {disk} is used by VM {user}");
    ErrorBody::new(ErrorCode::Conflict, text).hint("two machines cannot share a disk")
}

/// A name given to a new VM. Dropping the claim gives the name back to its previous VM, if any.
#[derive(Debug)]
pub(crate) struct NameClaim<'a> {
    vms: &'a Vms,
    vm: Arc<Vm>,
    replaced: Option<Arc<Vm>>,
    kept: bool,
}

impl NameClaim<'_> {
    /// Keeps the name for the VM.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for NameClaim<'_> {
    fn drop(&mut self) {
        let mut vms = self.vms.lock();
        let name = &self.vm.name;
        let has_it = vms.get(name).is_some_and(|it| Arc::ptr_eq(it, &self.vm));
        if self.kept || !has_it {
            return;
        }
        match self.replaced.take() {
            Some(replaced) => vms.insert(name.clone(), replaced),
            None => vms.remove(name),
        };
    }
}
