//! Changes the options of the disks of a moving VM.

use std::sync::Arc;

use crate::vms::Vms;
use godwit_api::{ErrorBody, ErrorCode, SwitchMigration, VmMigration};
use godwit_disks::migrations::change;

/// Changes the migrations of a VM's disks, all of them or none.
///
/// # Errors
/// The move is unknown, has ended, or is too far, or the request is invalid.
pub async fn switch(
    vms: &Arc<Vms>,
    id: &str,
    request: &SwitchMigration,
) -> Result<VmMigration, ErrorBody> {
    let view = vms.migrations.get(vms, id)?;
    if view.phase.ended() {
        let text = format!("migration {id} has ended: it is {}", view.phase.name());
        return Err(ErrorBody::new(ErrorCode::Conflict, text));
    }
    let of_machine = vms.get(&view.vm)?.lock().entry.machine.disks.len();
    let disks = &view.disks;
    if disks.is_empty() || disks.len() < of_machine {
        let text = format!(
            "migration {id} of VM {} stays as it is: not all of its disks are on their way",
            view.vm
        );
        return Err(ErrorBody::new(ErrorCode::Conflict, text).hint("try again shortly"));
    }
    for disk in disks {
        change::check(&vms.disk_migrations, disk, request)?;
    }
    for disk in disks {
        change::change(&vms.disk_migrations, &disk.id, request).await?;
    }
    if let Some(limit) = request.max_bandwidth {
        limit_memory(vms, &view, Some(limit).filter(|limit| *limit > 0)).await?;
    }
    vms.migrations.get(vms, id)
}

/// Limits the bandwidth of the VM's memory in bytes per second, before and during its move.
async fn limit_memory(
    vms: &Arc<Vms>,
    view: &VmMigration,
    bandwidth: Option<u64>,
) -> Result<(), ErrorBody> {
    vms.migrations.set_memory_bandwidth(&view.id, bandwidth);
    let qemu = vms.get(&view.vm)?.qemu()?;
    let limited = godwit_qemu::migration::limit(&qemu.qmp, bandwidth).await;
    limited.map_err(|error| {
        let text = format!(
            "the disks of VM {} keep to the new bandwidth, its memory does not: {error}",
            view.vm
        );
        ErrorBody::new(ErrorCode::Internal, text)
    })
}
