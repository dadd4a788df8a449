//! Whether an image is as it was.

use std::path::Path;

use rustix::fs::{self, Stat};

use super::{Image, ImageKind};

/// What the file system says of a file that whoever writes to it changes: its inode, its size, and when its content
/// and its inode were last changed. Nobody can set the last of these back.
///
/// Of what is on a block device nothing tells whether it was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(pub [u64; 6]);

impl Fingerprint {
    /// That of the regular file at this path; nothing where there is none.
    pub fn of_file(path: &Path) -> Option<Self> {
        let stat = fs::stat(path).ok()?;
        let is_file = fs::FileType::from_raw_mode(stat.st_mode) == fs::FileType::RegularFile;
        is_file.then(|| Self::new(&stat))
    }

    /// What was changed at a time before 1970 looks like another time.
    #[allow(
        clippy::cast_sign_loss,
        reason = "only whether two are the same matters"
    )]
    fn new(stat: &Stat) -> Self {
        Self([
            stat.st_ino,
            stat.st_size as u64,
            stat.st_mtime as u64,
            stat.st_mtime_nsec,
            stat.st_ctime as u64,
            stat.st_ctime_nsec,
        ])
    }
}

impl Image {
    /// Changes whenever somebody writes to the image; nothing where that cannot be told.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        match self.kind {
            ImageKind::File => fs::fstat(&self.file)
                .ok()
                .map(|stat| Fingerprint::new(&stat)),
            ImageKind::BlockDevice => None,
        }
    }
}
