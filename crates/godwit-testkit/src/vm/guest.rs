//! The guest's kernel and first file system, and its disks.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::process::{run, target_dir};

/// What a machine boots.
#[derive(Clone, Debug)]
pub struct GuestImage {
    directory: PathBuf,
}

impl GuestImage {
    /// The guest of this checkout. Builds it when it was not built yet or is out of date, and
    /// installs the QEMU that runs it when that is missing; once per process.
    ///
    /// # Errors
    /// What the scripts say: without a network the packages of the first time cannot be fetched.
    pub fn build_or_cached() -> io::Result<Self> {
        static BUILT: OnceLock<Result<GuestImage, String>> = OnceLock::new();
        BUILT
            .get_or_init(|| build().map_err(|error| error.to_string()))
            .clone()
            .map_err(io::Error::other)
    }

    /// The kernel, for `-kernel`.
    pub fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinux")
    }

    /// The first file system, for `-initrd`.
    pub fn initramfs(&self) -> PathBuf {
        self.directory.join("initramfs")
    }
}

fn build() -> io::Result<GuestImage> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    run(&mut Command::new(root.join("scripts/install-qemu")))?;
    let mut script = Command::new(root.join("scripts/build-guest"));
    let output = run(script.env("CARGO_TARGET_DIR", target_dir()))?;
    let directory = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    Ok(GuestImage { directory })
}

/// Makes a raw image of `bytes` bytes with the file system that the guest expects on a disk.
///
/// # Errors
/// When the file exists, cannot be made, or mke2fs fails.
pub fn format_disk(path: &Path, bytes: u64) -> io::Result<()> {
    File::create_new(path)?.set_len(bytes)?;
    format_image(path)
}

/// Makes that file system on a raw image that exists. What the file system does not use of it keeps
/// its content.
///
/// # Errors
/// When mke2fs fails.
pub fn format_image(path: &Path) -> io::Result<()> {
    // Without lazy initialization, which the guest's kernel would go on with behind the load.
    let mut mke2fs = tool("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-E"]);
    run(mke2fs
        .arg("lazy_itable_init=0,lazy_journal_init=0,nodiscard")
        .arg(path))?;
    Ok(())
}

/// Checks the file system of a raw image whose machine does not run.
///
/// # Errors
/// Whatever e2fsck finds, in its words.
pub fn check_disk(path: &Path) -> io::Result<()> {
    run(tool("e2fsck").arg("-fn").arg(path)).map(drop)
}

/// A program of e2fsprogs, which is in no PATH of ordinary users.
fn tool(name: &str) -> Command {
    let path = Path::new("/usr/sbin").join(name);
    Command::new(if path.exists() {
        path.as_path()
    } else {
        Path::new(name)
    })
}
