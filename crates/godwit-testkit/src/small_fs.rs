//! A file system with little room.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;

use crate::process::run;

/// A file system in memory with a limited size. The file system vanishes with this process, however the process ends.
#[derive(Debug)]
pub struct SmallFileSystem {
    root: OwnedFd,
}

impl SmallFileSystem {
    /// Creates a file system with room for this many bytes.
    pub fn new(bytes: u64) -> io::Result<Self> {
        let at = tempfile::tempdir()?;
        let size = format!("size={bytes}");
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "small"])
            .arg(at.path()))?;
        let root = File::open(at.path());
        run(Command::new("umount").arg("--lazy").arg(at.path()))?;
        Ok(Self { root: root?.into() })
    }

    /// Returns a path to the root for this and other processes, valid while this process lives.
    pub fn path(&self) -> PathBuf {
        let (process, root) = (std::process::id(), self.root.as_raw_fd());
        PathBuf::from(format!("/proc/{process}/fd/{root}"))
    }

    /// Takes all remaining room, until the returned file is removed.
    pub fn fill(&self) -> io::Result<PathBuf> {
        let path = self.path().join("filler");
        let mut filler = File::create(&path)?;
        let piece = vec![1; 1 << 16];
        loop {
            match io::Write::write(&mut filler, &piece) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => return Ok(path),
                Err(error) => return Err(error),
            }
        }
    }
}
