//! Starts VMs.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use godwit_core::units::Bytes;

use crate::nics::request;
use crate::vms::Vms;
use crate::vms::lifecycle::watch;
use crate::vms::memory::{pooled, pools, qemu_fits, released};
use crate::vms::nics;
use crate::vms::vm::{Qemu, Vm, VmActivity, VmGuard, disk_in_use};
use godwit_api::{Accelerator, DiskState, ErrorBody, ErrorCode, RunVm};
use godwit_context::blocking;
use godwit_context::config::MAX_SOCKET_PATH;
use godwit_context::failpoint;
use godwit_context::ids::new_id;
use godwit_context::store::machine::{PooledMemory, VmEntry, VmMark, VmOrigin};
use godwit_disks::disks::disk::Activity;
use godwit_memory::mover::agent;
use godwit_peers::names;
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::{Machine, Parts, Places, names_accelerator};
use godwit_qemu::process::{self, Preload, StartError, sandbox};
use godwit_qemu::version::Version;
use godwit_qemu::{QemuUser, kvm, mac};

const DEFAULT_QEMU: &str = "qemu-system-x86_64";
const DEFAULT_MACHINE: &str = "q35";
const DEFAULT_MEMORY: u64 = 512 << 20;
const MIN_MEMORY: u64 = 1 << 20;
const MAX_CPUS: u32 = 1024;
const MAX_DISKS: usize = 24;
const MAX_ARGUMENTS: usize = 1024;

/// Starts a VM on disks of this node.
///
/// # Errors
/// The request is invalid, a disk cannot be used, or QEMU does not start.
pub async fn run(vms: &Arc<Vms>, request: RunVm) -> Result<Arc<Vm>, ErrorBody> {
    let host = mac::host();
    let user = vms.context.config.qemu_user.as_ref();
    let poolable = !vms.context.config.memory_pools.is_empty();
    let (accelerator, warning) = accelerator(&request, user).await?;
    let machine = machine(
        &request,
        &vms.context.config.name,
        &host,
        accelerator,
        poolable,
    )?;
    // Without this check the error would blame the disks, whose client is the running VM.
    if let Some(other) = vms.find(&request.name) {
        other.may_be_replaced()?;
    }
    vms.protections.refuse(&request.name, "run")?;
    let memory = pooled_memory(vms, &request, &machine)?;
    for disk in &machine.disks {
        usable(vms, &request.name, disk)?;
        unused(vms, &request.name, disk)?;
    }
    let entry = entry(
        vms,
        &request.name,
        machine,
        (new_id()?.to_string(), 1),
        (VmOrigin::Run, VmMark::Starting),
        memory,
    )?;
    let (vm, guard) = reserve(vms, &request.name, entry, VmActivity::Starting).await?;
    if let Some(warning) = &warning {
        tracing::warn!(vm = vm.name, "{warning}");
    }
    vm.lock().warnings.extend(warning);
    if let Err(error) = launch(vms, &vm).await {
        forget(vms, &vm, guard).await;
        return Err(error);
    }
    Ok(vm)
}

/// Returns the memory pool's part of a requested VM.
fn pooled_memory(
    vms: &Vms,
    request: &RunVm,
    machine: &Machine,
) -> Result<Option<PooledMemory>, ErrorBody> {
    let Some(pool) = &request.memory_pool else {
        return Ok(None);
    };
    pools::open(&vms.context.config, pool)?;
    if !machine.is_poolable() {
        let text = format!(
            "VM {}: its arguments for QEMU say where its memory is, so it cannot be put in memory pool {pool}",
            request.name
        );
        return Err(ErrorBody::new(ErrorCode::Invalid, text)
            .hint("leave memory-backend out of them, or --memory-pool"));
    }
    Ok(Some(PooledMemory {
        pool: pool.clone(),
        id: String::new(),
        bytes: request.memory_bytes.unwrap_or(DEFAULT_MEMORY),
        epoch: 1,
        given_to: None,
    }))
}

/// Chooses the accelerator, with a warning for an unexpected choice.
///
/// # Errors
/// KVM was requested and is unusable.
async fn accelerator(
    request: &RunVm,
    user: Option<&QemuUser>,
) -> Result<(&'static str, Option<String>), ErrorBody> {
    let check = match request.accelerator {
        Accelerator::Tcg => return Ok(("tcg", None)),
        // The arguments choose the accelerator.
        _ if names_accelerator(&request.arguments) => return Ok(("kvm", None)),
        Accelerator::Kvm => kvm::check,
        Accelerator::Auto => kvm::check_for_any_guest,
    };
    let user = user.cloned();
    match (
        blocking(move || check(user.as_ref())).await?,
        request.accelerator,
    ) {
        (Ok(()), _) => Ok(("kvm", None)),
        (Err(why), Accelerator::Auto) => Ok((
            "tcg",
            Some(format!(
                "VM {} runs slowly, in QEMU's translator (TCG) instead of KVM: {why}",
                request.name
            )),
        )),
        (Err(why), _) => Err(ErrorBody::new(
            ErrorCode::Conflict,
            format!("VM {}: KVM cannot be used: {why}", request.name),
        )
        .hint("give the node's user access to /dev/kvm (group kvm), or run it with --accel tcg")),
    }
}

/// Returns the version of the QEMU to start.
///
/// # Errors
/// QEMU cannot be run, or gives no version.
pub(in crate::vms) async fn version(
    vms: &Vms,
    vm: &str,
    program: &str,
) -> Result<Version, ErrorBody> {
    let found = Version::of(program, vms.context.config.qemu_user.as_ref()).await;
    found.map_err(|why| {
        ErrorBody::new(ErrorCode::Invalid, format!("cannot start VM {vm}: {why}"))
            .hint("install QEMU, or name it with --qemu PATH")
    })
}

/// Returns the machine of a request, as node `here` of `host` starts it.
fn machine(
    request: &RunVm,
    here: &str,
    host: &str,
    accelerator: &str,
    poolable: bool,
) -> Result<Machine, ErrorBody> {
    names::check("VM", &request.name)?;
    let name = &request.name;
    let invalid = |text: String, hint: &str| {
        Err(ErrorBody::new(ErrorCode::Invalid, format!("VM {name}: {text}")).hint(hint))
    };
    let memory = request.memory_bytes.unwrap_or(DEFAULT_MEMORY);
    if memory < MIN_MEMORY || !memory.is_multiple_of(4096) {
        return invalid(
            format!("memory of {} is not possible", Bytes(memory)),
            "give a multiple of 4 KiB, at least 1 MiB",
        );
    }
    let cpus = request.cpus.unwrap_or(1);
    if cpus == 0 || cpus > MAX_CPUS {
        return invalid(
            format!("{cpus} processors are not possible"),
            "give 1 to 1024",
        );
    }
    if request.disks.len() > MAX_DISKS {
        return invalid(
            format!("{} disks are too many", request.disks.len()),
            "give at most 24",
        );
    }
    let mut sorted: Vec<_> = request.disks.iter().collect();
    sorted.sort();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return invalid(
            format!("disk {} is named twice", pair[0]),
            "name each disk once",
        );
    }
    if request.arguments.len() > MAX_ARGUMENTS
        || request.arguments.iter().any(|word| word.contains('\0'))
    {
        return invalid(
            String::from("its arguments are too many or odd"),
            "leave some out",
        );
    }
    let refused = ["-daemonize", "-incoming", "-pidfile", "-qmp", "-preconfig"];
    if let Some(word) = request
        .arguments
        .iter()
        .find(|word| refused.contains(&word.replacen("--", "-", 1).as_str()))
    {
        return invalid(
            format!("{word} is the node's own business"),
            "leave it out; 'godwit vm adopt' takes over a QEMU that you started yourself",
        );
    }
    let own_machine = request
        .arguments
        .windows(2)
        .any(|pair| is_machine(&pair[0]) && names_type(&pair[1]));
    let machine = match &request.machine {
        Some(machine) => Some(machine.as_str()),
        None if own_machine => None,
        None => Some(DEFAULT_MACHINE),
    };
    let owner = mac::Owner {
        host,
        node: here,
        vm: name,
    };
    let nics = request::nics(owner, &request.nics)?;
    // Not every machine type has a default card, and none has one beside the requested NICs.
    let usual = machine == Some(DEFAULT_MACHINE) && nics.is_empty();
    let arguments = mac::with_addresses(request.arguments.clone(), owner, usual);
    let parts = Parts {
        name,
        disks: &request.disks,
        nics: &nics,
        memory,
        poolable,
        cpus,
        machine,
        accelerator,
        arguments: &arguments,
    };
    let program = request.qemu.as_deref().unwrap_or(DEFAULT_QEMU);
    Ok(Machine::build(program, &parts))
}

fn is_machine(word: &str) -> bool {
    matches!(word, "-machine" | "--machine" | "-M" | "--M")
}

/// Returns true if a `-machine` option names the type, and not only properties.
fn names_type(value: &str) -> bool {
    let first = value.split(',').next().unwrap_or_default();
    !first.contains('=') || value.contains("type=")
}

/// Checks that a VM can use a disk of this node.
///
/// # Errors
/// The disk is not here, not served, or used by another VM.
pub(crate) fn usable(vms: &Vms, vm: &str, name: &str) -> Result<(), ErrorBody> {
    let disk = vms.disks.get(name)?;
    let conflict = |text: String, hint: String| {
        Err(ErrorBody::new(ErrorCode::Conflict, format!("VM {vm}: {text}")).hint(hint))
    };
    let (state, activity) = {
        let inner = disk.lock();
        (inner.state(), inner.activity)
    };
    if state != DiskState::Serving || activity == Activity::Removing {
        let is = match activity {
            Activity::Removing => activity.describe(),
            _ => state.name(),
        };
        return conflict(
            format!("disk {name} is {is} here"),
            format!("see 'godwit disk show {name}'"),
        );
    }
    match vms.user_of(name, Some(vm)) {
        Some(user) => Err(disk_in_use(vm, name, &user)),
        None => Ok(()),
    }
}

/// Refuses a disk with other writers.
fn unused(vms: &Vms, vm: &str, name: &str) -> Result<(), ErrorBody> {
    let clients = vms.disks.get(name)?.clients();
    if clients == 0 {
        return Ok(());
    }
    Err(ErrorBody::new(
        ErrorCode::Conflict,
        format!("VM {vm}: disk {name} has {clients} clients"),
    )
    .hint("detach them first: they and the VM would overwrite each other's data"))
}

/// Returns the durable record of a VM before the start of QEMU.
///
/// # Errors
/// The path of a socket is too long.
pub(crate) fn entry(
    vms: &Vms,
    name: &str,
    machine: Machine,
    (id, epoch): (String, u64),
    (origin, mark): (VmOrigin, VmMark),
    memory: Option<PooledMemory>,
) -> Result<VmEntry, ErrorBody> {
    let places = Places {
        folder: vms.context.config.vms_dir().join(name),
    };
    let longest = [
        places.qmp(),
        places.console(),
        places.incoming(),
        places.recovering(),
        places.outgoing(),
    ];
    for path in &longest {
        check_socket_path(name, path)?;
    }
    for disk in &machine.disks {
        check_socket_path(name, &vms.context.config.vhost_socket(disk))?;
    }
    for nic in 0..machine.nics.len() {
        check_socket_path(name, &places.nic(nic))?;
    }
    Ok(VmEntry {
        id,
        epoch,
        machine,
        qmp: places.qmp(),
        origin,
        mark: Some(mark),
        disk_ids: Vec::new(),
        moved_to: None,
        left_by: None,
        surpassed: None,
        memory,
        named_nics: Vec::new(),
        ended: None,
    })
}

/// Claims the name for a new VM, with `activity` under way, and stores the VM. Meanwhile no other VM gets the name, one
/// of its disks or one of its addresses.
///
/// # Errors
/// The name, a disk or an address is taken, or the VM cannot be stored.
pub(crate) async fn reserve(
    vms: &Arc<Vms>,
    name: &str,
    entry: VmEntry,
    activity: VmActivity,
) -> Result<(Arc<Vm>, VmGuard), ErrorBody> {
    let nics = &entry.machine.nics;
    let _changing = match nics.is_empty() {
        true => None,
        false => Some(vms.nics.change().await),
    };
    if let Some(taken) = request::address_taken(&vms.nics, name, nics) {
        let text = format!("VM {name}: {taken}");
        return Err(ErrorBody::new(ErrorCode::Conflict, text)
            .hint("give the NIC another with mac=, or leave it out and the node chooses one"));
    }
    let vm = Vm::new(&vms.context.config, name.to_owned(), entry.clone());
    let (claim, guard) = vms.claim(&vm, activity)?;
    failpoint::reach(String::from("vm::claimed")).await;
    let stored = vms.context.store.put_vm(name, &entry).await;
    stored.map_err(|error| stored_badly(name, &error))?;
    claim.keep();
    Ok((vm, guard))
}

/// Refuses a socket with a path too long for the kernel.
pub(crate) fn check_socket_path(vm: &str, path: &Path) -> Result<(), ErrorBody> {
    let length = path.as_os_str().as_bytes().len();
    if length <= MAX_SOCKET_PATH {
        return Ok(());
    }
    Err(ErrorBody::new(
        ErrorCode::Invalid,
        format!(
            "VM {vm}: the path of the socket {} has {length} bytes, more than {MAX_SOCKET_PATH}",
            path.display()
        ),
    )
    .hint("choose shorter names, or start the node with a shorter --data-dir"))
}

pub(super) async fn launch(vms: &Arc<Vms>, vm: &Arc<Vm>) -> Result<(), ErrorBody> {
    let mut entry = vm.lock().entry.clone();
    // A disk of a VM cannot be removed, but a removal may have begun before.
    for disk in &entry.machine.disks {
        usable(vms, &vm.name, disk)?;
    }
    let version = version(vms, &vm.name, &entry.machine.program).await?;
    qemu_fits::check(vms, &vm.name, version, entry.memory.as_ref())?;
    pooled::allocate(vms, &vm.name, &mut entry).await?;
    vm.lock().entry.memory = entry.memory.clone();
    let memory = pooled::mapped(vms, vm).await?;
    let socket = |disk: &str| vms.context.config.vhost_socket(disk);
    let mut line = entry
        .machine
        .command_line(version, &vm.places, socket, None, memory.as_ref());
    if vms.context.config.qemu_sandbox {
        line.extend(sandbox::words(&line));
    }
    let program = entry.machine.program.clone();
    let places = vm.places.clone();
    make_folder(vms, &vm.name, places).await?;
    nics::serve(vms, vm).await?;
    let user = vms.context.config.qemu_user.as_ref();
    let (process, qmp) = process::start(&program, &line, &vm.places, user, PRELOAD)
        .await
        .map_err(|error| not_started(&vm.name, &error))?;
    let qemu = Qemu { qmp, process };
    let ready = async {
        let facts = Facts::read(&qemu.qmp).await.map_err(|error| {
            ErrorBody::new(ErrorCode::Internal, format!("VM {}: {error}", vm.name))
        })?;
        check_memory(&vm.name, &entry.machine, &facts)?;
        entry.mark = None;
        vms.context
            .store
            .put_vm(&vm.name, &entry)
            .await
            .map_err(|error| stored_badly(&vm.name, &error))
    };
    if let Err(error) = ready.await {
        qemu.process.kill().await;
        return Err(error);
    }
    tracing::info!(vm = vm.name, pid = qemu.process.pid, "started the VM");
    vm.lock().entry = entry;
    watch::attach(vms, vm, qemu).await;
    Ok(())
}

/// The library that moves a machine's memory, and tracks its written pages, from inside QEMU.
pub(crate) const PRELOAD: Preload<'static> = Preload {
    library: agent::LIBRARY,
    variable: agent::SOCKET_VARIABLE,
};

/// Makes the VM's folder.
pub(crate) async fn make_folder(vms: &Vms, vm: &str, places: Places) -> Result<(), ErrorBody> {
    let folder = places.folder.clone();
    let user = vms.context.config.qemu_user.clone();
    blocking(move || process::make_folder(&places, user.as_ref()))
        .await?
        .map_err(|error| {
            ErrorBody::new(
                ErrorCode::Internal,
                format!(
                    "VM {vm}: cannot make the folder {}: {error}",
                    folder.display()
                ),
            )
        })
}

/// Checks that the memory is shared: disks over vhost-user do their I/O in the guest's memory.
pub(crate) fn check_memory(vm: &str, machine: &Machine, facts: &Facts) -> Result<(), ErrorBody> {
    if machine.disks.is_empty() && machine.nics.is_empty() || facts.memory_shared {
        return Ok(());
    }
    Err(ErrorBody::new(
        ErrorCode::Conflict,
        format!("VM {vm}: its memory is not shared, so its disks and NICs cannot be served"),
    )
    .hint(
        "give QEMU -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine \
         memory-backend=mem",
    ))
}

/// Removes the rest of a VM without a QEMU here, and at last frees the name.
pub(crate) async fn forget(vms: &Arc<Vms>, vm: &Arc<Vm>, under_way: VmGuard) {
    nics::end(vm).await;
    let entry = vm.lock().entry.clone();
    released::release(vms, &vm.name, &entry).await;
    failpoint::reach(String::from("vm::forgetting")).await;
    if let Err(error) = vms.context.store.remove_vm(&vm.name).await {
        tracing::error!(vm = vm.name, %error, "cannot forget the VM");
    }
    let folder = vm.places.folder.clone();
    let removed = blocking(move || std::fs::remove_dir_all(folder)).await;
    if let Ok(Err(error)) = removed
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(vm = vm.name, %error, "cannot remove the VM's folder");
    }
    vms.remove(vm);
    drop(under_way);
}

/// Converts a failure of the store for the API.
pub(crate) fn stored_badly(vm: &str, error: &godwit_context::store::StoreError) -> ErrorBody {
    ErrorBody::new(
        ErrorCode::Internal,
        format!("VM {vm} cannot be stored: {error}"),
    )
    .hint("see the node's log, and whether its data directory has space")
}

/// Converts a failed start of QEMU for the API.
pub(in crate::vms) fn not_started(name: &str, error: &StartError) -> ErrorBody {
    let code = match error.is_askers() {
        true => ErrorCode::Invalid,
        false => ErrorCode::Internal,
    };
    let hint = match error {
        StartError::Program { .. } => "install QEMU, or name it with --qemu PATH",
        StartError::Ended { said, .. } if said.is_empty() => {
            "QEMU said nothing: start it by hand with the same arguments to see why"
        }
        StartError::Ended { .. } => "change what QEMU complains of, and start the VM again",
    };
    ErrorBody::new(code, format!("cannot start VM {name}: {error}")).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_make_no_sense_are_refused_with_a_hint() {
        let good = || RunVm {
            name: String::from("v"),
            disks: vec![String::from("a")],
            nics: Vec::new(),
            memory_bytes: None,
            memory_pool: None,
            cpus: None,
            machine: None,
            accelerator: Accelerator::Tcg,
            qemu: None,
            arguments: Vec::new(),
        };
        machine(&good(), "a", "h", "tcg", false).expect("is fine");
        for wrong in [
            RunVm {
                name: String::from("a/b"),
                ..good()
            },
            RunVm {
                memory_bytes: Some(4097 << 10),
                ..good()
            },
            RunVm {
                memory_bytes: Some(0),
                ..good()
            },
            RunVm {
                cpus: Some(0),
                ..good()
            },
            RunVm {
                disks: vec![String::from("a"); 2],
                ..good()
            },
            RunVm {
                arguments: vec![String::from("--daemonize")],
                ..good()
            },
            RunVm {
                arguments: vec![String::from("a\0b")],
                ..good()
            },
        ] {
            let shown = format!("{wrong:?}");
            let error = machine(&wrong, "a", "h", "tcg", false).expect_err(&shown);
            assert_eq!(error.code, ErrorCode::Invalid, "{shown}");
            assert!(error.hint.is_some(), "{shown}");
        }
    }

    #[test]
    fn a_machine_type_among_the_arguments_wins_over_the_default() {
        for (value, named) in [("pc", true), ("type=pc", true), ("usb=off", false)] {
            assert_eq!(names_type(value), named, "{value}");
        }
    }
}
