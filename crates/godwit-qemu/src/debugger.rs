//! Resumes a guest through QEMU's debugger stub.
//!
//! Once QEMU has sent the devices of a guest that pulls its memory, QEMU regards the guest as running elsewhere. `cont`
//! and `migrate_cancel` are refused from then on, even if the destination never resumed the guest. No state is lost,
//! though: a detaching debugger makes the machine run in any case.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::monitor::qmp::{Qmp, QmpError};

/// Longest time for QEMU to resume the guest.
const TIMEOUT: Duration = Duration::from_secs(5);

/// "Detach" in the debugger's protocol, with a checksum.
const DETACH: &[u8] = b"$D#44";
/// QEMU's acknowledgement and success answer.
const DETACHED: &[u8] = b"+$OK#9a";

/// Resumes the guest, through a temporary socket at `path`.
///
/// # Errors
/// [`QmpError`] if QEMU has no debugger stub or the stub fails.
pub async fn run(qmp: &Qmp, path: &Path) -> Result<(), QmpError> {
    // A node that died here may have left a socket behind.
    let _ = std::fs::remove_file(path);
    let device = format!("unix:{},server=on,wait=off", escaped(path));
    let opened = monitor(qmp, &format!("gdbserver \"{device}\"")).await?;
    let detached = tokio::time::timeout(TIMEOUT, detach(path)).await;
    let closed = monitor(qmp, "gdbserver none").await;
    let _ = std::fs::remove_file(path);
    match detached {
        // An open stub does the guest no harm.
        Ok(Ok(())) => {
            if let Err(error) = closed {
                tracing::warn!(%error, "cannot close QEMU's debugger stub");
            }
            Ok(())
        }
        Ok(Err(error)) => Err(QmpError::Unexpected(format!(
            "its debugger stub cannot be used: {error}; QEMU said: {}",
            opened.trim()
        ))),
        Err(_) => Err(QmpError::Timeout {
            command: String::from("gdbserver"),
            limit: TIMEOUT,
        }),
    }
}

async fn monitor(qmp: &Qmp, line: &str) -> Result<String, QmpError> {
    let arguments = json!({ "command-line": line });
    let said = qmp.execute("human-monitor-command", arguments).await?;
    Ok(said.as_str().unwrap_or_default().to_owned())
}

async fn detach(path: &Path) -> std::io::Result<()> {
    let mut stub = UnixStream::connect(path).await?;
    stub.write_all(DETACH).await?;
    let mut answer = vec![0; DETACHED.len()];
    stub.read_exact(&mut answer).await?;
    if answer == DETACHED {
        Ok(())
    } else {
        let text = String::from_utf8_lossy(&answer).into_owned();
        Err(std::io::Error::other(format!("it answered '{text}'")))
    }
}

/// Escapes a path for a device option inside a quoted word of QEMU's human monitor.
fn escaped(path: &Path) -> String {
    let path = path.display().to_string().replace(',', ",,");
    path.replace('\\', "\\\\").replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_one_word_whatever_is_in_it() {
        assert_eq!(escaped(Path::new("/v m/a,b\"c\\")), "/v m/a,,b\\\"c\\\\");
    }
}
