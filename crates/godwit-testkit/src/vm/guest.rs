//! The guest's kernel, first file system and disks.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::process::{run, target_dir};

/// The boot files of a machine.
#[derive(Clone, Debug)]
pub struct GuestImage {
    directory: PathBuf,
}

type Built = OnceLock<Result<GuestImage, String>>;

impl GuestImage {
    /// Returns the verifying guest of this checkout. Builds a missing or outdated guest, and installs a missing QEMU,
    /// once per process.
    pub fn build_or_cached() -> io::Result<Self> {
        static BUILT: Built = Built::new();
        Self::of(&BUILT, "build-guest")
    }

    /// Does the same for the guest with services on the disk [`root`](Self::root).
    pub fn services() -> io::Result<Self> {
        static BUILT: Built = Built::new();
        Self::of(&BUILT, "build-services-guest")
    }

    fn of(built: &Built, script: &str) -> io::Result<Self> {
        let built = built.get_or_init(|| build(script).map_err(|error| error.to_string()));
        built.clone().map_err(io::Error::other)
    }

    pub fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinux")
    }

    /// Returns the first file system, for `-initrd`.
    pub fn initramfs(&self) -> PathBuf {
        self.directory.join("initramfs")
    }

    /// Returns the image of the first disk, for a guest with one.
    pub fn root(&self) -> PathBuf {
        self.directory.join("root.ext4")
    }
}

fn build(script: &str) -> io::Result<GuestImage> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    run(&mut Command::new(root.join("scripts/install-qemu")))?;
    let mut script = Command::new(root.join("scripts").join(script));
    let output = run(script.env("CARGO_TARGET_DIR", target_dir()))?;
    let directory = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    Ok(GuestImage { directory })
}

/// Creates a raw image of `bytes` bytes with the guest's file system.
pub fn format_disk(path: &Path, bytes: u64) -> io::Result<()> {
    File::create_new(path)?.set_len(bytes)?;
    format_image(path)
}

/// Creates this file system on an existing raw image. Blocks unused by the file system keep their content.
pub fn format_image(path: &Path) -> io::Result<()> {
    // Without lazy initialization, which the guest's kernel would continue during the load.
    let mut mke2fs = tool("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-E"]);
    run(mke2fs
        .arg("lazy_itable_init=0,lazy_journal_init=0,nodiscard")
        .arg(path))?;
    Ok(())
}

/// Checks the file system of a raw image whose machine does not run.
pub fn check_disk(path: &Path) -> io::Result<()> {
    run(tool("e2fsck").arg("-fn").arg(path)).map(drop)
}

/// Returns a program of e2fsprogs, which may be missing in the PATH of ordinary users.
fn tool(name: &str) -> Command {
    let path = Path::new("/usr/sbin").join(name);
    Command::new(if path.exists() {
        path.as_path()
    } else {
        Path::new(name)
    })
}
