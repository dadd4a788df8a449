//! Takes over VMs that somebody else started.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::names;
use crate::node::Node;
use crate::store::machine::{VmEntry, VmOrigin};
use crate::vms::lifecycle::run::{self, stored_badly, usable};
use crate::vms::lifecycle::watch;
use crate::vms::memory::adopted;
use crate::vms::vm::{Qemu, Vm, VmActivity};
use godwit_api::{AdoptVm, ErrorBody, ErrorCode};
use godwit_qemu::inspect::Facts;
use godwit_qemu::machine::Machine;
use godwit_qemu::monitor::qmp::Qmp;
use godwit_qemu::process::{self, Process};

/// Takes over a VM whose QEMU answers at a socket.
///
/// # Errors
/// Nothing answers there as QEMU does, or the VM cannot be one of this node.
pub(crate) async fn adopt(node: &Arc<Node>, request: AdoptVm) -> Result<Arc<Vm>, ErrorBody> {
    names::check("VM", &request.name)?;
    let name = request.name;
    let refused = |code, why: &dyn std::fmt::Display| {
        ErrorBody::new(code, format!("cannot adopt VM {name}: {why}"))
    };
    let path = PathBuf::from(&request.qmp);
    names::check_path(&format!("cannot adopt VM {name}"), &path)?;
    if let Some(user) = user_of(node, &path) {
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
    let mut machine = Machine::adopt(&command, |path| disk_at(node, path))
        .ok_or_else(|| refused(ErrorCode::Conflict, &"QEMU's command line is empty"))?;
    note_what_was_plugged(node, &facts, &mut machine);
    for disk in &machine.disks {
        usable(node, &name, disk)?;
    }
    run::check_memory(&name, &machine, &facts)?;
    let process = Process::open(pid).map_err(|error| refused(ErrorCode::Conflict, &error))?;
    let mut entry = VmEntry {
        machine,
        qmp: path,
        origin: VmOrigin::Adopted,
        mark: None,
        moved_to: None,
        memory: None,
    };
    let vm = Vm::new(&node.config, name.clone(), entry.clone(), VmActivity::Idle);
    let places = vm.places.clone();
    run::make_folder(node, &name, places).await?;
    node.vms.insert(&vm)?;
    // The name is this machine's by now, and so is the segment of that name.
    match adopted::take(node, &name, pid, &mut entry.machine, &facts).await {
        Ok(memory) => entry.memory = memory,
        Err(error) => {
            node.vms.remove(&vm);
            return Err(error);
        }
    }
    vm.lock().entry = entry.clone();
    if let Err(error) = node.store.put_vm(&name, &entry).await {
        node.vms.remove(&vm);
        return Err(stored_badly(&name, &error));
    }
    tracing::info!(vm = name, pid, "adopted the VM");
    let qemu = Qemu {
        qmp,
        process: Arc::new(process),
    };
    watch::attach(node, &vm, qemu).await;
    Ok(vm)
}

/// A disk that QEMU uses and its command line does not name was plugged in later: another node
/// would start the VM without it.
fn note_what_was_plugged(node: &Node, facts: &Facts, machine: &mut Machine) {
    for disk in node.disks.all() {
        if facts.uses_socket(&node.config.vhost_socket(&disk.name))
            && !machine.disks.contains(&disk.name)
        {
            machine
                .bound_here
                .push(format!("disk {} was plugged in while it ran", disk.name));
            machine.disks.push(disk.name.clone());
        }
    }
}

/// The VM whose monitor this is.
fn user_of(node: &Node, path: &Path) -> Option<String> {
    let uses = |vm: &Arc<Vm>| {
        let inner = vm.lock();
        inner.holds_disks() && inner.entry.qmp == path
    };
    node.vms
        .all()
        .into_iter()
        .find(uses)
        .map(|vm| vm.name.clone())
}

/// The disk whose socket this is, by the file that it names.
fn disk_at(node: &Node, path: &Path) -> Option<String> {
    let wanted = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    node.disks
        .all()
        .into_iter()
        .find(|disk| {
            let socket = node.config.vhost_socket(&disk.name);
            std::fs::canonicalize(&socket).unwrap_or(socket) == wanted
        })
        .map(|disk| disk.name.clone())
}
