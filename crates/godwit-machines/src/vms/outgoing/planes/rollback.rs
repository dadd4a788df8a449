//! Source: cancels QEMU's migration and resumes the guest here.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::vms::vm::Vm;
use godwit_qemu::migration::{self, PULL_BROKEN};
use godwit_qemu::monitor::Monitor;
use godwit_qemu::monitor::qmp::{Qmp, QmpError};
use godwit_qemu::{debugger, inspect};

/// Time between two queries of QEMU's progress.
const POLL: Duration = Duration::from_millis(20);

/// Longest wait for QEMU to leave a cancelled migration.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest cancellation of a healthy QEMU, whose main loop answers and waits for nothing.
const CANCEL_USUALLY: Duration = Duration::from_secs(1);

/// QEMU's state of a guest that was stopped to send the rest.
const STOPPED: &str = "finish-migrate";

/// The trouble of a VM that is [`TakenBack::Bound`].
pub(in crate::vms) const BOUND: &str = "its QEMU keeps a migration that broke off and begins no other: to \
     move the machine, stop it first and run it anew";

/// The abilities of a guest that goes on here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vms) enum TakenBack {
    /// Everything, as before.
    AsBefore,
    /// Everything but a move: see [`BOUND`].
    Bound,
}

/// Cancels QEMU's migration and resumes the guest here if the guest ran before. To be called only while all of the VM's
/// disks are here, so the guest runs nowhere else and never will.
///
/// # Errors
/// [`QmpError`] if QEMU does not let the guest run.
pub(in crate::vms) async fn take_back(
    vm: &Vm,
    qmp: &Qmp,
    ran: bool,
) -> Result<TakenBack, QmpError> {
    let began = Instant::now();
    loop {
        let status = migration::look(qmp).await?.status;
        match status.as_str() {
            "" | "none" | "failed" | "cancelled" | "completed" => break,
            PULL_BROKEN => return let_go(vm, qmp, ran).await,
            // The connection broke as QEMU began to send the devices: some versions then end the migration without a
            // report, and the guest stands still.
            "cancelling" => {
                if began.elapsed() >= CANCEL_USUALLY && inspect::run_state(qmp).await? == STOPPED {
                    return let_go(vm, qmp, ran).await;
                }
            }
            // QEMU refuses to cancel a migration that the destination could complete. The connection can be broken
            // instead, after which nothing moves by itself. The connection may have broken already.
            _ if status.starts_with("postcopy") => {
                let _ = migration::break_off(&Monitor::Main(qmp.clone())).await;
            }
            _ => {
                // The migration may end by itself in the meantime.
                let _ = qmp.execute("migrate_cancel", json!({})).await;
            }
        }
        if began.elapsed() >= CANCEL_TIMEOUT {
            break;
        }
        tokio::time::sleep(POLL).await;
    }
    if !ran {
        return Ok(TakenBack::AsBefore);
    }
    // QEMU itself resumes the guest after a failure, but not after everything was sent.
    loop {
        match inspect::run_state(qmp).await?.as_str() {
            "running" => return Ok(TakenBack::AsBefore),
            STOPPED if began.elapsed() < CANCEL_TIMEOUT => tokio::time::sleep(POLL).await,
            _ => return go_on(qmp).await.map(|()| TakenBack::AsBefore),
        }
    }
}

/// Resumes a guest whose migration QEMU considers complete: nothing is lost, yet QEMU refuses to resume the guest.
async fn let_go(vm: &Vm, qmp: &Qmp, ran: bool) -> Result<TakenBack, QmpError> {
    tracing::warn!(vm = vm.name, "{BOUND}");
    // The node may have restarted since the guest was resumed.
    if inspect::run_state(qmp).await? == STOPPED {
        if !ran {
            // The guest could not be resumed later, and the debugger cannot leave the guest stopped.
            return Err(QmpError::Unexpected(String::from(BOUND)));
        }
        debugger::run(qmp, &vm.places.debugger()).await?;
        // QEMU's own command also does more than resume the guest.
        go_on(qmp).await?;
    }
    Ok(TakenBack::Bound)
}

async fn go_on(qmp: &Qmp) -> Result<(), QmpError> {
    qmp.execute("cont", json!({})).await.map(drop)
}
