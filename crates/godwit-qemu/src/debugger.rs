//! Lets a guest run through QEMU's debugger stub.
//!
//! Once QEMU has sent the devices of a guest that pulls its memory, it counts the guest as one that
//! runs elsewhere: `cont` and `migrate_cancel` are refused for good, even when the other side never
//! let it run. Nothing is lost, though, and a debugger that lets go of a machine makes it run whatever
//! QEMU thinks of it.

use std::path::Path;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::monitor::qmp::{Qmp, QmpError};

/// How long QEMU may take to let the guest run.
const TIMEOUT: Duration = Duration::from_secs(5);

/// "Detach", in the debugger's protocol: what it says, and the sum of its characters.
const DETACH: &[u8] = b"$D#44";
/// How QEMU confirms that it got it and did it.
const DETACHED: &[u8] = b"+$OK#9a";

/// Lets the guest run, through a socket at `path` that is there only meanwhile.
///
/// # Errors
/// [`QmpError`] when QEMU has no such stub or does not do it.
pub async fn run(qmp: &Qmp, path: &Path) -> Result<(), QmpError> {
    // One that a node left which died here is in the way.
    let _ = std::fs::remove_file(path);
    let device = format!("unix:{},server=on,wait=off", escaped(path));
    let opened = monitor(qmp, &format!("gdbserver \"{device}\"")).await?;
    let detached = tokio::time::timeout(TIMEOUT, detach(path)).await;
    let closed = monitor(qmp, "gdbserver none").await;
    let _ = std::fs::remove_file(path);
    match detached {
        // A stub that stays open does the guest no harm.
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

/// A path inside a device's options inside a quoted word of QEMU's human monitor.
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
