//! One VM of this node.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_core::units::MigrationId;

use crate::config::NodeConfig;
use crate::nics::served::ServedNic;
use crate::store::machine::{VmEntry, VmMark};
use crate::vms::incoming::doubt::Verdicts;
use crate::vms::lifecycle::room::Still;
use crate::vms::memory::mover::MovingMemory;
use godwit_api::{ErrorBody, ErrorCode, VmState};
use godwit_qemu::machine::Places;
use godwit_qemu::monitor::Monitor;
use godwit_qemu::monitor::qmp::Qmp;
use godwit_qemu::monitor::spare::Spare;
use godwit_qemu::process::Process;

/// Most VMs on one node.
const MAX_VMS: usize = 1024;

/// What is being done with a VM: one thing at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VmActivity {
    /// Nothing: it runs or it does not.
    Idle,
    /// Its QEMU is being started or taken over.
    Starting,
    /// It is being stopped.
    Stopping,
    /// It is made to stand still.
    Pausing,
    /// It is let go on.
    Resuming,
    /// Its memory moves, and the VM does not.
    MovingMemory,
    /// It has moved away, and the title of its memory does not say so yet.
    GivingMemory,
    /// It moves away.
    Outgoing(MigrationId),
    /// It comes in.
    Incoming(MigrationId),
}

impl VmActivity {
    /// What is being done, in words that follow "the VM is".
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Starting => "being started",
            Self::Stopping => "being stopped",
            Self::Pausing => "being made to stand still",
            Self::Resuming => "being let go on",
            Self::MovingMemory => "having its memory moved between its memory pool and its node",
            Self::GivingMemory => "gone, and its memory pool cannot be told so yet",
            Self::Outgoing(_) => "migrating to another node",
            Self::Incoming(_) => "being received from another node",
        }
    }

    /// The migration, if it is one.
    pub(crate) const fn migration(self) -> Option<MigrationId> {
        match self {
            Self::Outgoing(migration) | Self::Incoming(migration) => Some(migration),
            _ => None,
        }
    }
}

/// A VM. Its lock is held for moments only, never across an await.
#[derive(Debug)]
pub(crate) struct Vm {
    /// Its name.
    pub(crate) name: String,
    /// Where its files are.
    pub(crate) places: Places,
    /// Held while its NICs are ended.
    pub(crate) nics_end: tokio::sync::Mutex<()>,
    inner: Mutex<Inner>,
}

/// The part of a [`Vm`] that changes.
#[derive(Debug)]
pub(crate) struct Inner {
    /// What is stored.
    pub(crate) entry: VmEntry,
    /// What is being done with it.
    pub(crate) activity: VmActivity,
    /// Its QEMU, while it runs and answers.
    pub(crate) qemu: Option<Qemu>,
    /// The process of its QEMU, while that is there and has not answered yet.
    pub(crate) silent: Option<Arc<Process>>,
    /// The NICs that this node serves for it, while its QEMU is there or about to be.
    pub(crate) nics: Vec<Arc<ServedNic>>,
    /// QEMU's spare monitor, if it has one.
    pub(crate) spare: Option<Spare>,
    /// The run state that QEMU reported last.
    pub(crate) run_state: Option<String>,
    /// Why the VM is stopped until a disk can go on that has no room, or lacks what the VM reads.
    pub(crate) stands_still: Option<Still>,
    /// Why it does not go on, though it could as far as its disks are concerned.
    pub(crate) cannot_go_on: Option<String>,
    /// Bytes of its memory that are not in its memory pool any more: the first ones.
    pub(crate) local_bytes: u64,
    /// The last move of its memory, if there was one.
    pub(crate) moving: Option<MovingMemory>,
    /// What is wrong with it.
    pub(crate) problem: Option<String>,
    /// Where an operator's decision goes while it arrives and its source does not say whether it gave it away.
    pub(crate) verdicts: Option<Verdicts>,
    /// Why the guest was ended, when that is known.
    pub(crate) ended_for: Option<String>,
    /// What who started it should know.
    pub(crate) warnings: Vec<String>,
}

/// A running QEMU.
#[derive(Clone, Debug)]
pub(crate) struct Qemu {
    /// Its monitor.
    pub(crate) qmp: Qmp,
    /// Its process.
    pub(crate) process: Arc<Process>,
}

impl Vm {
    /// A VM that nothing runs yet.
    pub(crate) fn new(config: &NodeConfig, name: String, entry: VmEntry) -> Arc<Self> {
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
            }),
        })
    }

    /// The part that changes.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The better one of QEMU's monitors, if there is one.
    pub(super) fn monitor(&self) -> Option<Monitor> {
        let inner = self.lock();
        let main = || {
            let qemu = inner.qemu.as_ref();
            qemu.map(|qemu| Monitor::Main(qemu.qmp.clone()))
        };
        inner.spare.clone().map(Monitor::Spare).or_else(main)
    }

    /// Whether the VM is this node's, rather than that of the node that it moved to.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] naming that node.
    pub(crate) fn is_here(&self, inner: &Inner) -> Result<(), ErrorBody> {
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

    /// Whether another VM may have its name here.
    ///
    /// # Errors
    /// [`ErrorCode::Exists`] when it runs, or something is done with it.
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

    /// Whether no other node has had the VM since it came here.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] naming that node.
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

    /// Its QEMU.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] when none runs or it does not answer.
    pub(crate) fn qemu(&self) -> Result<Qemu, ErrorBody> {
        let inner = self.lock();
        inner.qemu.clone().ok_or_else(|| {
            ErrorBody::new(
                ErrorCode::Conflict,
                format!("VM {} is {}", self.name, inner.state().name()),
            )
            .hint(format!("see 'godwit vm show {}'", self.name))
        })
    }

    /// Begins something with the VM if nothing else is under way and `allowed` agrees.
    ///
    /// # Errors
    /// [`ErrorCode::Conflict`] naming what is under way, or what `allowed` says.
    pub(crate) fn begin(
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

    /// Ends an activity, if it is still the one under way.
    pub(crate) fn end(&self, activity: VmActivity) {
        let mut inner = self.lock();
        if inner.activity == activity {
            inner.activity = VmActivity::Idle;
        }
    }
}

impl Inner {
    /// What this node knows of the VM.
    pub(crate) fn state(&self) -> VmState {
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

    /// The migration under way: also one that the VM does not notice any more.
    pub(crate) fn migration(&self) -> Option<String> {
        match (&self.entry.mark, self.activity.migration()) {
            (_, Some(migration)) => Some(migration.to_string()),
            (Some(VmMark::Pulling { migration, .. }), None) => Some(migration.clone()),
            _ => None,
        }
    }

    /// Whether the VM uses its disks here, or is about to.
    pub(crate) fn holds_disks(&self) -> bool {
        !matches!(self.state(), VmState::Departed | VmState::Stopped)
    }
}

/// Something under way with a VM; dropping it ends that.
#[derive(Debug)]
pub(crate) struct VmGuard {
    vm: Arc<Vm>,
    activity: VmActivity,
}

impl Drop for VmGuard {
    fn drop(&mut self) {
        self.vm.end(self.activity);
    }
}

/// The VMs by name.
#[derive(Debug, Default)]
pub(crate) struct Vms {
    by_name: Mutex<BTreeMap<String, Arc<Vm>>>,
}

impl Vms {
    /// The VM of this name.
    ///
    /// # Errors
    /// [`ErrorCode::NotFound`].
    pub(crate) fn get(&self, name: &str) -> Result<Arc<Vm>, ErrorBody> {
        self.find(name).ok_or_else(|| {
            let shown: String = name.chars().take(128).collect();
            ErrorBody::new(
                ErrorCode::NotFound,
                format!("there is no VM {shown:?} on this node"),
            )
            .hint("see 'godwit vm list'")
        })
    }

    /// The VM of this name, if there is one.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<Vm>> {
        self.lock().get(name).cloned()
    }

    /// All VMs in the order of their names.
    pub(crate) fn all(&self) -> Vec<Arc<Vm>> {
        self.lock().values().cloned().collect()
    }

    /// Gives a new VM its name, with `activity` under way: until that ends nobody else gets the name. One of the same name
    /// that does not run here is replaced.
    ///
    /// # Errors
    /// [`ErrorCode::Exists`] when one runs or something is under way with it, [`ErrorCode::Conflict`] when another uses
    /// one of its disks, [`ErrorCode::Busy`] at the limit.
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

    /// Takes up a VM that an earlier process of this node stored.
    pub(crate) fn restore(&self, vm: &Arc<Vm>) {
        self.lock().insert(vm.name.clone(), Arc::clone(vm));
    }

    /// The disks of those whose memory may be on its way here.
    pub(crate) fn receiving(&self) -> HashSet<String> {
        let vms = self.lock();
        let entries = vms.values().map(|vm| vm.lock());
        let receiving = entries.filter(|inner| inner.entry.receives());
        receiving
            .flat_map(|inner| inner.entry.machine.disks.clone())
            .collect()
    }

    /// Takes this VM out.
    pub(crate) fn remove(&self, vm: &Arc<Vm>) {
        let mut vms = self.lock();
        if vms.get(&vm.name).is_some_and(|kept| Arc::ptr_eq(kept, vm)) {
            vms.remove(&vm.name);
        }
    }

    /// The VM that uses a disk here, other than `except`.
    pub(crate) fn user_of(&self, disk: &str, except: Option<&str>) -> Option<String> {
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

/// What somebody is told whose new VM would share a disk.
pub(crate) fn disk_in_use(vm: &str, disk: &str, user: &str) -> ErrorBody {
    let text = format!("VM {vm}: disk {disk} is used by VM {user}");
    ErrorBody::new(ErrorCode::Conflict, text).hint("two machines cannot share a disk")
}

/// A name that a new VM has been given. Dropping it undoes that: the name is again the VM's that had it before, if one did.
#[derive(Debug)]
pub(crate) struct NameClaim<'a> {
    vms: &'a Vms,
    vm: Arc<Vm>,
    replaced: Option<Arc<Vm>>,
    kept: bool,
}

impl NameClaim<'_> {
    /// The VM keeps the name.
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
