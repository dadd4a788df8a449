//! Takes VMs up again after a restart of the node: their QEMUs went on without it.

use std::sync::Arc;

use godwit_core::units::MigrationId;

use super::decide::Incoming;
use super::process::Process;
use super::qmp::Qmp;
use super::vm::{Qemu, Vm, VmActivity, VmEntry, VmMark};
use super::{inspect, memory, run, watch};
use crate::node::Node;

/// Finds the QEMUs of the VMs that were stored. Their disks are served already.
pub(crate) async fn recover(node: &Arc<Node>, stored: Vec<(String, VmEntry)>) {
    for (name, entry) in stored {
        let vm = Vm::new(&node.config, name, entry, VmActivity::Idle);
        if let Err(error) = node.vms.insert(&vm) {
            tracing::error!(vm = vm.name, %error, "cannot take the VM up again");
            continue;
        }
        let path = vm.lock().entry.qmp.clone();
        let qemu = match Qmp::connect(&path).await {
            Ok(qmp) => find(qmp),
            Err(error) => {
                tracing::info!(vm = vm.name, %error, "no QEMU runs the VM");
                None
            }
        };
        let (mark, moved) = {
            let inner = vm.lock();
            (inner.entry.mark.clone(), inner.entry.moved_to.is_some())
        };
        if let Some(qemu) = &qemu {
            tracing::info!(vm = vm.name, pid = qemu.process.pid, "found the VM's QEMU");
        }
        match (mark, qemu) {
            (Some(VmMark::Starting), qemu) => {
                if let Some(qemu) = qemu {
                    qemu.process.kill().await;
                }
                run::forget(node, &vm).await;
            }
            // Its disks went with it: what is left here must never run.
            (_, Some(qemu)) if moved => qemu.process.kill().await,
            (Some(VmMark::Incoming { migration }), qemu) => {
                take_in(node, &vm, &migration, qemu).await;
            }
            (Some(VmMark::Outgoing { .. }), Some(qemu)) => take_back(node, &vm, qemu).await,
            (_, Some(qemu)) => watch::attach(node, &vm, qemu).await,
            (_, None) => {}
        }
    }
}

/// A VM that was coming in: what became of its disks tells whether it runs here.
async fn take_in(node: &Arc<Node>, vm: &Arc<Vm>, migration: &str, qemu: Option<Qemu>) {
    if let Some(qemu) = qemu.clone() {
        watch::attach(node, vm, qemu).await;
    }
    let migration = migration.parse::<MigrationId>().unwrap_or_default();
    let (node, vm) = (Arc::clone(node), Arc::clone(vm));
    tokio::spawn(async move {
        let Ok(guard) = vm.begin(VmActivity::Incoming(migration), |_| Ok(())) else {
            return;
        };
        Incoming::found(&node, &vm, qemu).decide(guard).await;
    });
}

/// A VM that was leaving while its disks have not left: it goes on here.
async fn take_back(node: &Arc<Node>, vm: &Arc<Vm>, qemu: Qemu) {
    // A guest that its owner had stopped before does not show a migration's state.
    let moved = inspect::run_state(&qemu.qmp).await;
    let ran = moved
        .is_ok_and(|state| matches!(state.as_str(), "running" | "finish-migrate" | "postmigrate"));
    let problem = memory::take_back(&qemu.qmp, ran).await.err();
    watch::attach(node, vm, qemu).await;
    let entry = {
        let mut inner = vm.lock();
        inner.problem = problem.map(|error| format!("the guest does not go on: {error}"));
        inner.entry.mark = None;
        inner.entry.clone()
    };
    if let Err(error) = node.store.put_vm(&vm.name, &entry).await {
        tracing::error!(vm = vm.name, %error, "cannot store that the VM stays");
    }
}

fn find(qmp: Qmp) -> Option<Qemu> {
    let process = Process::open(qmp.pid()?).ok()?;
    Some(Qemu {
        qmp,
        process: Arc::new(process),
    })
}
