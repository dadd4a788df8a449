//! Stops VMs, and forgets VMs that moved away.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use crate::protect;
use crate::vms::Vms;
use crate::vms::incoming::doubt::{self, Verdict};
use crate::vms::lifecycle::run;
use crate::vms::vm::{Vm, VmActivity};
use godwit_api::{ErrorBody, ErrorCode, StopVm};
use godwit_context::store::machine::VmMark;

/// Default time for the guest to shut down.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest permitted timeout in a request, in seconds: shorter than the longest request.
const MAX_TIMEOUT: u64 = 80;
/// Longest wait for QEMU's end after `quit`.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for the disks' engines to notice QEMU's end.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between two checks of the disks.
const POLL: Duration = Duration::from_millis(5);

/// Stops a VM and forgets the VM. Its disks stay. A protection ends first.
///
/// # Errors
/// The VM has another activity or moved to another node, or the guest does not shut down in time.
pub async fn stop(vms: &Arc<Vms>, name: &str, request: StopVm) -> Result<(), ErrorBody> {
    let vm = vms.get(name)?;
    let limit = match request.timeout_seconds {
        None => DEFAULT_TIMEOUT,
        Some(seconds @ 1..=MAX_TIMEOUT) => Duration::from_secs(seconds),
        Some(seconds) => {
            return Err(ErrorBody::new(
                ErrorCode::Invalid,
                format!("VM {name}: cannot wait {seconds} seconds for its end"),
            )
            .hint(format!("wait 1 to {MAX_TIMEOUT} seconds")));
        }
    };
    if vms.protections.runs_protected(name) {
        protect::unprotect(vms, name, false).await?;
    }
    // The remaining QEMU of a departed VM may have the rest of the memory of a guest running elsewhere.
    let verdicts = vm.lock().verdicts.clone();
    if let Some(verdicts) = verdicts {
        return match request.force {
            true => doubt::decide(&vm, &verdicts, Verdict::GivenUp).await,
            false => Err(doubt::warning(name, &vm.lock())),
        };
    }
    let guard = match vm.begin(VmActivity::Stopping, |inner| vm.is_here(inner)) {
        Err(_) if request.force && vm.lock().activity == VmActivity::Stopping => {
            return hasten(vms, &vm).await;
        }
        begun => begun?,
    };
    let (qemu, silent) = {
        let inner = vm.lock();
        (inner.qemu.clone(), inner.silent.clone())
    };
    if let Some(silent) = silent {
        if !request.force {
            let text = format!(
                "VM {name} cannot be told to shut down: its QEMU does not answer, or waits for its memory"
            );
            return Err(ErrorBody::new(ErrorCode::Conflict, text).hint(
                "wait for it, or stop it with --force: that is like a power failure for the guest",
            ));
        }
        silent.kill().await;
    }
    if let Some(qemu) = qemu {
        let (command, limit) = if request.force {
            ("quit", QUIT_TIMEOUT)
        } else {
            ("system_powerdown", limit)
        };
        let asked = qemu.qmp.execute(command, json!({})).await;
        let ended = tokio::time::timeout(limit, qemu.process.ended())
            .await
            .is_ok();
        if !ended && request.force {
            qemu.process.kill().await;
        } else if !ended {
            let why = match asked {
                Ok(_) => format!("did not shut down within {} seconds", limit.as_secs()),
                Err(error) => format!("cannot be told to shut down: {error}"),
            };
            return Err(
                ErrorBody::new(ErrorCode::Conflict, format!("VM {name} {why}"))
                    .hint("stop it with --force: that is like a power failure for the guest"),
            );
        }
    }
    let disks = vm.lock().entry.machine.disks.clone();
    let released = async {
        for disk in &disks {
            released(vms, disk).await;
        }
    };
    // Another client may use a disk.
    let _ = tokio::time::timeout(RELEASE_TIMEOUT, released).await;
    run::forget(vms, &vm, guard).await;
    tracing::info!(vm = name, forced = request.force, "stopped the VM");
    Ok(())
}

/// Ends QEMU during another request's wait for the guest to shut down. Returns once the VM is removed.
async fn hasten(vms: &Arc<Vms>, vm: &Arc<Vm>) -> Result<(), ErrorBody> {
    let qemu = vm.lock().qemu.clone();
    if let Some(qemu) = qemu {
        qemu.process.kill().await;
    }
    let is_there = || {
        let found = vms.find(&vm.name);
        found.is_some_and(|found| Arc::ptr_eq(&found, vm))
    };
    let gone = async {
        while is_there() {
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(QUIT_TIMEOUT, gone).await.map_err(|_| {
        let text = format!("VM {} is still being stopped", vm.name);
        ErrorBody::new(ErrorCode::Conflict, text).hint(format!("see 'godwit vm show {}'", vm.name))
    })
}

/// Removes a departed VM from this node's list.
///
/// # Errors
/// The VM is here, has an activity, or the rest of the memory is here: `force` overrides the last, once no activity is
/// under way.
pub async fn forget(vms: &Arc<Vms>, name: &str, force: bool) -> Result<(), ErrorBody> {
    let vm = vms.get(name)?;
    let guard = vm.begin(VmActivity::Stopping, |inner| {
        let Some(to) = &inner.entry.moved_to else {
            let text = format!("VM {name} is on this node");
            return Err(ErrorBody::new(ErrorCode::Conflict, text)
                .hint(format!("stop it with 'godwit vm stop {name}'")));
        };
        if matches!(inner.entry.mark, Some(VmMark::Giving { .. })) && !force {
            let text = format!("node '{to}' does not have all of the memory of VM {name}");
            return Err(ErrorBody::new(ErrorCode::Conflict, text).hint(
                "wait for it; --force forgets it all the same, and the guest may be lost there",
            ));
        }
        Ok(())
    })?;
    run::forget(vms, &vm, guard).await;
    tracing::info!(vm = name, force, "forgot the VM, which moved away");
    Ok(())
}

/// Waits until a disk has no clients: after the VM's stop a caller may then remove the disk at once.
async fn released(vms: &Vms, disk: &str) {
    while vms.disks.find(disk).is_some_and(|disk| disk.clients() > 0) {
        tokio::time::sleep(POLL).await;
    }
}
