//! The command that fences a host.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;

/// Time limit for the rest of the command's errors, which a child may hold open.
const REST_WITHIN: Duration = Duration::from_millis(200);
/// Bytes of the command's errors that are kept.
const KEPT: usize = 4096;

/// Runs the command for a node at an address. The host is dead if there is no error.
pub(super) async fn run(
    words: &[String],
    within: Duration,
    (node, address): (&str, &str),
) -> Result<(), String> {
    let (program, arguments) = words.split_first().ok_or("no command is given")?;
    let mut child = Command::new(program)
        .args(arguments)
        .env("GODWIT_FENCE_NODE", node)
        .env("GODWIT_FENCE_ADDRESS", address)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("'{program}' cannot be started: {error}"))?;
    let group = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let errors = child.stderr.take();
    let reading = tokio::spawn(async {
        match errors {
            Some(errors) => last_line(errors).await,
            None => String::new(),
        }
    });
    let Ok(ended) = tokio::time::timeout(within, child.wait()).await else {
        if let Some(group) = group {
            // The command may end at this moment.
            let _ = kill_process_group(group, Signal::KILL);
        }
        return Err(format!(
            "'{program}' did not end within {} seconds",
            within.as_secs_f32()
        ));
    };
    let status = ended.map_err(|error| format!("'{program}': {error}"))?;
    if status.success() {
        return Ok(());
    }
    let said = tokio::time::timeout(REST_WITHIN, reading).await;
    let said = said.ok().and_then(Result::ok).unwrap_or_default();
    Err(match said.is_empty() {
        true => format!("'{program}' ended with {status}"),
        false => format!("'{program}' ended with {status}: {said}"),
    })
}

/// Reads to the end, and returns the last line that is not empty, without control characters.
async fn last_line(mut errors: impl AsyncRead + Unpin) -> String {
    let mut kept = Vec::new();
    let mut buffer = [0; 1024];
    while let Ok(count @ 1..) = errors.read(&mut buffer).await {
        kept.extend_from_slice(&buffer[..count]);
        kept.drain(..kept.len().saturating_sub(KEPT));
    }
    let text = String::from_utf8_lossy(&kept);
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty());
    let shown = line.unwrap_or_default().chars();
    shown.filter(|c| !c.is_control()).take(256).collect()
}
