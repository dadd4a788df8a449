//! The table at the start of a pool's device: a head, then records.
//!
//! The head is the first page. Its content never changes once the device is a pool, and has a checksum. Each record is
//! a segment's header with its stage and place.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::record::{RECORD_WORDS, Record};
use super::space::Extent;
use crate::dax::Geometry;
use crate::pool::PAGE_BYTES;
use crate::pool::page::{LOST, Page, Words};

/// First word of each table.
const MAGIC: u64 = u64::from_le_bytes(*b"GODWITMP");
/// Version of the layout.
const VERSION: u64 = 1;
/// Bytes of the table.
pub(super) const TABLE_BYTES: u64 = 1 << 20;
/// Words of the first page.
const HEAD_WORDS: usize = PAGE_BYTES as usize / 8;
/// Most segments of a device.
pub(super) const RECORDS: usize = (TABLE_BYTES as usize / 8 - HEAD_WORDS) / RECORD_WORDS;

/// Positions of the words in the first page.
const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 1;
const AT_ID: usize = 2;
const AT_BYTES: usize = 4;
const AT_ALIGN: usize = 5;
const AT_RECORDS: usize = 6;
const AT_FIRST: usize = 7;
const AT_CHECK: usize = 8;

/// The head of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// Random identity of the pool.
    pub(super) id: u128,
    /// Bytes of the device.
    pub(super) bytes: u64,
    /// Alignment of segments in bytes.
    pub(super) align: u64,
}

/// The reason why a device has no usable table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoTable {
    /// The device begins with zeroes.
    Empty,
    /// The device begins with other data.
    Foreign,
    /// The table is invalid here.
    Wrong(String),
}

impl Head {
    /// Returns the head of a new pool; `None` if the device has no room for a segment.
    pub(super) fn new(geometry: Geometry, id: u128) -> Option<Self> {
        let head = Self {
            id,
            bytes: geometry.bytes - geometry.bytes % geometry.align,
            align: geometry.align,
        };
        (head.space().bytes > 0).then_some(head)
    }

    /// Returns the part of the device for segments.
    pub(super) const fn space(&self) -> Extent {
        let offset = TABLE_BYTES.next_multiple_of(self.align);
        Extent {
            offset,
            bytes: self.bytes.saturating_sub(offset),
        }
    }

    fn words(&self) -> [u64; 8] {
        let mut words = [0; 8];
        words[AT_MAGIC] = MAGIC;
        words[AT_VERSION] = VERSION;
        words[AT_ID] = self.id as u64;
        words[AT_ID + 1] = (self.id >> 64) as u64;
        words[AT_BYTES] = self.bytes;
        words[AT_ALIGN] = self.align;
        words[AT_RECORDS] = RECORDS as u64;
        words[AT_FIRST] = self.space().offset;
        words
    }

    /// Decodes the words of a first page for a device of this geometry.
    fn of(words: [u64; 8], check: u64, geometry: Geometry) -> Result<Self, NoTable> {
        let wrong = |why: String| Err(NoTable::Wrong(why));
        match words[AT_MAGIC] {
            MAGIC => {}
            0 => return Err(NoTable::Empty),
            _ => return Err(NoTable::Foreign),
        }
        if words[AT_VERSION] != VERSION {
            return wrong(String::from("another version of Godwit wrote it"));
        }
        if checked(&words) != check {
            return wrong(String::from("its check does not fit"));
        }
        let head = Self {
            id: u128::from(words[AT_ID + 1]) << 64 | u128::from(words[AT_ID]),
            bytes: words[AT_BYTES],
            align: words[AT_ALIGN],
        };
        if !head.align.is_power_of_two()
            || head.align < PAGE_BYTES
            || head.align > 1 << 40
            || !head.bytes.is_multiple_of(head.align)
            || head.space().bytes == 0
            || words != head.words()
        {
            return wrong(String::from("its sizes make no sense"));
        }
        if head.bytes > geometry.bytes {
            return wrong(format!(
                "it was made for {} bytes, and {} are there",
                head.bytes, geometry.bytes
            ));
        }
        if head.align < geometry.align {
            return wrong(format!(
                "its segments lie at multiples of {} bytes, and the device is mapped in multiples of {}",
                head.align, geometry.align
            ));
        }
        Ok(head)
    }
}

/// Returns a checksum of the words.
pub(super) fn checked(words: &[u64]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for word in words {
        hasher.update(&word.to_le_bytes());
    }
    let mut check = [0; 8];
    check.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    u64::from_le_bytes(check)
}

/// A device's mapped table.
#[derive(Clone, Debug)]
pub(super) struct Table(Arc<Page>);

impl Table {
    /// Maps the table.
    ///
    /// # Errors
    /// If the kernel refuses, or the device is shorter than a table.
    pub(super) fn map(file: &File, geometry: Geometry) -> io::Result<Self> {
        let bytes = TABLE_BYTES.next_multiple_of(geometry.align);
        if geometry.bytes < bytes {
            return Err(io::Error::other("it is shorter than a table"));
        }
        Page::map_part(file, 0, bytes).map(|page| Self(Arc::new(page)))
    }

    /// Returns true if pages of the table are lost, which makes its content invalid.
    pub(super) fn is_lost(&self) -> bool {
        self.0.is_lost()
    }

    fn head_words(&self) -> Words {
        Words::from(Arc::clone(&self.0), 0)
    }

    /// Reads the head.
    ///
    /// # Errors
    /// [`NoTable`].
    pub(super) fn head(&self, geometry: Geometry) -> Result<Head, NoTable> {
        let at = self.head_words();
        let read = |index: usize| at.at(index).load(Ordering::Acquire);
        let (words, check) = (std::array::from_fn(read), read(AT_CHECK));
        match at.are_lost() {
            true => Err(NoTable::Wrong(String::from(LOST))),
            false => Head::of(words, check, geometry),
        }
    }

    /// Returns true if the whole table is zeroes.
    pub(super) fn is_empty(&self) -> bool {
        let words = self.head_words();
        (0..TABLE_BYTES as usize / 8).all(|index| words.at(index).load(Ordering::Relaxed) == 0)
    }

    /// Writes an empty table. The device becomes a pool with the last write, and is none before.
    pub(super) fn write(&self, head: &Head) {
        let words = self.head_words();
        words.at(AT_MAGIC).store(0, Ordering::Release);
        words.persist(0..HEAD_WORDS);
        let all = TABLE_BYTES as usize / 8;
        for index in 1..all {
            words.at(index).store(0, Ordering::Relaxed);
        }
        let values = head.words();
        for (index, value) in values.iter().enumerate().skip(1) {
            words.at(index).store(*value, Ordering::Relaxed);
        }
        words
            .at(AT_CHECK)
            .store(checked(&values), Ordering::Relaxed);
        words.persist(0..all);
        words.at(AT_MAGIC).store(MAGIC, Ordering::Release);
        words.persist(0..HEAD_WORDS);
    }

    /// Returns a record.
    pub(super) fn record(&self, index: usize) -> Record {
        assert!(index < RECORDS, "inside the table");
        let first = HEAD_WORDS + index * RECORD_WORDS;
        Record::at(Words::from(Arc::clone(&self.0), first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GEOMETRY: Geometry = Geometry {
        bytes: 64 * MIB + 4096,
        align: 2 * MIB,
        is_device: false,
    };

    #[test]
    fn a_table_is_read_as_it_was_written_and_segments_come_behind_it() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(GEOMETRY.bytes).expect("grows");
        let table = Table::map(&file, GEOMETRY).expect("is mapped");
        assert!(table.is_empty());
        assert_eq!(table.head(GEOMETRY), Err(NoTable::Empty));
        let head = Head::new(GEOMETRY, 7 << 70 | 9).expect("has room");
        assert_eq!(
            (head.space().offset, head.space().end()),
            (2 * MIB, 64 * MIB)
        );
        table.write(&head);
        assert_eq!(table.head(GEOMETRY), Ok(head));
        let small = Geometry {
            bytes: 2 * MIB,
            ..GEOMETRY
        };
        assert_eq!(Head::new(small, 1), None);
        Table::map(
            &file,
            Geometry {
                bytes: MIB,
                ..GEOMETRY
            },
        )
        .expect_err("is too short");
    }

    #[test]
    fn hostile_tables_are_refused() {
        let head = Head::new(GEOMETRY, 5).expect("has room");
        let good = head.words();
        let read = |words: [u64; 8]| Head::of(words, checked(&words), GEOMETRY);
        assert_eq!(read(good), Ok(head));
        assert_eq!(
            Head::of(good, checked(&good) ^ 1, GEOMETRY),
            Err(NoTable::Wrong(String::from("its check does not fit")))
        );
        let changed = |at: usize, value: u64| {
            let mut words = good;
            words[at] = value;
            words
        };
        assert_eq!(read(changed(AT_MAGIC, 9)), Err(NoTable::Foreign));
        for (at, values) in [
            (AT_VERSION, &[0, 2, u64::MAX][..]),
            (AT_BYTES, &[0, 1, 2 * MIB, 66 * MIB, u64::MAX]),
            (AT_ALIGN, &[0, 1, 3 * MIB, 1 << 63, u64::MAX]),
            (AT_RECORDS, &[0, 1 << 40]),
            (AT_FIRST, &[0, 4096, u64::MAX]),
        ] {
            for value in values {
                let refused = read(changed(at, *value));
                assert!(
                    matches!(refused, Err(NoTable::Wrong(_))),
                    "{at} {value}: {refused:?}"
                );
            }
        }
        // A device with larger mapping units than the one of the table.
        let coarse = Geometry {
            align: 4 * MIB,
            ..GEOMETRY
        };
        let refused = Head::of(good, checked(&good), coarse);
        assert!(
            matches!(&refused, Err(NoTable::Wrong(why)) if why.contains("multiples of 4194304")),
            "{refused:?}"
        );
    }
}
