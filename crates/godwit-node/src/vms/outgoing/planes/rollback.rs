//! Source: gives QEMU's migration up and lets the guest go on here.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::vms::vm::Vm;
use godwit_qemu::migration::{self, PULL_BROKEN};
use godwit_qemu::monitor::Monitor;
use godwit_qemu::monitor::qmp::{Qmp, QmpError};
use godwit_qemu::{debugger, inspect};

/// How often QEMU is asked how far it is.
const POLL: Duration = Duration::from_millis(20);

/// How long QEMU may take to leave a migration that is given up.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long it takes at most as long as it is well. Its main loop answers, so it waits for nothing.
const CANCEL_USUALLY: Duration = Duration::from_secs(1);

/// What QEMU calls a guest that it stopped to send the rest.
const STOPPED: &str = "finish-migrate";

/// What is the matter with a machine that is [`TakenBack::Bound`].
pub(in crate::vms) const BOUND: &str = "its QEMU keeps a migration that broke off and begins no other: to \
     move the machine, stop it first and run it anew";

/// What a guest that goes on here can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vms) enum TakenBack {
    /// Everything, as before.
    AsBefore,
    /// Everything but move: see [`BOUND`].
    Bound,
}

/// Gives QEMU's migration up and lets the guest run here again if it ran before. To be called only
/// while all its disks are here, so that it runs nowhere else and never will.
///
/// # Errors
/// [`QmpError`] when QEMU does not let it run.
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
            // The connection broke as QEMU began to send the devices: some versions end the
            // migration then without saying so, and the guest stands still.
            "cancelling" => {
                if began.elapsed() >= CANCEL_USUALLY && inspect::run_state(qmp).await? == STOPPED {
                    return let_go(vm, qmp, ran).await;
                }
            }
            // It refuses to cancel what the destination could go on with, but the connection can be
            // broken, after which nothing moves by itself. It may have broken already.
            _ if status.starts_with("postcopy") => {
                let _ = migration::break_off(&Monitor::Main(qmp.clone())).await;
            }
            _ => {
                // It may end by itself in the meantime.
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
    // QEMU itself goes on after a failure, but not after it has sent everything.
    loop {
        match inspect::run_state(qmp).await?.as_str() {
            "running" => return Ok(TakenBack::AsBefore),
            STOPPED if began.elapsed() < CANCEL_TIMEOUT => tokio::time::sleep(POLL).await,
            _ => return go_on(qmp).await.map(|()| TakenBack::AsBefore),
        }
    }
}

/// A guest that QEMU takes for one that runs elsewhere: nothing of it is lost, yet QEMU refuses to
/// let it go on.
async fn let_go(vm: &Vm, qmp: &Qmp, ran: bool) -> Result<TakenBack, QmpError> {
    tracing::warn!(vm = vm.name, "{BOUND}");
    // The node may have been started again since it was let go.
    if inspect::run_state(qmp).await? == STOPPED {
        if !ran {
            // Whoever stopped it could not let it go on, and the debugger cannot leave it stopped.
            return Err(QmpError::Unexpected(String::from(BOUND)));
        }
        debugger::run(qmp, &vm.places.debugger()).await?;
        // Once more, for what QEMU's own command does beyond letting it run.
        go_on(qmp).await?;
    }
    Ok(TakenBack::Bound)
}

async fn go_on(qmp: &Qmp) -> Result<(), QmpError> {
    qmp.execute("cont", json!({})).await.map(drop)
}
