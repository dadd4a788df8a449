//! The activity log of a disk that is followed, in a file of 4 KiB.
//!
//! ```text
//! 0   magic, capacity, migration, number of areas, areas, checksum of these
//! ```
//!
//! An update overwrites the log, and is durable at once. A damaged file is no log: neither an update that a power loss has
//! cut short nor an older state may pass for the last one.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use godwit_core::units::{MigrationId, Sectors};
use godwit_core::{AREA_SECTORS, ActiveAreas, MAX_AREAS};

use super::sync_folder;

const MAGIC: [u8; 8] = *b"GDWACTV1";
const LENGTH: usize = 4096;
const AREAS: usize = 8 + 8 + 16 + 4;
const CHECKSUM: usize = AREAS + 4 * MAX_AREAS;
const _: () = assert!(CHECKSUM + 32 <= LENGTH, "the longest log fits");

fn encode(capacity: Sectors, log: &ActiveAreas) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LENGTH);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&capacity.0.to_le_bytes());
    bytes.extend_from_slice(&log.of.0);
    bytes.extend_from_slice(&(log.areas.len() as u32).to_le_bytes());
    for area in &log.areas {
        bytes.extend_from_slice(&area.to_le_bytes());
    }
    bytes.resize(CHECKSUM, 0);
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(checksum.as_bytes());
    bytes.resize(LENGTH, 0);
    bytes
}

fn decode(capacity: Sectors, bytes: &[u8]) -> Option<ActiveAreas> {
    let of = MigrationId(*bytes.get(16..)?.first_chunk()?);
    let count = u32::from_le_bytes(*bytes.get(32..)?.first_chunk()?) as usize;
    let (areas, _) = bytes.get(AREAS..CHECKSUM)?.as_chunks();
    let areas = areas.get(..count)?.iter();
    let areas = areas.map(|area| u32::from_le_bytes(*area)).collect();
    let log = ActiveAreas { of, areas };
    let on_disk = |area: &u32| u64::from(*area) * u64::from(AREA_SECTORS) < capacity.0;
    // A file that differs from the stored form must not be relied on.
    let same = log.areas.iter().all(on_disk) && encode(capacity, &log) == bytes;
    same.then_some(log)
}

/// Stores durably the log of a disk of this capacity.
///
/// # Errors
/// The file cannot be written. The log before may still be there.
pub fn store(path: &Path, capacity: Sectors, log: &ActiveAreas) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    let is_new = file.metadata()?.len() == 0;
    file.write_all_at(&encode(capacity, log), 0)?;
    file.sync_data()?;
    match is_new {
        true => sync_folder(path),
        false => Ok(()),
    }
}

/// Returns the stored log of a disk of this capacity, if any.
///
/// # Errors
/// The file may exist and cannot be read.
pub fn load(path: &Path, capacity: Sectors) -> io::Result<Option<ActiveAreas>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    file.take(LENGTH as u64 + 1).read_to_end(&mut bytes)?;
    Ok(decode(capacity, &bytes))
}

/// Removes the log durably, if there is one.
///
/// # Errors
/// The log may still be there.
pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.and_then(|()| sync_folder(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 16 areas, the last of which the end cuts short.
    const CAPACITY: Sectors = Sectors(16 * AREA_SECTORS as u64 - 8);

    fn log(areas: &[u32]) -> ActiveAreas {
        ActiveAreas {
            of: MigrationId([3; 16]),
            areas: areas.to_vec(),
        }
    }

    struct Stored {
        _folder: tempfile::TempDir,
        path: std::path::PathBuf,
    }

    impl Stored {
        fn new(logs: &[&[u32]]) -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("log");
            for areas in logs {
                store(&path, CAPACITY, &log(areas)).expect("stored");
            }
            Self {
                _folder: folder,
                path,
            }
        }

        fn load(&self) -> Option<ActiveAreas> {
            load(&self.path, CAPACITY).expect("it can be read")
        }

        fn damage(&self, at: u64) {
            let file = OpenOptions::new().write(true).open(&self.path);
            let file = file.expect("the file");
            file.write_all_at(&[0xA5], at).expect("written");
        }
    }

    #[test]
    fn the_last_stored_log_is_found_until_it_is_removed() {
        let stored = Stored::new(&[]);
        assert_eq!(stored.load(), None);
        for areas in [&[][..], &[1], &[1, 15], &[7]] {
            store(&stored.path, CAPACITY, &log(areas)).expect("stored");
            assert_eq!(stored.load(), Some(log(areas)));
        }
        remove(&stored.path).expect("removed");
        assert_eq!(stored.load(), None);
        remove(&stored.path).expect("there is nothing to remove");
    }

    #[test]
    fn the_longest_log_fits() {
        let capacity = Sectors(u64::from(u32::MAX) * u64::from(AREA_SECTORS));
        let longest = log(&vec![u32::MAX - 1; MAX_AREAS]);
        let stored = Stored::new(&[]);
        store(&stored.path, capacity, &longest).expect("stored");
        let found = load(&stored.path, capacity).expect("it can be read");
        assert_eq!(found, Some(longest));
    }

    #[test]
    fn a_damaged_log_or_one_of_another_disk_is_none() {
        for at in [0, 8, 16, 32, 36, 40, 44, CHECKSUM as u64] {
            let stored = Stored::new(&[&[1], &[1, 2]]);
            stored.damage(at);
            assert_eq!(stored.load(), None, "byte {at}");
            store(&stored.path, CAPACITY, &log(&[4])).expect("stored");
            assert_eq!(stored.load(), Some(log(&[4])), "byte {at}");
        }
        for length in [0, 7, 40, LENGTH as u64 - 1, LENGTH as u64 + 1] {
            let stored = Stored::new(&[&[1]]);
            let file = OpenOptions::new().write(true).open(&stored.path);
            file.and_then(|it| it.set_len(length)).expect("cut");
            assert_eq!(stored.load(), None, "{length} bytes");
        }
        let stored = Stored::new(&[&[1]]);
        let other = load(&stored.path, Sectors(8)).expect("it can be read");
        assert_eq!(other, None);
        let behind = Stored::new(&[&[16]]);
        assert_eq!(behind.load(), None, "an area behind the end");
    }
}
