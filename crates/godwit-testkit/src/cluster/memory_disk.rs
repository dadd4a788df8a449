//! A file system on a disk in memory, in place of a second disk of the machine.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;

use rustix::fs::FallocateFlags;

use crate::process::run;

/// Bytes for the file system's own structures.
const OVERHEAD: u64 = 128 << 20;

/// An ext4 on a loop device over memory. All memory is allocated at once and kept. A hypervisor that lends memory only
/// on first touch stops a processor for milliseconds each time, and a guest whose disk moves into such memory would
/// wait.
///
/// The disk belongs to this process: the memory is free again as soon as the process ends, in whatever way.
#[derive(Debug)]
pub struct MemoryDisk {
    root: OwnedFd,
}

impl MemoryDisk {
    /// Creates a disk with room for this many bytes.
    pub fn new(room: u64) -> io::Result<Self> {
        let backing = tempfile::NamedTempFile::new_in("/dev/shm")?;
        let bytes = room + room / 32 + OVERHEAD;
        rustix::fs::fallocate(&backing, FallocateFlags::empty(), 0, bytes)
            .map_err(|error| io::Error::other(format!("{bytes} bytes of memory: {error}")))?;
        let attach = ["--find", "--show"];
        let device = run(Command::new("losetup").args(attach).arg(backing.path()))?.stdout;
        let device = String::from_utf8_lossy(&device);
        let device = device.trim();
        let mounted = mount(device);
        // From here on the device lives as long as the mount.
        let detached = run(Command::new("losetup").args(["--detach", device]));
        let root = mounted?;
        detached?;
        Ok(Self { root })
    }

    /// Returns a path to the root for this and other processes, valid while this process lives.
    pub fn path(&self) -> PathBuf {
        let (process, root) = (std::process::id(), self.root.as_raw_fd());
        PathBuf::from(format!("/proc/{process}/fd/{root}"))
    }
}

/// Creates a file system and mounts it detached: only holders of an open descriptor still have access.
fn mount(device: &str) -> io::Result<OwnedFd> {
    let features = "^has_journal";
    let extended = "nodiscard,lazy_itable_init=0";
    let format = ["-q", "-m", "0", "-O", features, "-E", extended];
    run(Command::new("mkfs.ext4").args(format).arg(device))?;
    let at = tempfile::tempdir()?;
    run(Command::new("mount").arg(device).arg(at.path()))?;
    let root = File::open(at.path());
    run(Command::new("umount").arg("--lazy").arg(at.path()))?;
    Ok(root?.into())
}
