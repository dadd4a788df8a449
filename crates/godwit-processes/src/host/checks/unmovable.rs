//! Resources of a process that CRIU does not move, or not unchanged, found in proc(5) before any process stops.

use std::collections::BTreeSet;
use std::fs::{Metadata, read_link};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use super::watched::{Watched, watched};

/// Largest deleted file that CRIU puts into an image (its `--ghost-limit`), in bytes of storage.
const MOST_WITHOUT_NAME: u64 = 1 << 20;
/// Most files checked at the destination.
pub(crate) const MOST_FILES: usize = 4096;

/// Findings about some processes.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// True if a process is stopped, and so cannot answer.
    pub stopped: bool,
    /// The obstacles, one sentence each.
    pub(crate) reasons: Vec<String>,
    /// Files and folders that the destination must have under the same name.
    pub files: BTreeSet<String>,
}

/// Inspects these processes. A process ended meanwhile has no findings.
pub(crate) fn look(pids: &[u32]) -> Found {
    let mut found = Found::default();
    for pid in pids {
        if let Err(error) = of_process(*pid, &mut found)
            && error.kind() != io::ErrorKind::NotFound
        {
            let why = format!("what process {pid} has open cannot be read: {error}");
            found.reasons.push(why);
        }
    }
    let mut known = BTreeSet::new();
    found.reasons.retain(|reason| known.insert(reason.clone()));
    found
}

fn of_process(pid: u32, found: &mut Found) -> io::Result<()> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    if status.lines().any(|line| line.starts_with("State:\tT")) {
        found.stopped = true;
        found.reasons.push(format!(
            "process {pid} is stopped; let it go on first (kill -CONT {pid}, or leave the debugger)"
        ));
    }
    if let Ok(folder) = read_link(format!("/proc/{pid}/cwd")) {
        found.files.insert(folder.to_string_lossy().into_owned());
    }
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // The descriptor was closed meanwhile.
        let (Ok(target), Ok(kind)) = (read_link(&path), std::fs::metadata(&path)) else {
            continue;
        };
        let number = path.file_name().unwrap_or_default().to_string_lossy();
        let about = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"));
        let target = target.to_string_lossy();
        of_file(pid, &target, &kind, found);
        of_descriptor(pid, &target, &about.unwrap_or_default(), found);
    }
    let own_segments =
        read_link(format!("/proc/{pid}/ns/ipc")).ok() != read_link("/proc/self/ns/ipc").ok();
    for line in std::fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let Some((range, file)) = mapped(line) else {
            continue;
        };
        if file.starts_with("/SYSV") {
            if !own_segments {
                found.reasons.push(format!(
                    "process {pid} has a shared memory segment of System V (shmat), which other processes of this host may \
                     have too; detach it, or use a container with an IPC namespace of its own"
                ));
            }
        } else if let Ok(kind) = std::fs::metadata(format!("/proc/{pid}/map_files/{range}")) {
            of_file(pid, file, &kind, found);
        }
    }
    Ok(())
}

/// Returns the range and the file of a line of `maps`, if the line names a file.
fn mapped(line: &str) -> Option<(&str, &str)> {
    let (range, _) = line.split_once(' ')?;
    let file = &line[line.find('/')?..];
    let inode = line.split_whitespace().nth(4)?;
    (inode != "0").then_some((range, file))
}

/// Inspects an open or mapped file.
fn of_file(pid: u32, target: &str, kind: &Metadata, found: &mut Found) {
    let device = kind.file_type().is_char_device() || kind.file_type().is_block_device();
    if device {
        found.reasons.extend(device_reason(pid, target, kind));
        return;
    }
    if !target.starts_with('/') || !(kind.is_file() || kind.is_dir()) {
        return;
    }
    let Some(name) = target.strip_suffix(" (deleted)") else {
        found.files.insert(target.to_owned());
        return;
    };
    // Resources without a real file, such as anonymous memory and I/O rings, are made anew with the process.
    if ["/memfd:", "/dev/zero", "/[aio]", "/SYSV"]
        .iter()
        .any(|own| name.starts_with(own))
    {
        return;
    }
    let bytes = kind.blocks() * 512;
    if kind.nlink() > 0 {
        found.reasons.push(format!(
            "process {pid} has {name} open, which was removed under that name and has another one; close it, or put it back"
        ));
    } else if bytes > MOST_WITHOUT_NAME {
        found.reasons.push(format!(
            "process {pid} has {name} open, which was removed and takes {bytes} bytes; CRIU takes {MOST_WITHOUT_NAME} along at most: \
             close it, or give it a name"
        ));
    }
}

/// Names a device whose descriptor CRIU does not restore. CRIU restores memory devices (`/dev/null` and others),
/// terminals, and network interfaces.
fn device_reason(pid: u32, target: &str, kind: &Metadata) -> Option<String> {
    const MEMORY: u32 = 1;
    const TERMINALS: [u32; 2] = [4, 5];
    const PSEUDO_TERMINALS: std::ops::RangeInclusive<u32> = 136..=143;
    // The library releases these devices before the dump. Another check reports devices without the library.
    if target.starts_with(super::super::family::DEVICES) {
        return None;
    }
    let (major, minor) = (libc::major(kind.rdev()), libc::minor(kind.rdev()));
    let taken = kind.file_type().is_char_device()
        && (major == MEMORY
            || TERMINALS.contains(&major)
            || PSEUDO_TERMINALS.contains(&major)
            || (major, minor) == (10, 200));
    if taken {
        return None;
    }
    Some(if target.starts_with("/dev/infiniband/rdma_cm") {
        format!(
            "process {pid} connects with the RDMA connection manager ({target}), whose connections cannot be made again \
             elsewhere; have it exchange addresses over TCP, if it can (perftest: without -R)"
        )
    } else {
        format!(
            "process {pid} has the device {target} open, which CRIU does not restore; have it closed first"
        )
    })
}

/// Inspects a descriptor apart from the file.
fn of_descriptor(pid: u32, target: &str, about: &str, found: &mut Found) {
    // I/O rings, and other objects with state in the kernel.
    const NOT_TAKEN: [&str; 6] = [
        "[io_uring]",
        "[userfaultfd]",
        "[perf_event]",
        "bpf-",
        "kvm-",
        "[landlock",
    ];
    if let Some(kind) = target.strip_prefix("anon_inode:")
        && NOT_TAKEN.iter().any(|other| kind.starts_with(other))
    {
        found.reasons.push(format!(
            "process {pid} uses {}, which CRIU does not restore; have it closed first, or the program started without it",
            kind.trim_matches(['[', ']'])
        ));
    }
    for line in about.lines() {
        if line.starts_with("lock:") {
            found.reasons.push(format!(
                "process {pid} holds a lock on {target}; somebody else could have it while the process moves: have it let go first"
            ));
        }
        if line.starts_with("inotify ") {
            found.watched(pid, line);
        }
    }
}

impl Found {
    /// Records a watched file or folder, which must have a name here and at the destination.
    fn watched(&mut self, pid: u32, line: &str) {
        let field = |name: &str| {
            let found = line
                .split_whitespace()
                .find_map(|word| word.strip_prefix(name));
            found.and_then(|value| u64::from_str_radix(value, 16).ok())
        };
        let (Some(inode), Some(device)) = (field("ino:"), field("sdev:")) else {
            return;
        };
        match watched(pid, line, device) {
            Some(Watched::Named(name)) => {
                self.files.insert(name);
            }
            Some(Watched::Gone) => self.reasons.push(format!(
                "process {pid} watches a file or folder that is not there any more (inotify, inode {inode}); have it watch no more"
            )),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::process::{Command, Stdio};

    use super::*;

    /// Returns the reasons against this process, which has the open files of all tests.
    fn against_this() -> String {
        look(&[std::process::id()]).reasons.join("\n")
    }

    #[test]
    fn an_ordinary_process_has_nothing_that_stays() {
        let mut child = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::null())
            .spawn()
            .expect("runs");
        // Waits until the child runs the program.
        while !look(&[child.id()])
            .files
            .iter()
            .any(|file| file.ends_with("sleep") || file.ends_with("coreutils"))
        {}
        let found = look(&[child.id()]);
        assert_eq!(found.reasons, [""; 0]);
        // SAFETY: takes no pointer.
        unsafe { libc::kill(child.id().cast_signed(), libc::SIGSTOP) };
        while look(&[child.id()]).reasons.is_empty() {}
        let stopped = look(&[child.id()]).reasons.join("\n");
        assert!(stopped.contains("is stopped"), "{stopped}");
        child.kill().expect("ends");
        child.wait().expect("ended");
        assert_eq!(look(&[child.id()]).reasons, [""; 0], "one that has ended");
    }

    #[test]
    fn files_without_a_name_are_named_from_a_size_on() {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, bytes) in [("small", 4096), ("large", 4 << 20)] {
            let path = folder.path().join(name);
            std::fs::write(&path, vec![1; bytes]).expect("writes");
            let open = File::open(&path).expect("opens");
            std::fs::remove_file(&path).expect("removed");
            let said = against_this();
            assert_eq!(
                said.contains(&path.display().to_string()),
                bytes > 4096,
                "{said}"
            );
            drop(open);
        }
        assert!(!against_this().contains("large"));
    }

    #[test]
    fn a_lock_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("locked");
        let file = File::create(&path).expect("creates");
        file.lock().expect("locks");
        let said = against_this();
        assert!(
            said.contains("locked; somebody else could have it"),
            "{said}"
        );
        file.unlock().expect("unlocks");
        assert!(!against_this().contains("locked;"));
    }

    #[test]
    fn a_watched_folder_that_is_gone_is_named() {
        if !rustix::process::geteuid().is_root() {
            // A node that moves processes runs as root. The kernel resolves a handle for root only.
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("watched");
        std::fs::create_dir(&path).expect("a folder");
        let text = std::ffi::CString::new(path.display().to_string()).expect("a name");
        // SAFETY: a new descriptor, and a name that lives through the call.
        let watch = unsafe {
            let watch = OwnedFd::from_raw_fd(libc::inotify_init1(libc::IN_CLOEXEC));
            assert!(
                libc::inotify_add_watch(watch.as_raw_fd(), text.as_ptr(), libc::IN_CREATE) >= 0
            );
            watch
        };
        // The kernel ends the watch with the folder, unless a descriptor keeps the folder.
        let held = File::open(&path).expect("opens");
        std::fs::remove_dir(&path).expect("removed");
        let said = against_this();
        assert!(
            said.contains("watches a file or folder that is not there"),
            "{said}"
        );
        drop((held, watch));
    }

    #[test]
    fn shared_memory_of_the_host_is_named() {
        // SAFETY: a segment of this test's own, which goes with its last user.
        let said = unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, 4096, 0o600);
            let at = libc::shmat(id, std::ptr::null(), 0);
            libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut());
            let said = against_this();
            libc::shmdt(at);
            said
        };
        assert!(said.contains("System V"), "{said}");
    }

    #[test]
    fn other_devices_and_rings_are_named() {
        let mut found = Found::default();
        of_descriptor(7, "anon_inode:[io_uring]", "pos:\t0\n", &mut found);
        of_descriptor(7, "anon_inode:[eventpoll]", "tfd: 3\n", &mut found);
        assert_eq!(found.reasons.len(), 1);
        assert!(found.reasons[0].contains("io_uring"));
        let null = std::fs::metadata("/dev/null").expect("is there");
        assert_eq!(device_reason(7, "/dev/null", &null), None);
    }
}
