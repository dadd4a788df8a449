//! What a disk lacks, in a file: it was moved before all of it had arrived, and a part is still at the node that
//! gave it away.
//!
//! ```text
//! 0      magic, capacity, migration, boot, checksum of these
//! 4096   how hot each chunk of 64 KiB is, a byte each
//! then   a bit for each block of 4 KiB that is missing, as far as that is durable
//! then   the same as this boot of the host knows it
//! then   where the rest is in an image: a bit for each block that was at the node that gave the disk away
//! ```
//!
//! Each part begins at a multiple of 4 KiB. The third is made durable with care: a block is missing there until its
//! data is durable. The fourth is only written, so it outlasts the process and not the host. After a boot the third
//! takes its place. The last is never changed. Another magic says that it is there.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use godwit_core::Missing;
use godwit_core::units::{Extent, MigrationId, Sectors};

const MAGIC: [u8; 8] = *b"GDWMISS1";
/// The same with what is in two places. Builds that know of one place refuse it.
const MAGIC_OF_TWO: [u8; 8] = *b"GDWMISS2";
const PAGE: u64 = 4096;
/// Magic, capacity, migration, boot.
const FIELDS: usize = 8 + 8 + 16 + 16;
/// Sectors that a word of the bitmap stands for.
const WORD_SECTORS: u64 = 64 * 8;

/// Names a boot of the host.
type Boot = [u8; 16];

/// Where the parts of a file begin.
#[derive(Clone, Copy, Debug)]
struct Layout {
    words: usize,
    heat: usize,
}

impl Layout {
    const fn new(capacity: Sectors) -> Self {
        Self {
            words: Missing::word_length(capacity),
            heat: Missing::heat_length(capacity),
        }
    }

    const fn durable(self) -> u64 {
        PAGE + (self.heat as u64).next_multiple_of(PAGE)
    }

    const fn noted(self) -> u64 {
        self.durable() + (self.words as u64 * 8).next_multiple_of(PAGE)
    }

    const fn at_source(self) -> u64 {
        self.noted() + (self.words as u64 * 8).next_multiple_of(PAGE)
    }
}

/// Notes what has come.
#[derive(Debug)]
pub struct MissingNotes {
    file: File,
    start: u64,
}

impl MissingNotes {
    /// Notes that the disk, which lacks what these words say, lacks the extent no longer.
    ///
    /// # Errors
    /// The file cannot be written: what has come must not be relied on.
    pub(crate) fn note(&self, words: &[u64], extent: Extent) -> io::Result<()> {
        let first = (extent.start().0 / WORD_SECTORS) as usize;
        let end = (extent.end().0.div_ceil(WORD_SECTORS) as usize).min(words.len());
        let bytes = to_bytes(words.get(first..end).unwrap_or_default());
        self.file
            .write_all_at(&bytes, self.start + first as u64 * 8)
    }
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn from_bytes(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks();
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn header(capacity: Sectors, migration: MigrationId, boot: Boot, of_two: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FIELDS + 32);
    bytes.extend_from_slice(if of_two { &MAGIC_OF_TWO } else { &MAGIC });
    bytes.extend_from_slice(&capacity.0.to_le_bytes());
    bytes.extend_from_slice(&migration.0);
    bytes.extend_from_slice(&boot);
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(checksum.as_bytes());
    bytes
}

/// The name of this boot; all zeroes, which is never taken for this one, where the kernel tells none.
fn this_boot() -> Boot {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: Vec<u8> = text
        .chars()
        .filter_map(|digit| digit.to_digit(16))
        .map(|digit| digit as u8)
        .collect();
    let mut boot = Boot::default();
    let (pairs, _) = digits.as_chunks();
    for (byte, [high, low]) in boot.iter_mut().zip(pairs) {
        *byte = high << 4 | low;
    }
    boot
}

/// Makes durable what a disk of this capacity will lack when it has come by this migration, in place of what is at
/// the path; and what of that is at the migration's source, if the rest is in an image.
///
/// # Errors
/// The file cannot be written, or its folder not be made durable.
pub fn create(
    path: &Path,
    capacity: Sectors,
    migration: MigrationId,
    words: &[u64],
    heat: &[u8],
    at_source: Option<&[u64]>,
) -> io::Result<MissingNotes> {
    let layout = Layout::new(capacity);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let fresh = path.with_file_name(format!(".{name}.new"));
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&fresh)?;
    let bytes = to_bytes(words);
    let of_two = at_source.is_some();
    file.write_all(&header(capacity, migration, this_boot(), of_two))?;
    file.write_all_at(heat, PAGE)?;
    file.write_all_at(&bytes, layout.durable())?;
    file.write_all_at(&bytes, layout.noted())?;
    if let Some(at_source) = at_source {
        file.write_all_at(&to_bytes(at_source), layout.at_source())?;
    }
    file.sync_all()?;
    std::fs::rename(&fresh, path)?;
    if let Some(folder) = path.parent() {
        File::open(folder)?.sync_all()?;
    }
    let start = layout.noted();
    Ok(MissingNotes { file, start })
}

/// Makes durable what the disk lacks now. A crash leaves some words as they were.
///
/// # Errors
/// The file cannot be written.
pub fn store(path: &Path, capacity: Sectors, words: &[u64]) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let start = Layout::new(capacity).durable();
    let new = to_bytes(words);
    let mut old = vec![0; new.len()];
    file.read_exact_at(&mut old, start)?;
    let pages = new.chunks(PAGE as usize).zip(old.chunks(PAGE as usize));
    for (at, (new, old)) in (start..).step_by(PAGE as usize).zip(pages) {
        if new != old {
            file.write_all_at(new, at)?;
        }
    }
    file.sync_data()
}

/// What is stored of a disk of this capacity that came by this migration; nothing when there is nothing, or what
/// there is belongs to another.
///
/// # Errors
/// The file cannot be read, or is not one of these.
pub fn load(
    path: &Path,
    capacity: Sectors,
    migration: MigrationId,
) -> io::Result<Option<(Missing, MissingNotes)>> {
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut bytes = [0; FIELDS + 32];
    file.read_exact_at(&mut bytes, 0)?;
    let boot: Boot = *bytes[FIELDS - 16..].first_chunk().unwrap_or(&[0; 16]);
    let of_two = bytes[..8] == MAGIC_OF_TWO;
    if bytes[..8] != MAGIC && !of_two
        || bytes[FIELDS..] != *blake3::hash(&bytes[..FIELDS]).as_bytes()
    {
        return Err(damaged("its header is damaged"));
    }
    if bytes[..] != header(capacity, migration, boot, of_two) {
        return Ok(None);
    }
    let layout = Layout::new(capacity);
    let mut heat = vec![0; layout.heat];
    file.read_exact_at(&mut heat, PAGE)?;
    let now = this_boot();
    let same_boot = boot == now && now != Boot::default();
    let from = if same_boot {
        layout.noted()
    } else {
        layout.durable()
    };
    let mut bits = vec![0; layout.words * 8];
    file.read_exact_at(&mut bits, from)?;
    if !same_boot {
        file.write_all_at(&bits, layout.noted())?;
        file.sync_data()?;
        file.write_all_at(&header(capacity, migration, now, of_two), 0)?;
        file.sync_data()?;
    }
    let mut missing = Missing::from_parts(capacity, &from_bytes(&bits), &heat)
        .ok_or_else(|| damaged("it is of another disk"))?;
    if of_two {
        file.read_exact_at(&mut bits, layout.at_source())?;
        missing = missing
            .in_two_places(&from_bytes(&bits))
            .ok_or_else(|| damaged("it is of another disk"))?;
    }
    let start = layout.noted();
    Ok(Some((missing, MissingNotes { file, start })))
}

/// Removes what is stored.
///
/// # Errors
/// There is something, and it cannot be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use godwit_core::units::{Bytes, Lba};

    use super::*;

    /// 4 MiB and a bit.
    const CAPACITY: Sectors = Sectors(8197);
    const MIGRATION: MigrationId = MigrationId([3; 16]);

    fn extent(start: u64, sectors: u32) -> Extent {
        Extent::new(Lba(start), sectors).expect("an extent")
    }

    fn words() -> Vec<u64> {
        let mut words = vec![0; Missing::word_length(CAPACITY)];
        words[0] = u64::MAX;
        words[5] = 1 << 63;
        words
    }

    fn created(folder: &tempfile::TempDir) -> (std::path::PathBuf, MissingNotes) {
        let path = folder.path().join("disk");
        let heat = vec![4; Missing::heat_length(CAPACITY)];
        let notes =
            create(&path, CAPACITY, MIGRATION, &words(), &heat, None).expect("it is created");
        (path, notes)
    }

    fn lacks(path: &Path) -> Vec<u64> {
        let (missing, _) = load(path, CAPACITY, MIGRATION)
            .expect("it is read")
            .expect("it is there");
        assert!(missing.heat().iter().all(|heat| *heat == 4));
        missing.words().to_vec()
    }

    /// As if the host had been started anew.
    fn boot(path: &Path) {
        let file = (OpenOptions::new().read(true).write(true))
            .open(path)
            .expect("the file");
        let mut magic = [0; 8];
        file.read_exact_at(&mut magic, 0).expect("it has one");
        let bytes = header(CAPACITY, MIGRATION, [9; 16], magic == MAGIC_OF_TWO);
        file.write_all_at(&bytes, 0).expect("written");
    }

    #[test]
    fn what_came_is_noted_for_the_next_process_and_forgotten_with_the_host() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, notes) = created(&folder);
        assert_eq!(lacks(&path), words());
        let mut now = words();
        now[0] &= !0xFF;
        notes.note(&now, extent(0, 64)).expect("noted");
        assert_eq!(lacks(&path), now);
        boot(&path);
        assert_eq!(lacks(&path), words());
        // From then on it is noted again.
        let (_, notes) = load(&path, CAPACITY, MIGRATION)
            .expect("read")
            .expect("there");
        notes.note(&now, extent(0, 64)).expect("noted");
        assert_eq!(lacks(&path), now);
    }

    #[test]
    fn what_is_durable_outlasts_the_host() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, _notes) = created(&folder);
        let mut now = words();
        now[0] = 0;
        store(&path, CAPACITY, &now).expect("stored");
        boot(&path);
        assert_eq!(lacks(&path), now);
        let (missing, _) = load(&path, CAPACITY, MIGRATION)
            .expect("read")
            .expect("there");
        assert_eq!(missing.bytes(), Bytes(4096));
    }

    #[test]
    fn what_is_in_two_places_stays_there_whatever_comes() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk");
        let heat = vec![4; Missing::heat_length(CAPACITY)];
        let mut at_source = vec![0; Missing::word_length(CAPACITY)];
        at_source[0] = 0xFF00;
        let notes = create(
            &path,
            CAPACITY,
            MIGRATION,
            &words(),
            &heat,
            Some(&at_source),
        )
        .expect("it is created");
        let mut now = words();
        now[0] &= !0xF00;
        notes.note(&now, extent(0, 128)).expect("noted");
        let left = |path: &Path| {
            assert!(lacks(path).len() == now.len());
            let (missing, _) = load(path, CAPACITY, MIGRATION)
                .expect("read")
                .expect("there");
            assert_eq!(missing.at_source(), Some(&at_source[..]));
            missing.bytes_at_source()
        };
        assert_eq!(left(&path), Some(Bytes(4 * 4096)));
        boot(&path);
        assert_eq!(left(&path), Some(Bytes(8 * 4096)));
        store(&path, CAPACITY, &now).expect("stored");
        boot(&path);
        assert_eq!(left(&path), Some(Bytes(4 * 4096)));
    }

    #[test]
    fn what_is_of_another_migration_or_disk_is_nothing_and_what_is_damaged_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, _notes) = created(&folder);
        let other = load(&path, CAPACITY, MigrationId([4; 16])).expect("read");
        assert!(other.is_none());
        assert!(
            load(&path, Sectors(8192), MIGRATION)
                .expect("read")
                .is_none()
        );
        let file = OpenOptions::new()
            .write(true)
            .open(&path)
            .expect("the file");
        file.write_all_at(&[1], 20).expect("written");
        assert!(load(&path, CAPACITY, MIGRATION).is_err());
        remove(&path).expect("removed");
        remove(&path).expect("it is gone");
        assert!(load(&path, CAPACITY, MIGRATION).expect("read").is_none());
    }
}
