//! The disk to move: ext4 in the first half, fio's blocks in the second.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use godwit_testkit::NbdTarget;
use godwit_testkit::client::RawImage;
use godwit_testkit::fio::{FioLoad, Requests};
use godwit_testkit::image::{first_difference, write_random};
use godwit_testkit::nbd::NbdConnection;
use godwit_testkit::process::run;

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// Sizes of the random files in MiB: 400 MiB in all.
const FILES: [u64; 8] = [1, 3, 7, 20, 39, 60, 90, 180];

/// The original image and the content of the file system.
#[derive(Debug)]
pub(crate) struct GuestDisk {
    image: PathBuf,
    tree: PathBuf,
    dir: PathBuf,
}

impl GuestDisk {
    /// The part of the file system.
    pub(crate) const FILE_SYSTEM: Range<u64> = 0..GIB;
    /// The disk's size in bytes.
    pub(crate) const SIZE: u64 = 2 * GIB;

    /// Returns the load: 4 KiB random writes into the second half with this many bytes a second, each read back.
    pub(crate) fn load(rate: Option<u64>) -> FioLoad {
        FioLoad {
            requests: Requests::CheckedWrites,
            region: GIB..2 * GIB,
            rate,
            ..FioLoad::default()
        }
    }

    /// Creates the image: a tree of text and random files as ext4, and fio's region.
    pub(crate) fn make(dir: &Path) -> io::Result<Self> {
        let disk = Self {
            image: dir.join("guest.img"),
            tree: dir.join("tree"),
            dir: dir.into(),
        };
        disk.grow_tree()?;
        File::create(&disk.image)?.set_len(Self::SIZE)?;
        let mut mke2fs = tool("mke2fs");
        mke2fs
            .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-d"])
            .arg(&disk.tree);
        run(mke2fs
            .arg(&disk.image)
            .arg((Self::FILE_SYSTEM.end / 4096).to_string()))?;
        Self::load(None).prepare(&disk.image)?;
        Ok(disk)
    }

    pub(crate) fn image(&self) -> &Path {
        &self.image
    }

    /// Compares the file system's half of a served disk with the original; returns a description of the first
    /// difference.
    pub(crate) fn compare_file_system(&self, target: &NbdTarget) -> io::Result<Option<String>> {
        let mut original = RawImage::open(&self.image)?;
        let mut served = NbdConnection::connect(target)?;
        let difference = first_difference(&mut original, &mut served, Self::FILE_SYSTEM)?;
        Ok(difference.map(|at| format!("the file system differs at byte {at}")))
    }

    /// Checks an exported image with e2fsck and compares every file; returns the problems.
    pub(crate) fn check_export(&self, exported: &Path) -> io::Result<Vec<String>> {
        let mut problems = Vec::new();
        if let Err(error) = run(tool("e2fsck").arg("-fn").arg(exported)) {
            problems.push(error.to_string());
        }
        let out = self.dir.join("files");
        fs::create_dir_all(&out)?;
        let dump = format!("rdump /data {}", out.display());
        run(tool("debugfs").args(["-R", &dump]).arg(exported))?;
        let mut compare = Command::new("diff");
        compare
            .arg("-r")
            .arg(self.tree.join("data"))
            .arg(out.join("data"));
        if let Err(error) = run(&mut compare) {
            problems.push(format!("files differ: {error}"));
        }
        Ok(problems)
    }

    fn grow_tree(&self) -> io::Result<()> {
        let data = self.tree.join("data");
        for folder in 0..20 {
            let folder = data.join(format!("folder-{folder}"));
            fs::create_dir_all(&folder)?;
            for file in 0..20 {
                let text = format!("{} line {file}\n", folder.display()).repeat(50 + file * 20);
                fs::write(folder.join(format!("text-{file}")), text)?;
            }
        }
        for (index, mib) in FILES.iter().enumerate() {
            write_random(
                &data.join(format!("random-{index}")),
                mib * MIB,
                index as u64,
            )?;
        }
        Ok(())
    }
}

/// Returns a file system tool, which may be in a directory outside of the PATH.
fn tool(name: &str) -> Command {
    let found = ["/usr/sbin", "/sbin"]
        .iter()
        .map(|dir| Path::new(dir).join(name));
    Command::new(
        found
            .into_iter()
            .find(|path| path.exists())
            .unwrap_or_else(|| name.into()),
    )
}
