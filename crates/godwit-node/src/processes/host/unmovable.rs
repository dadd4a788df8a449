//! What a process has that CRIU does not take, or not as it is, found by reading proc(5) before anything is stopped.

use std::collections::BTreeSet;
use std::fs::{Metadata, read_link};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Larger files without a name are not put into an image by CRIU (its `--ghost-limit`), in bytes of storage.
const MOST_WITHOUT_NAME: u64 = 1 << 20;
/// Files that are asked after at the destination.
pub(crate) const MOST_FILES: usize = 4096;

/// What was found of some processes.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Why they cannot move, one sentence each.
    pub(crate) reasons: Vec<String>,
    /// Files and folders that have to be at the destination under the same name.
    pub(crate) files: BTreeSet<String>,
}

/// Looks at these processes. One that ends meanwhile has nothing.
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
        found.reasons.push(format!(
            "process {pid} is stopped; let it go on first (kill -CONT {pid}, or leave the debugger)"
        ));
    }
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // Closed meanwhile.
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

/// The range and the file of a line of `maps`, if it is of a file.
fn mapped(line: &str) -> Option<(&str, &str)> {
    let (range, _) = line.split_once(' ')?;
    let file = &line[line.find('/')?..];
    let inode = line.split_whitespace().nth(4)?;
    (inode != "0").then_some((range, file))
}

/// A file that is open or mapped.
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
    // These are made anew with the process: memory without a file, and rings for I/O.
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

/// Devices of which CRIU restores the descriptor: memory (`/dev/null` and others), terminals, and network interfaces.
fn device_reason(pid: u32, target: &str, kind: &Metadata) -> Option<String> {
    const MEMORY: u32 = 1;
    const TERMINALS: [u32; 2] = [4, 5];
    const PSEUDO_TERMINALS: std::ops::RangeInclusive<u32> = 136..=143;
    // With the library these are given back before the image is made, and it is said elsewhere where they are not.
    if target.starts_with(super::family::DEVICES) {
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

/// What a descriptor is beside its file.
fn of_descriptor(pid: u32, target: &str, about: &str, found: &mut Found) {
    // Rings for I/O, and others that only one kernel knows.
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
    /// A file or folder that is watched: it has to have a name, here and at the destination.
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
        match super::watched::name_of(pid, line, device) {
            Some(name) if Path::new(&name).exists() => {
                self.files.insert(name);
            }
            _ => self.reasons.push(format!(
                "process {pid} watches a file or folder that is not there any more (inotify, inode {inode}); have it watch no more"
            )),
        }
    }
}
