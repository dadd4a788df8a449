//! Watches a VM's QEMU: the run state, the monitor, the end.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;

use crate::vms::Vms;
use crate::vms::nics;
use crate::vms::vm::{Qemu, Vm, VmActivity};
use godwit_context::store::machine::VmEntry;
use godwit_qemu::inspect;
use godwit_qemu::monitor::qmp::Qmp;
use godwit_qemu::process;

/// The end of a guest that has shut down.
pub(crate) const SHUT_DOWN: &str = "its guest shut down";

/// The beginning of the description of any other end of QEMU.
pub(crate) const QEMU_ENDED: &str = "QEMU ended";

/// Longest wait for the end of the monitor of a QEMU that has ended.
const LAST_EVENT: Duration = Duration::from_secs(1);

/// Time between two attempts to reach a lost monitor.
const RECONNECT_EVERY: Duration = Duration::from_secs(1);

/// Makes a QEMU the VM's own and watches the process until QEMU ends or the node closes.
pub(crate) async fn attach(vms: &Arc<Vms>, vm: &Arc<Vm>, qemu: Qemu) {
    let state = inspect::run_state(&qemu.qmp).await.ok();
    // A recovered QEMU connects again by itself.
    let departed = vm.lock().entry.moved_to.is_some();
    let served = match departed {
        true => Ok(()),
        false => nics::serve(vms, vm).await,
    };
    {
        let mut inner = vm.lock();
        inner.run_state = state;
        inner.problem = served.err().map(|error| error.message);
        inner.silent = None;
        inner.qemu = Some(qemu.clone());
    }
    godwit_context::spawn(watch(Arc::clone(vms), Arc::clone(vm), qemu));
}

async fn watch(vms: Arc<Vms>, vm: Arc<Vm>, mut qemu: Qemu) {
    loop {
        let (process, qmp) = (Arc::clone(&qemu.process), qemu.qmp.clone());
        let mut following = pin!(follow(&vm, &qmp));
        tokio::select! {
            () = process.ended() => {
                // The last event, of the guest's shutdown, may not have been read yet.
                let _ = tokio::time::timeout(LAST_EVENT, following).await;
                break;
            }
            () = vms.context.closed() => return,
            () = &mut following => {}
        }
        vm.lock().problem = Some(String::from("QEMU's monitor does not answer"));
        let again = tokio::select! {
            () = process.ended() => break,
            () = vms.context.closed() => return,
            again = reconnect(&vm, process.pid) => again,
        };
        qemu.qmp = again;
        let state = inspect::run_state(&qemu.qmp).await.ok();
        let mut inner = vm.lock();
        inner.run_state = state;
        inner.problem = None;
        inner.qemu = Some(qemu.clone());
    }
    nics::end(&vm).await;
    let log = vm.places.log();
    let (asked, problem, entry) = {
        let mut inner = vm.lock();
        let asked = inner.activity == VmActivity::Stopping || inner.entry.moved_to.is_some();
        let halted = inner.run_state.as_deref() == Some("shutdown");
        let ended_for = inner.ended_for.take();
        let problem = (!asked && !halted).then(|| {
            ended_for.unwrap_or_else(|| match process::log_tail(&log).as_str() {
                "" => String::from(QEMU_ENDED),
                said => format!("{QEMU_ENDED}: {said}"),
            })
        });
        // The stopping or moving task has the last word; a restart settles a marked VM.
        let stays = !asked && inner.entry.mark.is_none();
        if stays {
            let shut_down = || String::from(SHUT_DOWN);
            inner.entry.ended = Some(problem.clone().unwrap_or_else(shut_down));
        }
        (asked, problem, stays.then(|| inner.entry.clone()))
    };
    if let Some(entry) = entry {
        keep_end(&vms, &vm, &entry).await;
    }
    let mut inner = vm.lock();
    inner.qemu = None;
    inner.spare = None;
    inner.run_state = None;
    inner.stands_still = None;
    inner.cannot_go_on = None;
    inner.problem = problem;
    tracing::info!(vm = vm.name, asked, "QEMU has ended");
}

/// Stores the reason for the end of a VM's QEMU. Without a record a restart would guess.
pub(super) async fn keep_end(vms: &Arc<Vms>, vm: &Arc<Vm>, entry: &VmEntry) {
    // A name given away meanwhile is not overwritten.
    let is_known = vms
        .find(&vm.name)
        .is_some_and(|known| Arc::ptr_eq(&known, vm));
    if is_known && let Err(error) = vms.context.store.put_vm(&vm.name, entry).await {
        tracing::error!(vm = vm.name, %error, "cannot store why QEMU has ended");
    }
}

/// Follows the run state until the monitor is lost.
async fn follow(vm: &Arc<Vm>, qmp: &Qmp) {
    let mut events = qmp.events();
    loop {
        let changed = tokio::select! {
            biased;
            event = events.recv() => match event {
                Ok(event) if matches!(event.name.as_str(), "STOP" | "RESUME") => {
                    !vm.lock().checkpointed
                }
                Ok(event) if event.name == "SHUTDOWN" && event.data["guest"] == true => {
                    // QEMU is not asked: it may end before it answers, or answer that it is paused for a checkpoint.
                    vm.lock().run_state = Some(String::from("shutdown"));
                    false
                }
                Ok(event) => matches!(
                    event.name.as_str(),
                    "SHUTDOWN" | "SUSPEND" | "WAKEUP" | "RESET"
                        | "GUEST_PANICKED" | "MIGRATION" | "BLOCK_IO_ERROR"
                ),
                Err(RecvError::Lagged(_)) => true,
                Err(RecvError::Closed) => return,
            },
            () = qmp.closed() => return,
        };
        if changed && let Ok(state) = inspect::run_state(qmp).await {
            vm.lock().run_state = Some(state);
        }
    }
}

async fn reconnect(vm: &Arc<Vm>, pid: u32) -> Qmp {
    let path = vm.lock().entry.qmp.clone();
    loop {
        tokio::time::sleep(RECONNECT_EVERY).await;
        match Qmp::connect(&path).await {
            Ok(qmp) if qmp.pid() == Some(pid) => return qmp,
            Ok(_) => tracing::warn!(vm = vm.name, "another process answers at the VM's monitor"),
            Err(error) => tracing::debug!(vm = vm.name, %error, "the monitor is still lost"),
        }
    }
}
