//! Starts VMs that this node has taken over from a lost node.

use std::sync::Arc;
use std::time::Duration;

use crate::vms::Vms;
use crate::vms::lifecycle::run;
use crate::vms::vm::{Vm, VmGuard};

/// Time between two attempts to start QEMU.
const RETRY: Duration = Duration::from_secs(2);

/// Starts QEMU on the VM's disks. Tries again until that succeeds, the VM is gone, or the node closes.
pub(crate) async fn start(vms: Arc<Vms>, vm: Arc<Vm>, under_way: VmGuard) {
    loop {
        let is_known = vms
            .find(&vm.name)
            .is_some_and(|found| Arc::ptr_eq(&found, &vm));
        if !is_known || vms.context.is_closing() {
            break;
        }
        match run::launch(&vms, &vm).await {
            Ok(()) => {
                tracing::warn!(vm = vm.name, "the VM runs here now");
                break;
            }
            Err(error) => {
                tracing::error!(vm = vm.name, %error, "cannot start the VM taken over; trying again");
                vm.lock().problem = Some(format!("taken over, and {error}"));
            }
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = vms.context.closed() => break,
        }
    }
    drop(under_way);
}
