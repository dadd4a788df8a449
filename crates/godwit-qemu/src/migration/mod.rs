//! Controls QEMU's own migration of the memory and the devices' state.

pub mod device_state;

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use crate::monitor::Monitor;
use crate::monitor::qmp::{Qmp, QmpError, QmpEvent, text};

/// Time between two queries of QEMU's progress.
const POLL: Duration = Duration::from_millis(50);

/// Intended limit of the guest's stop while QEMU sends the rest of the memory, in milliseconds.
const DOWNTIME_LIMIT: u64 = 100;

/// Default bytes per second: more than any link carries.
const NO_LIMIT: u64 = 1 << 40;

/// Longest time for a progress report of QEMU.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// QEMU's status of a pulling migration.
pub const PULLING: &str = "postcopy-active";

/// QEMU's status after the connection broke while the guest ran without all memory.
pub const PULL_BROKEN: &str = "postcopy-paused";

/// Reasons for which the memory does not move.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU gave up the migration.
    #[error("QEMU's migration {status}: {why}")]
    Ended {
        /// `failed` or `cancelled`.
        status: String,
        /// QEMU's explanation.
        why: String,
    },
}

/// Sets QEMU's migration capabilities before memory moves, alike at both ends.
///
/// # Errors
/// [`QmpError::Refused`] with the missing capability.
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

/// Makes a QEMU waiting for memory listen.
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

/// Limits the bytes per second of the memory from now on.
///
/// # Errors
/// [`QmpError`].
pub async fn limit(qmp: &Qmp, max_bandwidth: Option<u64>) -> Result<(), QmpError> {
    let limits = json!({
        "max-bandwidth": max_bandwidth.unwrap_or(NO_LIMIT),
        // Applies to pages that the guest did not request; here 0 means no limit.
        "max-postcopy-bandwidth": max_bandwidth.unwrap_or(0),
    });
    qmp.execute("migrate-set-parameters", limits)
        .await
        .map(drop)
}

/// Destination: listens for the successor of a broken connection. QEMU refuses before noticing the break.
///
/// # Errors
/// [`QmpError`].
pub async fn listen_again(monitor: &Monitor, socket: &Path) -> Result<(), QmpError> {
    let uri = format!("unix:{}", socket.display());
    monitor
        .execute_past_main_loop("migrate-recover", json!({ "uri": uri }))
        .await
}

/// Source: sends the rest to a socket after the connection broke.
///
/// # Errors
/// [`QmpError`].
pub async fn resume(qmp: &Qmp, socket: &Path) -> Result<(), QmpError> {
    let uri = format!("unix:{}", socket.display());
    qmp.execute("migrate", json!({ "uri": uri, "resume": true }))
        .await
        .map(drop)
}

/// Makes a QEMU on either side of a pull treat the connection as broken.
///
/// # Errors
/// [`QmpError`], also when there is no connection to break.
pub async fn break_off(monitor: &Monitor) -> Result<(), QmpError> {
    monitor
        .execute_past_main_loop("migrate-pause", json!({}))
        .await
}

/// The progress of the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Total bytes of memory.
    pub bytes_total: u64,
    /// Bytes left in the current pass.
    pub bytes_left: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Passes over pages dirtied meanwhile.
    pub passes: u64,
}

/// The mode of pulling: the guest runs at the destination before all memory is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pull {
    /// No pulling (pre-copy).
    Never,
    /// From the start (post-copy).
    AtOnce,
    /// After one pass over all memory (hybrid).
    AfterFirstPass,
}

/// The treatment of memory that both QEMUs map from one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// Sent like any other memory.
    Moves,
    /// Left in place, and nothing is sent (the zero-copy migration paper, section 4.1).
    Stays,
}

/// The progress of QEMU's migration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// QEMU's status, such as `active`.
    pub status: String,
    /// QEMU's explanation of a failure.
    pub why: String,
    /// Progress of the memory.
    pub progress: Progress,
    /// Bytes per second dirtied by the guest, with repeated writes counted once a pass; 0 if unknown.
    pub dirtied: u64,
    /// Bytes of memory sent per second; 0 if unknown.
    pub sent: u64,
}

/// Queries QEMU's progress.
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

/// Waits until QEMU's migration has one of these states, and reports the progress to `tell` meanwhile.
///
/// # Errors
/// [`MemoryError::Ended`] if the migration fails or is cancelled.
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

/// Sends the memory until the guest is stopped and only the rest is left. Switches to pulling as the mode requires.
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
                // QEMU may be about to finish without the switch.
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

/// Lets QEMU continue after the pause.
///
/// # Errors
/// [`QmpError`].
pub async fn go_on(qmp: &Qmp) -> Result<(), QmpError> {
    qmp.execute("migrate-continue", json!({ "state": "pre-switchover" }))
        .await
        .map(drop)
}
