//! Takes over VMs that Godwit did not start.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::nics::named::NamedNic;
use crate::nics::served::ServedNic;
use crate::vms::Vms;
use crate::vms::lifecycle::run::{self, stored_badly, usable};
use crate::vms::lifecycle::watch;
use crate::vms::memory::adopted;
use crate::vms::vm::{Qemu, Vm, VmActivity};
use godwit_api::{AdoptVm, ErrorBody, ErrorCode};
use godwit_context::failpoint;
use godwit_context::ids::new_id;
use godwit_context::store::machine::{VmEntry, VmOrigin};
use godwit_peers::names;
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::{Machine, Served};
use godwit_qemu::monitor::qmp::Qmp;
use godwit_qemu::process::{self, Process};

/// Takes over a VM whose QEMU answers at a socket.
///
/// # Errors
/// No QEMU answers there, or the VM cannot be one of this node's.
pub async fn adopt(vms: &Arc<Vms>, request: AdoptVm) -> Result<Arc<Vm>, ErrorBody> {
    names::check("VM", &request.name)?;
    let name = request.name;
    let refused = |code, why: &dyn std::fmt::Display| {
        ErrorBody::new(code, format!("cannot adopt VM {name}: {why}"))
    };
    let path = PathBuf::from(&request.qmp);
    names::check_path(&format!("cannot adopt VM {name}"), &path)?;
    if let Some(user) = user_of(vms, &path) {
        let why = format!("VM {user} uses the monitor {}", path.display());
        return Err(refused(ErrorCode::Conflict, &why));
    }
    let qmp = Qmp::connect(&path).await.map_err(|error| {
        refused(ErrorCode::Conflict, &format!("{}: {error}", path.display())).hint(
            "start QEMU with -qmp unix:PATH,server=on,wait=off, and leave that monitor to the node",
        )
    })?;
    let facts = Facts::read(&qmp)
        .await
        .map_err(|error| refused(ErrorCode::Conflict, &error))?;
    let pid = qmp.pid().ok_or_else(|| {
        refused(
            ErrorCode::Conflict,
            &"the system does not tell QEMU's process",
        )
    })?;
    let command = process::command_line(pid).map_err(|error| {
        let why = format!("cannot read the command line of process {pid}: {error}");
        refused(ErrorCode::Conflict, &why)
            .hint("the node must run as the user that runs QEMU, or as root")
    })?;
    // Meanwhile no used NIC is removed, or adopted with another VM.
    let _changing = vms.nics.change().await;
    let mut machine = Machine::adopt(&command, |path| served_at(vms, path))
        .ok_or_else(|| refused(ErrorCode::Conflict, &"QEMU's command line is empty"))?;
    note_what_was_plugged(vms, &facts, &mut machine);
    for disk in &machine.disks {
        usable(vms, &name, disk)?;
    }
    run::check_memory(&name, &machine, &facts)?;
    let nics = nics(vms, &name, &machine)?;
    let process = Process::open(pid).map_err(|error| refused(ErrorCode::Conflict, &error))?;
    let mut entry = VmEntry {
        id: new_id()?.to_string(),
        epoch: 1,
        machine,
        qmp: path,
        origin: VmOrigin::Adopted,
        mark: None,
        disk_ids: Vec::new(),
        moved_to: None,
        left_by: None,
        surpassed: None,
        memory: None,
        named_nics: nics.iter().map(|nic| nic.named.name.clone()).collect(),
        ended: None,
    };
    let vm = Vm::new(&vms.context.config, name.clone(), entry.clone());
    // Until QEMU is watched, no request stops the VM, or starts or sends another VM of the name.
    let (claim, _adopting) = vms.claim(&vm, VmActivity::Starting)?;
    let places = vm.places.clone();
    run::make_folder(vms, &name, places).await?;
    failpoint::reach(String::from("vm::adopting")).await;
    // The VM has the name by now, and so the segment of the name.
    entry.memory = adopted::take(vms, &name, pid, &mut entry.machine, &facts).await?;
    vm.lock().entry = entry.clone();
    let stored = vms.context.store.put_adopted_vm(&name, &entry).await;
    stored.map_err(|error| stored_badly(&name, &error))?;
    claim.keep();
    for UsedNic { named, served } in nics {
        vms.nics.remove(&named);
        vm.lock().nics.push(served);
    }
    tracing::info!(vm = name, pid, "adopted the VM");
    let qemu = Qemu {
        qmp,
        process: Arc::new(process),
    };
    watch::attach(vms, &vm, qemu).await;
    Ok(vm)
}

/// A named NIC whose socket a QEMU uses.
struct UsedNic {
    named: Arc<NamedNic>,
    served: Arc<ServedNic>,
}

/// Returns the named NICs that the VM's QEMU uses, in their order, for the VM to take over.
fn nics(vms: &Vms, vm: &str, machine: &Machine) -> Result<Vec<UsedNic>, ErrorBody> {
    let found = machine.nics.iter().enumerate().map(|(number, nic)| {
        let named = vms.nics.with_address(&nic.mac).ok_or_else(|| {
            let text = format!("cannot adopt VM {vm}: its NIC {number} has gone");
            ErrorBody::new(ErrorCode::Conflict, text).hint("see 'godwit nic list'")
        })?;
        let refused = |why: String| {
            let text = format!("cannot adopt VM {vm}: NIC {}: {why}", named.name);
            ErrorBody::new(ErrorCode::Conflict, text)
        };
        if let Some(why) = machine.nic_mismatch(number) {
            return Err(refused(why));
        }
        let served = named.served().map_err(refused)?;
        Ok(UsedNic { named, served })
    });
    found.collect()
}

/// Records used disks and NICs missing from QEMU's command line. Another node would start the VM without these later
/// additions.
fn note_what_was_plugged(vms: &Vms, facts: &Facts, machine: &mut Machine) {
    for disk in vms.disks.all() {
        if facts.uses_socket(&vms.context.config.vhost_socket(&disk.name))
            && !machine.disks.contains(&disk.name)
        {
            machine
                .bound_here
                .push(format!("disk {} was plugged in while it ran", disk.name));
            machine.disks.push(disk.name.clone());
        }
    }
    for nic in vms.nics.all() {
        if facts.uses_socket(&vms.context.config.nic_socket(&nic.name))
            && !machine.nics.contains(&nic.nic)
        {
            machine
                .bound_here
                .push(format!("NIC {} was plugged in while it ran", nic.name));
        }
    }
}

/// Returns the VM with this monitor.
fn user_of(vms: &Vms, path: &Path) -> Option<String> {
    let uses = |vm: &Arc<Vm>| {
        let inner = vm.lock();
        inner.holds_disks() && inner.entry.qmp == path
    };
    vms.all().into_iter().find(uses).map(|vm| vm.name.clone())
}

/// Returns the disk or NIC served at this socket, compared by the file behind the path.
fn served_at(vms: &Vms, path: &Path) -> Option<Served> {
    let file = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let wanted = file(path);
    let is_it = |socket: PathBuf| file(&socket) == wanted;
    let disks = vms.disks.all();
    if let Some(disk) = disks
        .iter()
        .find(|disk| is_it(vms.context.config.vhost_socket(&disk.name)))
    {
        return Some(Served::Disk(disk.name.clone()));
    }
    let nics = vms.nics.all();
    let nic = nics
        .iter()
        .find(|nic| is_it(vms.context.config.nic_socket(&nic.name)))?;
    Some(Served::Nic(nic.nic.clone()))
}
