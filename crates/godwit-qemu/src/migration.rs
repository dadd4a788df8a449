//! Drives QEMU's own migration: of the memory and the state of the devices.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use crate::monitor::Monitor;
use crate::monitor::qmp::{Qmp, QmpError, QmpEvent, text};

/// How often QEMU is asked how far it is.
const POLL: Duration = Duration::from_millis(50);

/// How long QEMU should at most stop the guest to send the rest of its memory, in milliseconds.
const DOWNTIME_LIMIT: u64 = 100;

/// Bytes per second when nothing else is asked for: more than any link carries.
const NO_LIMIT: u64 = 1 << 40;

/// How long QEMU may take to say how far it is.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// What QEMU calls a migration that pulls.
pub const PULLING: &str = "postcopy-active";

/// What it calls one whose connection broke while the guest ran without all its memory.
pub const PULL_BROKEN: &str = "postcopy-paused";

/// Why the memory does not move.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
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
pub async fn set_capabilities(
    qmp: &Qmp,
    pull: Pull,
    shared: Shared,
    leaves: bool,
) -> Result<(), QmpError> {
    let capability = |name: &str, on: bool| json!({ "capability": name, "state": on });
    let capabilities = [
        capability("events", true),
        capability("pause-before-switchover", leaves),
        capability("postcopy-ram", pull != Pull::Never),
        capability("x-ignore-shared", shared == Shared::Stays),
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
pub async fn listen(qmp: &Qmp, socket: &Path) -> Result<(), QmpError> {
    let uri = format!("unix:{}", socket.display());
    qmp.execute("migrate-incoming", json!({ "uri": uri }))
        .await
        .map(drop)
}

/// Starts to send the memory to a socket.
///
/// # Errors
/// [`QmpError`].
pub async fn start(qmp: &Qmp, socket: &Path, max_bandwidth: Option<u64>) -> Result<(), QmpError> {
    let limits = json!({ "downtime-limit": DOWNTIME_LIMIT });
    qmp.execute("migrate-set-parameters", limits).await?;
    limit(qmp, max_bandwidth).await?;
    let uri = format!("unix:{}", socket.display());
    qmp.execute("migrate", json!({ "uri": uri }))
        .await
        .map(drop)
}

/// Sends the memory, from now on, with at most so many bytes per second.
///
/// # Errors
/// [`QmpError`].
pub async fn limit(qmp: &Qmp, max_bandwidth: Option<u64>) -> Result<(), QmpError> {
    let limits = json!({
        "max-bandwidth": max_bandwidth.unwrap_or(NO_LIMIT),
        // For what the guest did not ask for; here, nothing is no limit.
        "max-postcopy-bandwidth": max_bandwidth.unwrap_or(0),
    });
    qmp.execute("migrate-set-parameters", limits)
        .await
        .map(drop)
}

/// Destination: listens for the connection that takes the place of a broken one. QEMU agrees only
/// once it has noticed that that one is broken.
///
/// # Errors
/// [`QmpError`].
pub async fn listen_again(monitor: &Monitor, socket: &Path) -> Result<(), QmpError> {
    let uri = format!("unix:{}", socket.display());
    monitor
        .execute_past_main_loop("migrate-recover", json!({ "uri": uri }))
        .await
}

/// Source: sends the rest to a socket, after the connection broke.
///
/// # Errors
/// [`QmpError`].
pub async fn resume(qmp: &Qmp, socket: &Path) -> Result<(), QmpError> {
    let uri = format!("unix:{}", socket.display());
    qmp.execute("migrate", json!({ "uri": uri, "resume": true }))
        .await
        .map(drop)
}

/// Makes a QEMU that pulls, or is pulled from, take its connection for broken.
///
/// # Errors
/// [`QmpError`], also when there is no connection to break.
pub async fn break_off(monitor: &Monitor) -> Result<(), QmpError> {
    monitor
        .execute_past_main_loop("migrate-pause", json!({}))
        .await
}

/// How far the memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of memory in all.
    pub bytes_total: u64,
    /// Bytes that are left in the current pass.
    pub bytes_left: u64,
    /// Bytes that were sent.
    pub bytes_sent: u64,
    /// Passes over what was written meanwhile.
    pub passes: u64,
}

/// Whether the guest runs at the destination before all its memory is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pull {
    /// It does not (pre-copy).
    Never,
    /// From the start (post-copy).
    AtOnce,
    /// After one pass over all of it (hybrid).
    AfterFirstPass,
}

/// What becomes of memory that both QEMUs map from one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// It is sent like any other.
    Moves,
    /// It stays where it is, and nothing of it is sent (the zero-copy migration paper, section 4.1).
    Stays,
}

/// How far QEMU's migration is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// What QEMU calls it, such as `active`.
    pub status: String,
    /// What it says about a failure.
    pub why: String,
    /// How far the memory is.
    pub progress: Progress,
    /// Bytes per second that the guest writes, counting what is written often as once a pass; zero
    /// when that is not known.
    pub dirtied: u64,
    /// Bytes of memory per second that are sent; zero when that is not known.
    pub sent: u64,
}

/// Asks QEMU.
///
/// # Errors
/// [`QmpError`].
pub async fn look(qmp: &Qmp) -> Result<Seen, QmpError> {
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
        progress: Progress {
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
pub async fn wait_for(
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
pub async fn until_paused(
    qmp: &Qmp,
    events: &mut Receiver<QmpEvent>,
    pull: Pull,
    mut tell: impl FnMut(&Seen),
) -> Result<(), MemoryError> {
    if pull != Pull::Never {
        let first = |seen: &Seen| {
            seen.status == "active" && (pull == Pull::AtOnce || seen.progress.passes >= 2)
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
pub async fn go_on(qmp: &Qmp) -> Result<(), QmpError> {
    qmp.execute("migrate-continue", json!({ "state": "pre-switchover" }))
        .await
        .map(drop)
}
