//! The blocks of a disk written since its last migration, in a file: from the orderly end of a process to the start of
//! the next.
//!
//! ```text
//! 0   magic, capacity, migration, fingerprint of the image, checksum of all of the file but this
//! then   a bit for each written block of 4 KiB
//! ```
//!
//! A reader removes the file first, durably, so a process without an orderly end leaves none. The image's fingerprint
//! must be unchanged, so that no writer without knowledge of the file has written to the image.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::Path;

use godwit_core::Written;
use godwit_core::units::{MigrationId, Sectors};

use super::super::fingerprint::Fingerprint;
use super::sync_folder;

const MAGIC: [u8; 8] = *b"GDWWRTN1";
const CHECKSUM: usize = 8 + 8 + 16 + 48;
const WORDS: usize = CHECKSUM + 32;

fn encode(capacity: Sectors, fingerprint: Fingerprint, written: &Written) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(WORDS + Written::word_length(capacity) * 8);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&capacity.0.to_le_bytes());
    bytes.extend_from_slice(&written.since().0);
    for part in fingerprint.0 {
        bytes.extend_from_slice(&part.to_le_bytes());
    }
    bytes.extend_from_slice(&[0; 32]);
    for word in written.words() {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    let checksum = blake3::hash(&bytes);
    bytes[CHECKSUM..WORDS].copy_from_slice(checksum.as_bytes());
    bytes
}

fn decode(capacity: Sectors, fingerprint: Fingerprint, bytes: &[u8]) -> Option<Written> {
    let since = MigrationId(*bytes.get(16..)?.first_chunk()?);
    let (words, rest) = bytes.get(WORDS..)?.as_chunks();
    let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let written = Written::from_words(since, capacity, &words)?;
    // A file that differs from the stored form must not be relied on.
    let same = rest.is_empty() && encode(capacity, fingerprint, &written) == bytes;
    same.then_some(written)
}

/// Stores durably the written blocks of the image of a disk with this capacity and fingerprint. The image must be
/// durable itself.
///
/// # Errors
/// The file cannot be written, or its folder cannot be made durable.
pub(crate) fn store(
    path: &Path,
    capacity: Sectors,
    fingerprint: Fingerprint,
    written: &Written,
) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let fresh = path.with_file_name(format!(".{name}.new"));
    let mut file = File::create(&fresh)?;
    file.write_all(&encode(capacity, fingerprint, written))?;
    file.sync_all()?;
    std::fs::rename(&fresh, path)?;
    sync_folder(path)
}

/// Reads the stored blocks, and removes the file, durably. Returns nothing if there is no file, or if the image, of
/// this capacity and with this fingerprint, has changed.
///
/// # Errors
/// The file may exist and cannot be read or removed.
pub fn take(
    path: &Path,
    capacity: Sectors,
    fingerprint: Option<Fingerprint>,
) -> io::Result<Option<Written>> {
    let mut file = match OpenOptions::new().read(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let most = WORDS + Written::word_length(capacity) * 8;
    let mut bytes = Vec::new();
    Read::by_ref(&mut file)
        .take(most as u64 + 1)
        .read_to_end(&mut bytes)?;
    std::fs::remove_file(path)?;
    sync_folder(path)?;
    Ok(fingerprint.and_then(|fingerprint| decode(capacity, fingerprint, &bytes)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use godwit_core::units::Bytes;

    use super::*;

    /// Slightly over 1 MiB.
    const CAPACITY: Sectors = Sectors(2051);
    const SINCE: MigrationId = MigrationId([3; 16]);

    struct Stored {
        _folder: tempfile::TempDir,
        path: std::path::PathBuf,
        image: std::path::PathBuf,
    }

    impl Stored {
        fn new() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let image = folder.path().join("image");
            std::fs::write(&image, vec![0; 4096]).expect("an image");
            let path = folder.path().join("written");
            let stored = Self {
                _folder: folder,
                path,
                image,
            };
            store(&stored.path, CAPACITY, stored.fingerprint(), &written()).expect("stored");
            stored
        }

        fn fingerprint(&self) -> Fingerprint {
            Fingerprint::of_file(&self.image).expect("a file")
        }

        fn take(&self) -> Option<Written> {
            take(&self.path, CAPACITY, Some(self.fingerprint())).expect("it can be read")
        }
    }

    fn written() -> Written {
        let mut words = vec![0; Written::word_length(CAPACITY)];
        words[1] = 0b101;
        Written::from_words(SINCE, CAPACITY, &words).expect("it fits")
    }

    #[test]
    fn what_was_stored_is_found_once() {
        let stored = Stored::new();
        let found = stored.take().expect("it is there");
        assert_eq!(found.since(), SINCE);
        assert!(found.words().eq(written().words()));
        assert_eq!(found.bytes(), Bytes(8192));
        assert!(stored.take().is_none(), "a later process finds nothing");
    }

    #[test]
    fn whoever_writes_to_the_image_makes_it_worthless() {
        let stored = Stored::new();
        let image = OpenOptions::new()
            .write(true)
            .open(&stored.image)
            .expect("the image");
        image.write_all_at(&[1], 17).expect("written");
        assert!(stored.take().is_none());
        assert!(!stored.path.exists());
        let stored = Stored::new();
        assert!(
            take(&stored.path, CAPACITY, None)
                .expect("it can be read")
                .is_none(),
            "an image of which that cannot be told"
        );
    }

    #[test]
    fn a_damaged_file_or_one_of_another_disk_is_nothing() {
        for at in [0, 9, 20, 40, 90, WORDS as u64 + 8] {
            let stored = Stored::new();
            let file = OpenOptions::new()
                .write(true)
                .open(&stored.path)
                .expect("the file");
            file.write_all_at(&[0xA5], at).expect("written");
            assert!(stored.take().is_none(), "byte {at}");
        }
        for length in [0, 16, WORDS as u64 - 1, WORDS as u64 + 9] {
            let stored = Stored::new();
            let file = OpenOptions::new()
                .write(true)
                .open(&stored.path)
                .expect("the file");
            file.set_len(length).expect("cut");
            assert!(stored.take().is_none(), "{length} bytes");
        }
        let stored = Stored::new();
        let other = take(&stored.path, Sectors(2048), Some(stored.fingerprint()));
        assert!(other.expect("it can be read").is_none());
    }
}
