//! A check for changes of an image.

use std::path::Path;

use rustix::fs::{self, Stat};

use super::{Image, ImageKind};

/// The metadata of a file that changes with each write: inode, size, and the times of the last change of contents and
/// inode. The last of these cannot be set back.
///
/// A block device has no such metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(pub [u64; 6]);

impl Fingerprint {
    /// Returns the fingerprint of the regular file at this path; nothing if there is none.
    pub fn of_file(path: &Path) -> Option<Self> {
        let stat = fs::stat(path).ok()?;
        let is_file = fs::FileType::from_raw_mode(stat.st_mode) == fs::FileType::RegularFile;
        is_file.then(|| Self::new(&stat))
    }

    /// A time before 1970 maps to another time.
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
    /// Returns a value that changes whenever the image is written; nothing if the kind of image has none.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        match self.kind {
            ImageKind::File => fs::fstat(&self.file)
                .ok()
                .map(|stat| Fingerprint::new(&stat)),
            ImageKind::BlockDevice => None,
        }
    }
}
