//! CRIU, and what tells a process from another of its number.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::address::{Direction, OwnAddress};

/// How long CRIU may take: it copies the process's memory to or from files.
const LIMIT: Duration = Duration::from_secs(600);
/// How long what a failed restore left may take to end.
const END: Duration = Duration::from_secs(5);
/// Most of what a command said that is told.
const TOLD: usize = 400;

/// Runs a command to its end. Whether it succeeded, and what it said.
///
/// # Errors
/// One sentence if it cannot be run or does not end.
pub(crate) async fn run(
    program: &str,
    arguments: &[&str],
    limit: Duration,
) -> Result<(bool, String), String> {
    let running = tokio::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output();
    let output = tokio::time::timeout(limit, running)
        .await
        .map_err(|_| format!("{program} does not end within {} s", limit.as_secs()))?
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => format!("{program} is not installed"),
            _ => format!("{program} cannot be run: {error}"),
        })?;
    let said = if output.status.success() {
        output.stdout
    } else {
        [output.stderr, output.stdout].concat()
    };
    Ok((
        output.status.success(),
        String::from_utf8_lossy(&said).into_owned(),
    ))
}

/// Runs a command that has to succeed; gives what it printed.
///
/// # Errors
/// One sentence with what it said.
pub(crate) async fn must(
    program: &str,
    arguments: &[&str],
    limit: Duration,
) -> Result<String, String> {
    match run(program, arguments, limit).await? {
        (true, said) => Ok(said),
        (false, said) => {
            let said: String = said.trim().chars().take(TOLD).collect();
            Err(format!(
                "`{program} {}` failed: {said}",
                arguments.join(" ")
            ))
        }
    }
}

/// Makes files of a process, which then runs no more. Its TCP connections are cut off without a word to their peers.
///
/// # Errors
/// What CRIU says.
pub(crate) async fn dump(pid: u32, image: &Path) -> Result<(), String> {
    let pid = pid.to_string();
    let action = ["dump", "-t", &pid, "--network-lock", "nftables"];
    criu(&action, image, "dump.log").await
}

/// Makes the process of its files, with its address.
///
/// # Errors
/// What CRIU says. What the process came to is ended then, and nobody hears of its end.
pub(crate) async fn restore(
    image: &Path,
    pid: u32,
    layout: &str,
    address: Option<&OwnAddress>,
    table: &str,
) -> Result<(), String> {
    let restored = async {
        if let Some(own) = address {
            // Whatever comes for a connection that is not there yet would be answered with a reset.
            own.guard(table, Direction::In).await?;
            own.add().await?;
        }
        criu(&["restore", "-d"], image, "restore.log").await
    };
    let restored = restored.await;
    if restored.is_err() {
        clear(pid, layout, address, table).await?;
        return restored;
    }
    if let Some(own) = address {
        OwnAddress::unguard(table).await;
        own.announce();
    }
    Ok(())
}

/// Ends what a restore left of a process, so that it runs here no more. Nobody hears of its end.
///
/// # Errors
/// It does not end.
pub(crate) async fn clear(
    pid: u32,
    layout: &str,
    address: Option<&OwnAddress>,
    table: &str,
) -> Result<(), String> {
    OwnAddress::unguard(table).await;
    let silenced = match address {
        Some(own) => own.guard(table, Direction::Out).await,
        None => Ok(()),
    };
    let ended = end(pid, layout).await;
    if let Some(own) = address {
        own.remove().await;
        OwnAddress::unguard(table).await;
    }
    silenced.and(ended)
}

async fn end(pid: u32, layout: &str) -> Result<(), String> {
    let began = std::time::Instant::now();
    while lives(pid, layout) {
        if began.elapsed() > END {
            return Err(format!("what was restored of process {pid} does not end"));
        }
        if let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw)
            && let Ok(process) = pidfd_open(number, PidfdFlags::empty())
            // The number may have got to another process before this was opened, and not after.
            && lives(pid, layout)
        {
            // It may have ended just now.
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

async fn criu(action: &[&str], image: &Path, log: &str) -> Result<(), String> {
    let folder = image.display().to_string();
    let arguments = [action, &["-D", &folder, "-o", log, "--tcp-established"]].concat();
    // Not its output: what it restores must not keep anybody waiting for the end of that.
    let running = tokio::process::Command::new("criu")
        .args(&arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let ended = tokio::time::timeout(LIMIT, running)
        .await
        .map_err(|_| format!("criu does not end within {} s", LIMIT.as_secs()))?
        .map_err(|error| format!("criu cannot be run: {error}"))?;
    if ended.success() {
        return Ok(());
    }
    let written = std::fs::read(image.join(log)).unwrap_or_default();
    let written = String::from_utf8_lossy(&written).into_owned();
    let why = written.lines().find(|line| line.contains("Error"));
    let why: String = why
        .unwrap_or("no reason")
        .trim()
        .chars()
        .take(TOLD)
        .collect();
    Err(format!("criu {} failed: {why}", action[0]))
}

/// Waits until no CRIU works with an image in this folder: one that a node has started outlives the node.
pub(crate) async fn wait_for_others(folder: &Path) {
    let began = std::time::Instant::now();
    let wanted = folder.as_os_str().as_encoded_bytes().to_vec();
    while works_with(&wanted) && began.elapsed() < LIMIT {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn works_with(folder: &[u8]) -> bool {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        words
            .next()
            .is_some_and(|program| program == b"criu" || program.ends_with(b"/criu"))
            && words.any(|word| word.starts_with(folder))
    })
}

/// Ends the rules with which CRIU has cut off the connections of a process that it dumped.
pub(crate) async fn unlock_network(pid: u32) {
    OwnAddress::unguard(&format!("CRIU-{pid}")).await;
}

/// Where a process's heap, arguments and environment lie. That was drawn when the program began, and CRIU restores it; a
/// process that only has the number lies elsewhere, and one that has ended nowhere.
pub(crate) fn layout(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    layout_of(&stat)
}

/// The fields arg_start to env_end and start_brk of proc_pid_stat(5); one that has ended has zeros.
fn layout_of(stat: &str) -> Option<String> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split_whitespace().skip(44).take(5).collect();
    let real = |field: &&str| field.parse::<u64>().is_ok_and(|number| number > 0);
    (fields.len() == 5 && fields.iter().all(real)).then(|| fields.join(" "))
}

/// Whether a layout can be one.
pub(crate) fn is_layout(text: &str) -> bool {
    text.len() < 128
        && text.split(' ').count() == 5
        && text
            .split(' ')
            .all(|field| field.parse::<u64>().is_ok_and(|number| number > 0))
}

/// Whether the process runs here, and not another of its number.
pub(crate) fn lives(pid: u32, known: &str) -> bool {
    layout(pid).is_some_and(|found| found == known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_layout() {
        let own = std::process::id();
        let layout = layout(own).expect("a layout");
        assert!(is_layout(&layout) && lives(own, &layout));
        assert!(!lives(own, "1 2 3 4 5"));
        assert!(!lives(own, ""));
        let mut ended: Vec<String> = (1..=52).map(|field| field.to_string()).collect();
        ended[46] = "0".to_owned();
        assert_eq!(
            layout_of(&format!("7 (a ) b) {}", ended[2..].join(" "))),
            None
        );
        for wrong in [
            "",
            "1 2 3 4",
            "1 2 3 4 0",
            "1 2 3 4 x",
            "1 2 3 4 5 6",
            "'; reboot; 1 2 3 4",
        ] {
            assert!(!is_layout(wrong), "{wrong}");
        }
    }

    #[tokio::test]
    async fn what_a_command_said_is_told() {
        let limit = Duration::from_secs(10);
        let error = must("sh", &["-c", "echo no >&2; exit 3"], limit)
            .await
            .unwrap_err();
        assert!(error.ends_with("failed: no"), "{error}");
        let error = must("no-such-program", &[], limit).await.unwrap_err();
        assert_eq!(error, "no-such-program is not installed");
    }
}
