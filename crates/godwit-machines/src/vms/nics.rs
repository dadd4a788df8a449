//! The NICs of a VM: served with the VM, and ended with the VM.

use std::sync::Arc;

use godwit_api::{ErrorBody, ErrorCode};

use godwit_qemu::machine::MachineNic;

use crate::nics::served::{NicPlace, ServedNic, open};
use crate::vms::Vms;
use crate::vms::vm::Vm;
use godwit_context::blocking;
use godwit_context::failpoint;
use godwit_context::store::machine::VmMark;
use godwit_disks::disks::vhost;

/// Serves the NICs of a VM, unless they are served. The VM's folder must exist.
///
/// # Errors
/// [`ErrorCode::Conflict`] if an uplink cannot be used, with the remedy.
pub(crate) async fn serve(vms: &Arc<Vms>, vm: &Arc<Vm>) -> Result<(), ErrorBody> {
    let (wanted, named, arrives) = {
        let inner = vm.lock();
        if !inner.nics.is_empty() {
            return Ok(());
        }
        let entry = &inner.entry;
        let arrives = matches!(entry.mark, Some(VmMark::Incoming { .. }));
        let named = entry.named_nics.clone();
        (entry.machine.nics.clone(), named, arrives)
    };
    let mut served = Vec::with_capacity(wanted.len());
    if let Err(error) = serve_all(vms, vm, (wanted, named), arrives, &mut served).await {
        // Dropping a served NIC waits for the NIC's thread.
        let _ = blocking(move || drop(served)).await;
        return Err(error);
    }
    vm.lock().nics = served;
    Ok(())
}

async fn serve_all(
    vms: &Arc<Vms>,
    vm: &Arc<Vm>,
    (wanted, named): (Vec<MachineNic>, Vec<String>),
    arrives: bool,
    served: &mut Vec<Arc<ServedNic>>,
) -> Result<(), ErrorBody> {
    for (number, nic) in wanted.into_iter().enumerate() {
        let place = NicPlace {
            label: format!("{}/{number}", vm.name),
            owner: &vm.name,
            number,
            // An adopted QEMU uses the socket of the named NIC.
            socket: match named.get(number) {
                Some(name) => vms.context.config.nic_socket(name),
                None => vm.places.nic(number),
            },
            holds_packets: vms.protections.holds_packets(&vm.name),
        };
        let opened = open(&vms.nics, nic, place, arrives).await.map_err(|why| {
            let text = format!("VM {}: NIC {number} cannot be served: {why}", vm.name);
            ErrorBody::new(ErrorCode::Conflict, text)
        })?;
        served.push(opened);
    }
    Ok(())
}

/// Stops serving a VM's NICs, and returns when their uplinks are closed.
pub(crate) async fn end(vm: &Vm) {
    // A second caller meanwhile also returns when the NICs have ended.
    let _turn = vm.nics_end.lock().await;
    let nics = {
        let mut inner = vm.lock();
        let nics = std::mem::take(&mut inner.nics);
        // Before they are taken out: afterwards another server may listen at the same path.
        for nic in &nics {
            let _ = vhost::remove(&nic.socket);
        }
        nics
    };
    if !nics.is_empty() {
        failpoint::reach(String::from("nics::ending")).await;
        // Later questions are answered with the end of the NIC.
        let _ = blocking(move || nics.iter().for_each(|nic| nic.close())).await;
    }
}
