//! The records of checkpoints on their connection, from the primary to the backup. A record is three numbers, and data.
//! The backup answers each whole checkpoint with its number. Records are applied in the order in which they were sent:
//! a difference is to the page that the records before it have made.

mod copies;
mod difference;
mod sent;

use std::io;

use godwit_memory::dirty::pages::{PAGE_BYTES, PageRun};
use godwit_protect::checkpoints::Checkpoint;
use godwit_qemu::migration::device_state;
use tokio::io::{AsyncRead, AsyncReadExt};

use super::memory::GuestMemory;

pub(super) use copies::Copies;

/// The content of a page.
type Page = [u8; PAGE_BYTES as usize];

/// Bytes of the numbers before the data.
const HEADER: usize = 24;
/// Most pages of a record.
const MOST_PAGES: u64 = 256;
/// Most bytes of pages or differences in a record.
const MOST_DATA: u64 = MOST_PAGES * PAGE_BYTES;

const PAGES: u64 = 1;
const ZEROES: u64 = 2;
const STATE: u64 = 3;
const END: u64 = 4;
const DIFFERENCES: u64 = 5;

/// A record, as received.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// Whole pages from this one on.
    Pages(u64, Vec<u8>),
    /// Pages of zeroes.
    Zeroes(PageRun),
    /// Numbers of pages, each with its difference.
    Differences(Vec<u8>),
    /// The state of the processors and devices at the end of the epoch.
    State(Vec<u8>),
    /// The end of a checkpoint.
    End(Checkpoint),
}

impl Record {
    /// Returns the bytes that a waiting record of pages counts as: at least a page, for the room of the record itself.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Pages(_, data) | Self::Differences(data) => PAGE_BYTES.max(data.len() as u64),
            _ => PAGE_BYTES,
        }
    }

    /// Writes the pages of the record to the memory.
    ///
    /// # Errors
    /// A page is not in the memory, a difference is cut off, or the system's error.
    pub(super) fn apply(&self, memory: &GuestMemory) -> io::Result<()> {
        match self {
            Self::Pages(first, data) => memory.write(*first, data),
            Self::Zeroes(run) => memory.zero(*run),
            Self::Differences(data) => apply_differences(memory, data),
            Self::State(_) | Self::End(_) => Ok(()),
        }
    }
}

fn apply_differences(memory: &GuestMemory, mut data: &[u8]) -> io::Result<()> {
    let mut page: Page = [0; PAGE_BYTES as usize];
    while !data.is_empty() {
        let number = data.split_first_chunk();
        let (number, difference) = number.ok_or_else(|| invalid("a difference has no page"))?;
        let first = u64::from_le_bytes(*number);
        memory.read(PageRun { first, pages: 1 }, &mut page)?;
        let rest = difference::apply(&mut page, difference);
        data = rest.ok_or_else(|| invalid("a difference is cut off"))?;
        memory.write(first, &page)?;
    }
    Ok(())
}

fn invalid(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Appends the numbers of a record.
fn put(out: &mut Vec<u8>, kind: u64, a: u64, b: u64) {
    for number in [kind, a, b] {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

/// Appends the state and the end of a checkpoint.
pub(super) fn put_end(out: &mut Vec<u8>, state: &[u8], number: Checkpoint) {
    put(out, STATE, 0, state.len() as u64);
    out.extend_from_slice(state);
    put(out, END, number.0, 0);
}

/// Reads the next record. Dropping the future loses a partly read record.
///
/// # Errors
/// The connection's error, or a record that makes no sense.
pub(super) async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Record> {
    let mut header = [0; HEADER];
    from.read_exact(&mut header).await?;
    let number = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&header[at..at + 8]);
        u64::from_le_bytes(bytes)
    };
    let (kind, a, b) = (number(0), number(8), number(16));
    let length = match kind {
        PAGES if (1..=MOST_PAGES).contains(&b) => b * PAGE_BYTES,
        DIFFERENCES if (1..=MOST_DATA).contains(&b) => b,
        STATE if b <= device_state::MOST_BYTES as u64 => b,
        ZEROES if b > 0 => 0,
        END => 0,
        _ => return Err(invalid("a record of a checkpoint makes no sense")),
    };
    let mut data = vec![0; usize::try_from(length).map_err(|_| invalid("a record is too long"))?];
    from.read_exact(&mut data).await?;
    Ok(match kind {
        PAGES => Record::Pages(a, data),
        ZEROES => Record::Zeroes(PageRun { first: a, pages: b }),
        DIFFERENCES => Record::Differences(data),
        STATE => Record::State(data),
        _ => Record::End(Checkpoint(a)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_a_checkpoint_crosses() {
        let mut out = Vec::new();
        put_end(&mut out, b"state", Checkpoint(3));
        assert_eq!(out.len(), 2 * HEADER + 5);
        let mut from = out.as_slice();
        for expected in [Record::State(b"state".to_vec()), Record::End(Checkpoint(3))] {
            assert_eq!(read(&mut from).await.expect("a record"), expected);
        }
    }

    #[test]
    fn differences_outside_of_the_memory_or_cut_off_are_errors() {
        let memory = GuestMemory::empty(4);
        let apply = |data: &[u8]| Record::Differences(data.to_vec()).apply(&memory);
        let nothing = [3_u64.to_le_bytes(), [0; 8]].concat();
        apply(&nothing).expect("a difference");
        for page in [4, u64::MAX] {
            let outside = [page.to_le_bytes(), [0; 8]].concat();
            apply(&outside).expect_err("no page of the memory");
        }
        for bytes in 1..nothing.len() {
            apply(&nothing[..bytes]).expect_err("cut off");
        }
    }

    #[tokio::test]
    async fn hostile_records_are_errors() {
        for (kind, a, b) in [
            (0, 0, 0),
            (6, 0, 0),
            (u64::MAX, 0, 0),
            (PAGES, 0, 0),
            (PAGES, 0, MOST_PAGES + 1),
            (PAGES, 0, u64::MAX),
            (ZEROES, 0, 0),
            (DIFFERENCES, 0, 0),
            (DIFFERENCES, 0, MOST_DATA + 1),
            (STATE, 0, u64::MAX),
            (STATE, 0, 5),
        ] {
            let mut bytes = Vec::new();
            put(&mut bytes, kind, a, b);
            let read = read(&mut bytes.as_slice()).await;
            read.expect_err(&format!("{kind} {a} {b}"));
        }
    }
}
