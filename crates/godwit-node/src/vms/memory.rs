//! Drives QEMU's own migration: of the memory and the state of the devices.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::qmp::{Qmp, QmpError, QmpEvent, text};
use super::spare::Spare;
use super::vm::Vm;
use crate::api::{MemoryMode, MemoryProgress};

/// How often QEMU is asked how far it is.
const POLL: Duration = Duration::from_millis(50);

/// How long QEMU should at most stop the guest to send the rest of its memory, in milliseconds.
const DOWNTIME_LIMIT: u64 = 100;

/// Bytes per second when nothing else is asked for: more than any link carries.
const NO_LIMIT: u64 = 1 << 40;

/// How long QEMU may take to say how far it is.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// What QEMU calls a migration that pulls.
pub(super) const PULLING: &str = "postcopy-active";

/// What it calls one whose connection broke while the guest ran without all its memory.
pub(super) const PULL_BROKEN: &str = "postcopy-paused";

/// Why the memory does not move.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    /// The monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU gave the migration up.
    #[error("QEMU's migration {status}: {why}")]
    Ended {
        /// `failed` or `cancelled`.
        status: String,
        /// What QEMU says about it.
        why: String,
    },
}

/// What a QEMU must know before memory moves: the same at both ends.
///
/// # Errors
/// [`QmpError::Refused`] with what QEMU cannot do.
pub(crate) async fn set_capabilities(
    qmp: &Qmp,
    mode: MemoryMode,
    leaves: bool,
) -> Result<(), QmpError> {
    let capability = |name: &str, on: bool| json!({ "capability": name, "state": on });
    let capabilities = [
        capability("events", true),
        capability("pause-before-switchover", leaves),
        capability("postcopy-ram", mode.pulls()),
    ];
    qmp.execute(
        "migrate-set-capabilities",
        json!({ "capabilities": capabilities }),
    )
    .await
    .map(drop)
}

/// Makes a QEMU that was started to wait for memory listen for it.
///
/// # Errors
/// [`QmpError`].
pub(crate) async fn listen(qmp: &Qmp, socket: &Path) -> Result<(), QmpError> {
    let uri = format!("unix:{}", socket.display());
    qmp.execute("migrate-incoming", json!({ "uri": uri }))
        .await
        .map(drop)
}

/// Starts to send the memory to a socket.
///
/// # Errors
/// [`QmpError`].
pub(crate) async fn start(
    qmp: &Qmp,
    socket: &Path,
    max_bandwidth: Option<u64>,
) -> Result<(), QmpError> {
    let limits = json!({
        "downtime-limit": DOWNTIME_LIMIT,
        "max-bandwidth": max_bandwidth.unwrap_or(NO_LIMIT),
        // For what the guest did not ask for; here, nothing is no limit.
        "max-postcopy-bandwidth": max_bandwidth.unwrap_or(0),
    });
    qmp.execute("migrate-set-parameters", limits).await?;
    let uri = format!("unix:{}", socket.display());
    qmp.execute("migrate", json!({ "uri": uri }))
        .await
        .map(drop)
}

/// Destination: listens for the connection that takes the place of a broken one. QEMU agrees only
/// once it has noticed that that one is broken.
///
/// # Errors
/// [`QmpError`].
pub(crate) async fn listen_again(monitor: &Monitor, socket: &Path) -> Result<(), QmpError> {
    let uri = format!("unix:{}", socket.display());
    monitor
        .execute_past_main_loop("migrate-recover", json!({ "uri": uri }))
        .await
}

/// Source: sends the rest to a socket, after the connection broke.
///
/// # Errors
/// [`QmpError`].
pub(crate) async fn resume(qmp: &Qmp, socket: &Path) -> Result<(), QmpError> {
    let uri = format!("unix:{}", socket.display());
    qmp.execute("migrate", json!({ "uri": uri, "resume": true }))
        .await
        .map(drop)
}

/// Makes a QEMU that pulls, or is pulled from, take its connection for broken.
///
/// # Errors
/// [`QmpError`], also when there is no connection to break.
pub(crate) async fn break_off(monitor: &Monitor) -> Result<(), QmpError> {
    monitor
        .execute_past_main_loop("migrate-pause", json!({}))
        .await
}

/// A monitor for what must work while QEMU's main loop waits for a page: a page that comes only once
/// this is done.
#[derive(Clone, Debug)]
pub(crate) enum Monitor {
    /// The one that is there for that.
    Spare(Spare),
    /// The one for everything.
    Main(Qmp),
}

impl Monitor {
    /// The better one of a VM's monitors, if there is one.
    pub(crate) fn of(vm: &Vm) -> Option<Self> {
        let inner = vm.lock();
        let main = || inner.qemu.as_ref().map(|qemu| Self::Main(qemu.qmp.clone()));
        inner.spare.clone().map(Self::Spare).or_else(main)
    }

    async fn execute_past_main_loop(
        &self,
        command: &'static str,
        arguments: Value,
    ) -> Result<(), QmpError> {
        match self {
            Self::Spare(spare) => spare.execute(command, arguments).await,
            Self::Main(qmp) => qmp.execute_out_of_band(command, arguments).await.map(drop),
        }
    }
}

/// How far QEMU's migration is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// What QEMU calls it, such as `active`.
    pub(crate) status: String,
    /// What it says about a failure.
    pub(crate) why: String,
    /// How far the memory is.
    pub(crate) progress: MemoryProgress,
    /// Bytes per second that the guest writes, counting what is written often as once a pass; zero
    /// when that is not known.
    pub(crate) dirtied: u64,
    /// Bytes of memory per second that are sent; zero when that is not known.
    pub(crate) sent: u64,
}

/// Asks QEMU.
///
/// # Errors
/// [`QmpError`].
pub(crate) async fn look(qmp: &Qmp) -> Result<Seen, QmpError> {
    let info = qmp
        .execute_within("query-migrate", json!({}), LOOK_TIMEOUT)
        .await?;
    let memory = |field: &str| {
        info.pointer(&format!("/ram/{field}"))
            .and_then(Value::as_u64)
            .unwrap_or(0)
    };
    Ok(Seen {
        status: text(&info, "status"),
        why: text(&info, "error-desc"),
        progress: MemoryProgress {
            bytes_total: memory("total"),
            bytes_left: memory("remaining"),
            bytes_sent: memory("transferred"),
            passes: memory("dirty-sync-count"),
        },
        dirtied: memory("dirty-pages-rate").saturating_mul(memory("page-size")),
        sent: memory("pages-per-second").saturating_mul(memory("page-size")),
    })
}

/// Waits until QEMU's migration has one of these states, and tells how far it is meanwhile.
///
/// # Errors
/// [`MemoryError::Ended`] when it fails or is cancelled.
pub(crate) async fn wait_for(
    qmp: &Qmp,
    events: &mut Receiver<QmpEvent>,
    wanted: &[&str],
    mut tell: impl FnMut(&Seen),
) -> Result<(), MemoryError> {
    loop {
        let seen = look(qmp).await?;
        tell(&seen);
        if wanted.contains(&seen.status.as_str()) {
            return Ok(());
        }
        if matches!(
            seen.status.as_str(),
            "failed" | "cancelled" | "cancelling" | PULL_BROKEN
        ) {
            return Err(MemoryError::Ended {
                why: if seen.why.is_empty() {
                    String::from("it gives no reason; see QEMU's log")
                } else {
                    seen.why
                },
                status: seen.status,
            });
        }
        let deadline = tokio::time::Instant::now() + POLL;
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Ok(event) if event.name == "MIGRATION" => {
                        if wanted.contains(&text(&event.data, "status").as_str()) {
                            return Ok(());
                        }
                        break;
                    }
                    Ok(_) => {}
                    Err(RecvError::Lagged(_)) => break,
                    Err(RecvError::Closed) => {
                        return Err(QmpError::Closed(String::from("QEMU has ended")).into());
                    }
                },
                () = tokio::time::sleep_until(deadline) => break,
            }
        }
    }
}

/// Sends the memory until the guest stands still and only the rest is left, and switches to pulling
/// when the mode says so.
///
/// # Errors
/// [`MemoryError`].
pub(crate) async fn until_paused(
    qmp: &Qmp,
    events: &mut Receiver<QmpEvent>,
    mode: MemoryMode,
    mut tell: impl FnMut(&Seen),
) -> Result<(), MemoryError> {
    if mode.pulls() {
        let first = |seen: &Seen| {
            seen.status == "active" && (mode == MemoryMode::PostCopy || seen.progress.passes >= 2)
        };
        let mut due = false;
        loop {
            let states = ["active", "pre-switchover", "completed"];
            wait_for(qmp, events, &states, |seen| {
                due |= first(seen);
                tell(seen);
            })
            .await?;
            if due {
                // QEMU may be about to finish without it.
                let _ = qmp.execute("migrate-start-postcopy", json!({})).await;
                break;
            }
            if look(qmp).await?.status != "active" {
                break;
            }
            tokio::time::sleep(POLL).await;
        }
    }
    wait_for(qmp, events, &["pre-switchover", "completed"], tell).await
}

/// Lets QEMU go on after the pause.
///
/// # Errors
/// [`QmpError`].
pub(crate) async fn go_on(qmp: &Qmp) -> Result<(), QmpError> {
    qmp.execute("migrate-continue", json!({ "state": "pre-switchover" }))
        .await
        .map(drop)
}
