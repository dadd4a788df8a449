//! CRIU, and the layout that distinguishes a process from another of its number.

use std::io;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::process::Child;

use super::address::{Direction, OwnAddress};
use super::family::{descendants, family};
use super::subject::Subject;

/// Longest run of CRIU, which copies the process's memory to or from files.
pub(super) const LIMIT: Duration = Duration::from_secs(600);
/// Longest wait for the end of the rest of a failed restore.
const END: Duration = Duration::from_secs(5);
/// Most searches for descendants of an overdue CRIU.
const ROUNDS: usize = 20;
/// Longest part of a command's output in a message, in characters.
const TOLD: usize = 400;

/// Runs a command to its end. Returns its success and its output.
///
/// # Errors
/// One sentence if the command cannot be run or does not end.
pub async fn run(
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

/// Runs a command that has to succeed, and returns its output.
///
/// # Errors
/// One sentence with the command's output.
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

/// Dumps a process into image files and ends the process. Its TCP connections are cut off without a word to their
/// peers. `since` is the folder of a [`copy_memory`] relative to this one, to leave out memory unchanged since then.
///
/// # Errors
/// CRIU's message.
pub(super) async fn dump(pid: u32, image: &Path, since: Option<&str>) -> Result<(), String> {
    let pid = pid.to_string();
    let mut action = vec!["dump", "-t", &pid, "--network-lock", "nftables"];
    if let Some(since) = since {
        action.extend(["--track-mem", "--prev-images-dir", since]);
    }
    criu(&action, image, "dump.log").await
}

/// Copies a process's memory into image files; the process pauses only briefly. From then on the kernel tracks changed
/// memory.
///
/// # Errors
/// CRIU's message.
pub(super) async fn copy_memory(pid: u32, image: &Path, since: Option<&str>) -> Result<(), String> {
    let pid = pid.to_string();
    let mut action = vec!["pre-dump", "-t", &pid, "--track-mem"];
    if let Some(since) = since {
        action.extend(["--prev-images-dir", since]);
    }
    criu(&action, image, "dump.log").await
}

/// Returns the reason if the kernel cannot track changed memory, in one sentence.
pub(crate) async fn notes_no_changes() -> Option<String> {
    let arguments = ["check", "--feature", "mem_dirty_track"];
    let checked = run("criu", &arguments, Duration::from_secs(20)).await;
    match checked {
        Ok((true, _)) => None,
        Ok((false, _)) => Some(
            "the kernel does not note which memory changes (`criu check --feature mem_dirty_track`)"
                .to_owned(),
        ),
        Err(why) => Some(why),
    }
}

/// The first Linux that leaves a device's pages in place when change tracking begins, and marks pages as changed on
/// request (MADV_POPULATE_WRITE).
const LEAVES_PINNED_PAGES: (u32, u32) = (5, 14);

/// Returns the reason if this kernel must not track memory that a device uses, in one sentence: an older kernel would
/// give the process other pages than the device has.
pub(crate) fn moves_pinned_pages() -> Option<String> {
    let release = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    let (major, minor) = LEAVES_PINNED_PAGES;
    let is_new = version_of(&release).is_some_and(|version| version >= LEAVES_PINNED_PAGES);
    (!is_new).then(|| {
        format!("Linux {release} cannot note changes of memory that a device has; that needs {major}.{minor}")
    })
}

/// Returns the first two numbers of a kernel's release name.
fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

/// Returns the bytes of anonymous and shared memory of a process and its descendants.
pub(crate) fn resident(pid: u32) -> u64 {
    let all = family(pid).into_iter();
    all.map(|pid| {
        resident_in(&std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default())
    })
    .sum()
}

/// Sums the fields RssAnon and RssShmem of proc_pid_status(5).
fn resident_in(status: &str) -> u64 {
    let fields = status.lines().filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        let kilobytes: u64 = value.trim().strip_suffix(" kB")?.trim().parse().ok()?;
        matches!(name, "RssAnon" | "RssShmem").then_some(kilobytes << 10)
    });
    fields.sum()
}

/// The reason for a failed restore.
#[derive(Debug)]
pub enum NotRestored {
    /// No part of the process is here.
    Nothing(String),
    /// A part of the process may be here.
    Left(String),
}

/// Restores a process from an image, without a container.
///
/// # Errors
/// CRIU's message.
pub(super) async fn make(image: &Path) -> Result<(), String> {
    criu(&["restore", "-d"], image, "restore.log").await
}

/// Restores a process from an image, with the process's address. Returns the process's number.
///
/// # Errors
/// CRIU's message. Any restored part is then ended if possible, and no peer hears of the end.
pub async fn restore(
    image: &Path,
    subject: &Subject,
    address: Option<&OwnAddress>,
    table: &str,
) -> Result<u32, NotRestored> {
    if let Some(container) = &subject.container {
        // An existing container of this name would be ended if this restore failed.
        match super::runc::named(&container.id).await {
            Ok(None) => {}
            Ok(Some(_)) => {
                let why = format!("a container {} is there already", container.id);
                return Err(NotRestored::Nothing(why));
            }
            Err(why) => return Err(NotRestored::Nothing(why)),
        }
    }
    let restored = async {
        if let Some(own) = address {
            // A packet for a connection that is not restored yet would be answered with a reset.
            own.guard(table, Direction::In).await?;
            own.add().await?;
        }
        subject.make(image).await
    };
    let pid = match restored.await {
        Ok(pid) => pid,
        Err(why) => {
            return Err(match clear(subject, address, table).await {
                Ok(()) => NotRestored::Nothing(why),
                Err(left) => NotRestored::Left(format!("{why}; {left}")),
            });
        }
    };
    if let Some(own) = address {
        OwnAddress::unguard(table).await;
        own.announce();
    }
    Ok(pid)
}

/// Ends the rest of a restored process, so the process runs here no more. No peer hears of the end.
///
/// # Errors
/// The process does not end, or the address stays.
pub(crate) async fn clear(
    subject: &Subject,
    address: Option<&OwnAddress>,
    table: &str,
) -> Result<(), String> {
    let pid = subject.pid;
    OwnAddress::unguard(table).await;
    if let Some(own) = address
        && let Err(error) = own.guard(table, Direction::Out).await
    {
        tracing::warn!(pid, error, "peers may hear of the end of what was restored");
    }
    let ended = match &subject.container {
        None => end(pid, &subject.layout).await,
        Some(container) => container.end().await,
    };
    let removed = match address {
        Some(own) => own.remove().await,
        None => Ok(()),
    };
    if removed.is_ok() {
        OwnAddress::unguard(table).await;
    }
    ended.and(removed)
}

async fn end(pid: u32, layout: &str) -> Result<(), String> {
    let began = std::time::Instant::now();
    loop {
        let seen = lives(pid, layout);
        if matches!(seen, Ok(false)) {
            return Ok(());
        }
        if began.elapsed() > END {
            return Err(match seen {
                Ok(_) => format!("what was restored of process {pid} does not end"),
                Err(error) => format!("whether process {pid} has ended cannot be read: {error}"),
            });
        }
        if let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw)
            && let Ok(process) = pidfd_open(number, PidfdFlags::empty())
            // The number may have passed to another process before the descriptor was opened, but not after.
            && lives(pid, layout).unwrap_or(false)
        {
            // The process may have ended just now.
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn criu(action: &[&str], image: &Path, log: &str) -> Result<(), String> {
    let folder = image.display().to_string();
    let arguments = [action, &["-D", &folder, "-o", log, "--tcp-established"]].concat();
    // The output is not captured: the restored process would keep the pipe open.
    let running = tokio::process::Command::new("criu")
        .args(&arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("criu cannot be run: {error}"))?;
    if see_through("criu", running, LIMIT).await?.success() {
        return Ok(());
    }
    let why = first_error(&image.join(log)).unwrap_or_else(|| "no reason".to_owned());
    Err(format!("criu {} failed: {why}", action[0]))
}

/// Returns the first error in a log of CRIU, except for probes of the kernel.
pub(super) fn first_error(log: &Path) -> Option<String> {
    let written = std::fs::read(log).unwrap_or_default();
    let written = String::from_utf8_lossy(&written).into_owned();
    let harmless = ["criu/tun.c", "criu/libnetlink.c", "veth pair"];
    let mut errors = written.lines().filter(|line| line.contains("Error"));
    let why = errors.find(|line| !harmless.iter().any(|part| line.contains(part)))?;
    Some(why.trim().chars().take(TOLD).collect())
}

/// Returns CRIU's version, such as `3.17.1`.
///
/// # Errors
/// One sentence: CRIU is missing, or names no version.
pub async fn version() -> Result<String, String> {
    let said = must("criu", &["--version"], Duration::from_secs(20)).await?;
    let found = said.lines().find_map(|line| line.strip_prefix("Version: "));
    let found = found.ok_or("`criu --version` names no version")?;
    Ok(found.trim().to_owned())
}

/// Waits for the end of a command and kills the command after `limit`. The command's effects are final on return.
///
/// # Errors
/// One sentence if the command was killed.
pub(super) async fn see_through(
    program: &str,
    mut running: Child,
    limit: Duration,
) -> Result<ExitStatus, String> {
    if let Ok(ended) = tokio::time::timeout(limit, running.wait()).await {
        return ended.map_err(|error| format!("{program} cannot be waited for: {error}"));
    }
    if let Some(pid) = running.id() {
        // A process under restore would go on without the command. All descendants stop before any is killed, so no new
        // process starts, and no descendant loses the parent that the search needs.
        signal(pid, Signal::STOP);
        let mut made = Vec::new();
        for _ in 0..ROUNDS {
            let found = descendants(pid);
            found.iter().for_each(|one| signal(*one, Signal::STOP));
            tokio::time::sleep(Duration::from_millis(50)).await;
            if found == made {
                break;
            }
            made = found;
        }
        made.into_iter().for_each(|one| signal(one, Signal::KILL));
    }
    // The result is final only once the command is gone.
    loop {
        // The command may have ended just now.
        let _ = running.start_kill();
        match running.wait().await {
            Ok(_) => break,
            Err(error) => {
                tracing::error!(program, %error, "what takes too long cannot be ended");
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    Err(format!(
        "{program} did not end within {} s, and was ended",
        limit.as_secs()
    ))
}

fn signal(pid: u32, signal: Signal) {
    if let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // The process may have ended just now. The number is not reused: the stopped parent reaps no child.
        let _ = rustix::process::kill_process(number, signal);
    }
}

/// Waits until no CRIU or runc works with an image in this folder: a command outlives its node. Returns true if none
/// does.
pub(crate) async fn wait_for_others(folder: &Path) -> bool {
    let began = std::time::Instant::now();
    let wanted = folder.as_os_str().as_encoded_bytes().to_vec();
    // An unreadable process may be such a command.
    while works_with(&wanted).unwrap_or(true) {
        if began.elapsed() > LIMIT {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    true
}

fn works_with(folder: &[u8]) -> io::Result<bool> {
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let is_number = |byte: &u8| byte.is_ascii_digit();
        if !entry.file_name().as_encoded_bytes().iter().all(is_number) {
            continue;
        }
        let line = of_process(std::fs::read(entry.path().join("cmdline")))?.unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        let is_one = words.next().is_some_and(|program| {
            let name = program.rsplit(|byte| *byte == b'/').next();
            matches!(name, Some(b"criu" | b"runc"))
        });
        if is_one && words.any(|word| word.starts_with(folder)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Turns the error of an ended process into `None`. Other read errors stay errors.
pub(super) fn of_process<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Removes the rules with which CRIU has cut off the connections of a dumped process.
pub(crate) async fn unlock_network(pid: u32) {
    OwnAddress::unguard(&format!("CRIU-{pid}")).await;
}

/// Returns the layout of a process: the places of its heap, arguments and environment. The kernel chooses the layout
/// when the program starts, and CRIU restores the layout. Another process of the number has another layout; an ended
/// process has none.
///
/// # Errors
/// The layout is unreadable, which says nothing about the process.
pub(crate) fn layout(pid: u32) -> io::Result<Option<String>> {
    let stat = of_process(std::fs::read(format!("/proc/{pid}/stat")))?;
    Ok(stat.and_then(|stat| layout_of(&String::from_utf8_lossy(&stat))))
}

/// Parses the fields arg_start to env_end and start_brk of proc_pid_stat(5). An ended process has zeros.
fn layout_of(stat: &str) -> Option<String> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split_whitespace().skip(44).take(5).collect();
    let real = |field: &&str| field.parse::<u64>().is_ok_and(|number| number > 0);
    (fields.len() == 5 && fields.iter().all(real)).then(|| fields.join(" "))
}

/// Returns true if the text is a plausible layout.
pub(crate) fn is_layout(text: &str) -> bool {
    text.len() < 128
        && text.split(' ').count() == 5
        && text
            .split(' ')
            .all(|field| field.parse::<u64>().is_ok_and(|number| number > 0))
}

/// Returns true if this very process runs here, and not another of its number.
///
/// # Errors
/// The errors of [`layout`].
pub(crate) fn lives(pid: u32, known: &str) -> io::Result<bool> {
    Ok(layout(pid)?.is_some_and(|found| found == known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_told_apart() {
        assert_eq!(version_of("6.1.0-56-amd64"), Some((6, 1)));
        assert_eq!(version_of("5.14.0"), Some((5, 14)));
        assert_eq!(version_of("5.4-rc1"), Some((5, 4)));
        assert!(version_of("5.4-rc1") < Some(LEAVES_PINNED_PAGES));
        assert!(version_of("5.20") > Some(LEAVES_PINNED_PAGES));
        assert_eq!(version_of("linux"), None);
        assert_eq!(version_of(""), None);
    }

    #[test]
    fn memory_of_files_is_not_counted() {
        let status = "Name:\tx\nVmRSS:\t    3000 kB\nRssAnon:\t    1024 kB\nRssFile:\t     952 kB\nRssShmem:\t       4 kB\n";
        assert_eq!(resident_in(status), 1028 << 10);
        assert_eq!(resident_in(""), 0);
        assert!(resident(std::process::id()) > 4096);
    }

    #[test]
    fn a_process_is_known_by_its_layout() {
        let own = std::process::id();
        let layout = layout(own).expect("reads").expect("a layout");
        assert!(is_layout(&layout) && lives(own, &layout).expect("reads"));
        assert!(!lives(own, "1 2 3 4 5").expect("reads"));
        assert!(!lives(own, "").expect("reads"));
        // No process can have this number.
        assert!(!lives(0x7fff_ff00, &layout).expect("reads"));
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

    #[test]
    fn what_cannot_be_read_is_no_end_of_a_process() {
        let read = |number| of_process::<()>(Err(io::Error::from_raw_os_error(number)));
        for gone in [rustix::io::Errno::NOENT, rustix::io::Errno::SRCH] {
            assert!(matches!(read(gone.raw_os_error()), Ok(None)));
        }
        for unread in [rustix::io::Errno::MFILE, rustix::io::Errno::IO] {
            read(unread.raw_os_error()).expect_err("says nothing of the process");
        }
    }

    #[tokio::test]
    async fn what_takes_too_long_has_ended_with_all_that_it_made_when_that_is_said() {
        let folder = tempfile::tempdir().expect("a folder");
        let late = folder.path().join("late");
        let script = format!(
            "(sleep 1; touch {0}) & sleep 1; touch {0}; wait",
            late.display()
        );
        let running = tokio::process::Command::new("sh")
            .args(["-c", &script])
            .spawn()
            .expect("runs");
        let error = see_through("runc", running, Duration::from_millis(200)).await;
        let error = error.expect_err("takes too long");
        assert!(error.starts_with("runc did not end within"), "{error}");
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!late.exists(), "something of it worked on");
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
