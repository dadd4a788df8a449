//! Takes VMs up again after a restart of the node: their QEMUs went on without it.

use std::sync::Arc;

use super::process::Process;
use super::qmp::Qmp;
use super::vm::{Qemu, Vm, VmActivity, VmEntry, VmMark};
use super::{run, watch};
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
        let mark = vm.lock().entry.mark.clone();
        if mark == Some(VmMark::Starting) {
            if let Some(qemu) = qemu {
                qemu.process.kill().await;
            }
            run::forget(node, &vm).await;
        } else if let Some(qemu) = qemu {
            tracing::info!(vm = vm.name, pid = qemu.process.pid, "took the VM up again");
            watch::attach(node, &vm, qemu).await;
        }
    }
}

fn find(qmp: Qmp) -> Option<Qemu> {
    let process = Process::open(qmp.pid()?).ok()?;
    Some(Qemu {
        qmp,
        process: Arc::new(process),
    })
}
