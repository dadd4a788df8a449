//! The records of checkpoints on their connection, from the primary to the backup. A record is three numbers, and data.
//! The backup answers each whole checkpoint with its number.

use std::io;

use godwit_memory::dirty::pages::{PAGE_BYTES, PageRun};
use godwit_protect::checkpoints::Checkpoint;
use godwit_qemu::migration::device_state;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes of the numbers before the data.
const HEADER: usize = 24;
/// Most pages of a record.
pub(super) const MOST_PAGES: u64 = 256;

const PAGES: u64 = 1;
const ZEROES: u64 = 2;
const STATE: u64 = 3;
const END: u64 = 4;

/// A record, as received.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// Whole pages from this one on.
    Pages(u64, Vec<u8>),
    /// Pages of zeroes.
    Zeroes(PageRun),
    /// The state of the processors and devices at the end of the epoch.
    State(Vec<u8>),
    /// The end of a checkpoint.
    End(Checkpoint),
}

/// Appends the numbers of a record.
fn put(out: &mut Vec<u8>, kind: u64, a: u64, b: u64) {
    for number in [kind, a, b] {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

/// Appends pages as records, zeroes without their data. `data` has the run's pages.
pub(super) fn put_pages(out: &mut Vec<u8>, run: PageRun, data: &[u8]) {
    let page = PAGE_BYTES as usize;
    let is_zero = |at: u64| {
        let at = at as usize * page;
        godwit_io::zeroes::is_zero(&data[at..at + page])
    };
    let mut at = 0;
    while at < run.pages {
        let zeroes = is_zero(at);
        let mut end = at + 1;
        while end < run.pages && end - at < MOST_PAGES && is_zero(end) == zeroes {
            end += 1;
        }
        let (first, pages) = (run.first + at, end - at);
        if zeroes {
            put(out, ZEROES, first, pages);
        } else {
            put(out, PAGES, first, pages);
            out.extend_from_slice(&data[at as usize * page..end as usize * page]);
        }
        at = end;
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
    let invalid = |why: &'static str| io::Error::new(io::ErrorKind::InvalidData, why);
    let length = match kind {
        PAGES if (1..=MOST_PAGES).contains(&b) => b * PAGE_BYTES,
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
        STATE => Record::State(data),
        _ => Record::End(Checkpoint(a)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn all(mut bytes: &[u8]) -> Vec<Record> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            records.push(read(&mut bytes).await.expect("a record"));
        }
        records
    }

    #[tokio::test]
    async fn records_cross_and_zeroes_take_no_data() {
        let page = PAGE_BYTES as usize;
        let data = [vec![1; page], vec![0; 2 * page], vec![2; page]].concat();
        let mut out = Vec::new();
        put_pages(&mut out, PageRun { first: 9, pages: 4 }, &data);
        put_end(&mut out, b"state", Checkpoint(3));
        assert_eq!(out.len(), 5 * HEADER + 2 * page + 5);
        let expected = [
            Record::Pages(9, vec![1; page]),
            Record::Zeroes(PageRun {
                first: 10,
                pages: 2,
            }),
            Record::Pages(12, vec![2; page]),
            Record::State(b"state".to_vec()),
            Record::End(Checkpoint(3)),
        ];
        assert_eq!(all(&out).await, expected);
    }

    #[tokio::test]
    async fn a_long_run_is_divided() {
        let pages = MOST_PAGES + 1;
        let data = vec![5; (pages * PAGE_BYTES) as usize];
        let mut out = Vec::new();
        put_pages(&mut out, PageRun { first: 0, pages }, &data);
        let records = all(&out).await;
        let firsts = records.iter().map(|record| match record {
            Record::Pages(first, data) => (*first, data.len() as u64 / PAGE_BYTES),
            other => panic!("{other:?}"),
        });
        assert_eq!(
            firsts.collect::<Vec<_>>(),
            [(0, MOST_PAGES), (MOST_PAGES, 1)]
        );
    }

    #[tokio::test]
    async fn hostile_records_are_errors() {
        for (kind, a, b) in [
            (0, 0, 0),
            (5, 0, 0),
            (u64::MAX, 0, 0),
            (PAGES, 0, 0),
            (PAGES, 0, MOST_PAGES + 1),
            (PAGES, 0, u64::MAX),
            (ZEROES, 0, 0),
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
