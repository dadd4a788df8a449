//! The missing parts of a disk, in a file: the disk was moved before all of it had arrived, and a part is still at the
//! node that gave the disk away.
//!
//! ```text
//! 0      magic, capacity, migration, boot, checksum of these
//! 4096   heat of each chunk of 64 KiB, a byte each
//! then   a bit for each missing block of 4 KiB, as far as durable
//! then   the same bits as known in this boot of the host
//! then   if the rest is in an image: a bit for each block at the node that gave the disk away
//! ```
//!
//! Each part begins at a multiple of 4 KiB; stretches of zeroes are holes of the file. The third part is made durable
//! with care: a block is missing there until its data is durable. The fourth part is only written, so it outlasts the
//! process and not the host. After a boot the third part takes its place. The last part never changes. Another magic
//! marks its presence.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::super::extents::hole_end;
use godwit_core::units::{Extent, MigrationId, Sectors};
use godwit_core::{HeatPiece, Missing, PIECE_HEATS, PIECE_WORDS, WordPiece};

const MAGIC: [u8; 8] = *b"GDWMISS1";
/// Magic of a file with blocks in two places. Builds that know of one place refuse it.
const MAGIC_OF_TWO: [u8; 8] = *b"GDWMISS2";
const PAGE: u64 = 4096;
/// Magic, capacity, migration, boot.
const FIELDS: usize = 8 + 8 + 16 + 16;
/// Sectors in a word of the bitmap.
const WORD_SECTORS: u64 = 64 * 8;
/// Bytes of a piece of a bitmap.
const PIECE_BYTES: usize = PIECE_WORDS * 8;
/// Most pieces in a single read or write.
const LONGEST_WRITE: usize = 256;

/// The identity of a boot of the host.
type Boot = [u8; 16];

/// The places of a file's parts.
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

    /// Returns the end of the last part.
    const fn end(self, of_two: bool) -> u64 {
        match of_two {
            true => self.at_source() + self.words as u64 * 8,
            false => self.at_source(),
        }
    }
}

/// Notes the parts that have arrived.
#[derive(Debug)]
pub struct MissingNotes {
    file: File,
    start: u64,
}

impl MissingNotes {
    /// Notes that the disk with this missing state no longer lacks the extent.
    ///
    /// # Errors
    /// The file cannot be written: the arrived data must not be relied on.
    pub(crate) fn note(&self, missing: &Missing, extent: Extent) -> io::Result<()> {
        let first = (extent.start().0 / WORD_SECTORS) as usize;
        let end = extent.end().0.div_ceil(WORD_SECTORS) as usize;
        let words = (first..end).map(|word| missing.word(word));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        self.file
            .write_all_at(&bytes, self.start + first as u64 * 8)
    }
}

fn to_bytes(words: &[u64; PIECE_WORDS]) -> [u8; PIECE_BYTES] {
    let mut bytes = [0; PIECE_BYTES];
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    bytes
}

/// Writes pieces of the part that begins at `start`.
fn write_pieces(file: &File, start: u64, pieces: &[WordPiece]) -> io::Result<()> {
    let consecutive = pieces.chunk_by(|(first, _), (second, _)| first + 1 == *second);
    for run in consecutive {
        let Some((first, _)) = run.first() else {
            continue;
        };
        let at = start + *first as u64 * PIECE_BYTES as u64;
        for (at, run) in (at..)
            .step_by(LONGEST_WRITE * PIECE_BYTES)
            .zip(run.chunks(LONGEST_WRITE))
        {
            let bytes: Vec<u8> = run.iter().flat_map(|(_, words)| to_bytes(words)).collect();
            file.write_all_at(&bytes, at)?;
        }
    }
    Ok(())
}

/// Reads the pieces of the part that begins at `start`, without all-zero ones. Holes of the file are not read.
fn read_pieces(file: &File, start: u64, words: usize) -> io::Result<Vec<WordPiece>> {
    let end = start + words as u64 * 8;
    let mut pieces = Vec::new();
    let mut data = vec![0; LONGEST_WRITE * PIECE_BYTES];
    let mut at = start;
    while at < end {
        at = hole_end(file.as_fd(), at, end) / PAGE * PAGE;
        let length = (end - at).min(data.len() as u64) as usize;
        let data = &mut data[..length];
        file.read_exact_at(data, at)?;
        let first = ((at - start) / PIECE_BYTES as u64) as usize;
        for (number, bytes) in (first..).zip(data.chunks(PIECE_BYTES)) {
            let mut words = [0; PIECE_WORDS];
            for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            if words != [0; PIECE_WORDS] {
                pieces.push((number, words));
            }
        }
        at += length as u64;
    }
    Ok(pieces)
}

/// Returns the pieces of `first` that differ from `second`. Both must be in order.
fn differing(first: &[WordPiece], second: &[WordPiece]) -> Vec<WordPiece> {
    let nothing = [0; PIECE_WORDS];
    let mut numbers: Vec<usize> = first
        .iter()
        .chain(second)
        .map(|(number, _)| *number)
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    let of = |pieces: &[WordPiece], number: usize| {
        let found = pieces.binary_search_by_key(&number, |(number, _)| *number);
        found.map_or(nothing, |at| pieces[at].1)
    };
    let mut differing = Vec::new();
    for number in numbers {
        let words = of(first, number);
        if words != of(second, number) {
            differing.push((number, words));
        }
    }
    differing
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

/// Returns the identity of this boot; all zeroes, which never counts as this boot, if the kernel tells none.
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

/// Stores durably the parts that a disk of this capacity will lack after its arrival by this migration, in place of the
/// file at the path. `at_source` has the parts at the migration's source, if the rest is in an image. Pieces not named
/// lack nothing, and take no space.
///
/// # Errors
/// The file cannot be written, or its folder cannot be made durable.
pub fn create(
    path: &Path,
    capacity: Sectors,
    migration: MigrationId,
    pieces: &[WordPiece],
    heat: &[HeatPiece],
    at_source: Option<&[WordPiece]>,
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
    let of_two = at_source.is_some();
    file.write_all(&header(capacity, migration, this_boot(), of_two))?;
    for (number, heat) in heat {
        file.write_all_at(heat, PAGE + (*number * PIECE_HEATS) as u64)?;
    }
    write_pieces(&file, layout.durable(), pieces)?;
    write_pieces(&file, layout.noted(), pieces)?;
    write_pieces(&file, layout.at_source(), at_source.unwrap_or_default())?;
    file.set_len(layout.end(of_two))?;
    file.sync_all()?;
    std::fs::rename(&fresh, path)?;
    if let Some(folder) = path.parent() {
        File::open(folder)?.sync_all()?;
    }
    let start = layout.noted();
    Ok(MissingNotes { file, start })
}

/// Stores durably the changed pieces of the missing state. A crash may leave some words unchanged.
///
/// # Errors
/// The file cannot be written.
pub fn store(path: &Path, capacity: Sectors, pieces: &[WordPiece]) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    write_pieces(&file, Layout::new(capacity).durable(), pieces)?;
    file.sync_data()
}

/// Loads the stored state of a disk of this capacity that arrived by this migration. Returns nothing if there is none,
/// or if the file belongs to another migration or disk.
///
/// # Errors
/// The file cannot be read, or is damaged.
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
    let now = this_boot();
    let same_boot = boot == now && now != Boot::default();
    let durable = read_pieces(&file, layout.durable(), layout.words)?;
    let noted = read_pieces(&file, layout.noted(), layout.words)?;
    let changed = differing(&durable, &noted);
    if !same_boot {
        write_pieces(&file, layout.noted(), &changed)?;
        file.sync_data()?;
        file.write_all_at(&header(capacity, migration, now, of_two), 0)?;
        file.sync_data()?;
    }
    let (pieces, unstored) = match same_boot {
        true => (noted, changed.iter().map(|(number, _)| *number).collect()),
        false => (durable, Vec::new()),
    };
    let heat = read_heat(&file, layout.heat)?;
    let damaged = || damaged("it is of another disk");
    let missing = Missing::from_pieces(capacity, pieces, heat).ok_or_else(damaged)?;
    let mut missing = missing.stored_but_for(unstored);
    if of_two {
        let at_source = read_pieces(&file, layout.at_source(), layout.words)?;
        missing = missing
            .in_two_places_by_pieces(at_source)
            .ok_or_else(damaged)?;
    }
    let start = layout.noted();
    Ok(Some((missing, MissingNotes { file, start })))
}

/// Reads the heat of chunks. Holes of the file are not read.
fn read_heat(file: &File, length: usize) -> io::Result<Vec<HeatPiece>> {
    let end = PAGE + length as u64;
    let mut pieces = Vec::new();
    let mut at = PAGE;
    while at < end {
        at = hole_end(file.as_fd(), at, end) / PIECE_HEATS as u64 * PIECE_HEATS as u64;
        let mut heat = [0; PIECE_HEATS];
        let length = (end - at).min(PIECE_HEATS as u64) as usize;
        file.read_exact_at(&mut heat[..length], at)?;
        if heat != [0; PIECE_HEATS] {
            pieces.push((((at - PAGE) / PIECE_HEATS as u64) as usize, heat));
        }
        at += PIECE_HEATS as u64;
    }
    Ok(pieces)
}

/// Removes the stored state.
///
/// # Errors
/// The file exists and cannot be removed.
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

    /// Slightly over 4 MiB.
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

    /// Stores words, with equal heat for all chunks.
    fn stored(path: &Path, words: &[u64], at_source: Option<&[u64]>) -> MissingNotes {
        let heat = vec![4; Missing::heat_length(CAPACITY)];
        let missing = Missing::from_parts(CAPACITY, words, &heat).expect("it fits");
        let pieces: Vec<_> = missing.pieces().collect();
        let heat = [(0, [4; PIECE_HEATS])];
        let at_source = at_source.and_then(|it| missing.in_two_places(it)?.pieces_at_source());
        create(
            path,
            CAPACITY,
            MIGRATION,
            &pieces,
            &heat,
            at_source.as_deref(),
        )
        .expect("it is created")
    }

    /// Returns the only piece of such a disk.
    fn all(words: &[u64]) -> WordPiece {
        let mut piece = [0; PIECE_WORDS];
        piece[..words.len()].copy_from_slice(words);
        (0, piece)
    }

    fn missing(words: &[u64]) -> Missing {
        let heat = vec![0; Missing::heat_length(CAPACITY)];
        Missing::from_parts(CAPACITY, words, &heat).expect("it fits")
    }

    fn created(folder: &tempfile::TempDir) -> (std::path::PathBuf, MissingNotes) {
        let path = folder.path().join("disk");
        let notes = stored(&path, &words(), None);
        (path, notes)
    }

    fn lacks(path: &Path) -> Vec<u64> {
        let (missing, _) = load(path, CAPACITY, MIGRATION)
            .expect("it is read")
            .expect("it is there");
        assert!(missing.heat().iter().all(|heat| *heat == 4));
        missing.words().collect()
    }

    /// Simulates a reboot of the host.
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
        notes.note(&missing(&now), extent(0, 64)).expect("noted");
        assert_eq!(lacks(&path), now);
        boot(&path);
        assert_eq!(lacks(&path), words());
        // From then on, arrivals are noted again.
        let (_, notes) = load(&path, CAPACITY, MIGRATION)
            .expect("read")
            .expect("there");
        notes.note(&missing(&now), extent(0, 64)).expect("noted");
        assert_eq!(lacks(&path), now);
    }

    #[test]
    fn what_is_durable_outlasts_the_host() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, _notes) = created(&folder);
        let mut now = words();
        now[0] = 0;
        store(&path, CAPACITY, &[all(&now)]).expect("stored");
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
        let mut at_source = vec![0; Missing::word_length(CAPACITY)];
        at_source[0] = 0xFF00;
        let notes = stored(&path, &words(), Some(&at_source));
        let mut now = words();
        now[0] &= !0xF00;
        notes.note(&missing(&now), extent(0, 128)).expect("noted");
        let left = |path: &Path| {
            assert!(lacks(path).len() == now.len());
            let (missing, _) = load(path, CAPACITY, MIGRATION)
                .expect("read")
                .expect("there");
            assert_eq!(missing.at_source().as_ref(), Some(&at_source));
            missing.bytes_at_source()
        };
        assert_eq!(left(&path), Some(Bytes(4 * 4096)));
        boot(&path);
        assert_eq!(left(&path), Some(Bytes(8 * 4096)));
        store(&path, CAPACITY, &[all(&now)]).expect("stored");
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
