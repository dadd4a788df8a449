//! The pages of a checkpoint on their way into records. The copying takes place while the guest stands still, in room that
//! was used before: new room would cost page faults. All other work follows while the guest runs.

use std::io;

use godwit_io::zeroes::is_zero;
use godwit_memory::dirty::pages::Pages;

use super::super::memory::GuestMemory;
use super::sent::Sent;
use super::{DIFFERENCES, MOST_DATA, MOST_PAGES, PAGES, Page, ZEROES, put};

/// Most bytes of room that are kept for the next copies.
const KEPT_BYTES: usize = 32 << 20;

/// Copied pages, and what was sent of earlier ones.
#[derive(Debug)]
pub(in crate::protect::checkpoints) struct Copies {
    pages: Pages,
    /// Begins with the contents of the pages.
    room: Vec<u8>,
    sent: Sent,
}

impl Copies {
    /// Begins a session, of whose memory nothing was sent.
    pub(in crate::protect::checkpoints) fn new(memory_bytes: u64) -> Self {
        Self {
            pages: Pages::default(),
            room: Vec::new(),
            sent: Sent::new(memory_bytes),
        }
    }

    /// Copies pages, in place of earlier copies.
    ///
    /// # Errors
    /// A page is not in the memory, or the system's error.
    pub(in crate::protect::checkpoints) fn take(
        &mut self,
        memory: &GuestMemory,
        pages: Pages,
    ) -> io::Result<()> {
        let bytes = pages.count() as usize * size_of::<Page>();
        if self.room.len() < bytes {
            self.room.resize(bytes, 0);
        }
        let mut room = &mut self.room[..];
        for run in pages.runs() {
            let (into, rest) = room.split_at_mut(run.pages as usize * size_of::<Page>());
            memory.read(*run, into)?;
            room = rest;
        }
        self.pages = pages;
        Ok(())
    }

    /// Returns the copies as records, which are sent after those of all earlier copies.
    pub(in crate::protect::checkpoints) fn pack(&mut self) -> Vec<u8> {
        let pages = std::mem::take(&mut self.pages);
        let mut packing = Packing::default();
        let runs = pages.runs().iter();
        let numbers = runs.flat_map(|run| run.first..run.first + run.pages);
        let (contents, _) = self.room.as_chunks();
        for (page, content) in numbers.zip(contents) {
            packing.put(page, content, &mut self.sent);
        }
        self.room.truncate(KEPT_BYTES);
        self.room.shrink_to(KEPT_BYTES);
        packing.end()
    }
}

/// Records of pages that are being put together.
#[derive(Default)]
struct Packing {
    out: Vec<u8>,
    /// The last record, if the next page can be added.
    open: Option<Open>,
    /// Differences that are no record yet.
    differences: Vec<u8>,
}

/// A record to which the page after its last one can be added.
struct Open {
    /// Place of the number of pages.
    count: usize,
    kind: u64,
    first: u64,
    pages: u64,
}

impl Open {
    const fn goes_on_with(&self, kind: u64, page: u64) -> bool {
        self.kind == kind && self.first + self.pages == page && self.pages < MOST_PAGES
    }
}

impl Packing {
    fn put(&mut self, page: u64, content: &Page, sent: &mut Sent) {
        if is_zero(content) {
            sent.zeroed(page);
            self.extend(ZEROES, page);
        } else if !sent.put_difference(&mut self.differences, page, content) {
            self.extend(PAGES, page);
            self.out.extend_from_slice(content);
        } else if self.differences.len() + size_of::<Page>() > MOST_DATA as usize {
            self.put_differences();
        }
    }

    /// Counts a page to the last record if that goes on with it, otherwise to a new record.
    fn extend(&mut self, kind: u64, page: u64) {
        match &mut self.open {
            Some(open) if open.goes_on_with(kind, page) => {
                open.pages += 1;
                self.out[open.count..][..size_of::<u64>()]
                    .copy_from_slice(&open.pages.to_le_bytes());
            }
            open => {
                put(&mut self.out, kind, page, 1);
                *open = Some(Open {
                    count: self.out.len() - size_of::<u64>(),
                    kind,
                    first: page,
                    pages: 1,
                });
            }
        }
    }

    /// Makes a record of the differences so far. The open record has ended: the page after its last one is among them.
    fn put_differences(&mut self) {
        if !self.differences.is_empty() {
            put(&mut self.out, DIFFERENCES, 0, self.differences.len() as u64);
            self.out.append(&mut self.differences);
        }
    }

    fn end(mut self) -> Vec<u8> {
        self.put_differences();
        self.out
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use godwit_memory::dirty::pages::{PAGE_BYTES, PageRun};
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::{HEADER, Record, read};
    use super::*;

    /// Pages of the memory, for an eighth of which contents are kept.
    const MEMORY: u64 = 64;

    fn copies() -> Copies {
        Copies::new(MEMORY * PAGE_BYTES)
    }

    fn pages(runs: &[(u64, u64)]) -> Pages {
        let mut all = Pages::default();
        for (first, pages) in runs.iter().copied() {
            all.push(PageRun { first, pages });
        }
        all
    }

    fn records(mut bytes: &[u8]) -> Vec<Record> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let record = read(&mut bytes).now_or_never().expect("all data is there");
            records.push(record.expect("a record"));
        }
        records
    }

    /// Sends pages of a memory. Returns the records, and their bytes.
    fn send(copies: &mut Copies, memory: &GuestMemory, written: Pages) -> (Vec<Record>, usize) {
        copies.take(memory, written).expect("in the memory");
        let bytes = copies.pack();
        (records(&bytes), bytes.len())
    }

    fn content(memory: &GuestMemory) -> Vec<u8> {
        let mut all = vec![0; (MEMORY * PAGE_BYTES) as usize];
        let run = PageRun {
            first: 0,
            pages: MEMORY,
        };
        memory.read(run, &mut all).expect("in the memory");
        all
    }

    #[test]
    fn pages_cross_and_zeroes_take_no_data() {
        let memory = GuestMemory::empty(MEMORY);
        let page = PAGE_BYTES as usize;
        memory.write(9, &vec![1; 2 * page]).expect("in the memory");
        memory.write(13, &vec![2; page]).expect("in the memory");
        let (records, bytes) = send(&mut copies(), &memory, pages(&[(9, 5), (20, 1)]));
        assert_eq!(bytes, 4 * HEADER + 3 * page);
        let zeroes = |first, pages| Record::Zeroes(PageRun { first, pages });
        let expected = [
            Record::Pages(9, vec![1; 2 * page]),
            zeroes(11, 2),
            Record::Pages(13, vec![2; page]),
            zeroes(20, 1),
        ];
        assert_eq!(records, expected);
    }

    #[test]
    fn a_long_run_is_divided() {
        let memory = GuestMemory::empty(MOST_PAGES + 1);
        let data = vec![5; ((MOST_PAGES + 1) * PAGE_BYTES) as usize];
        memory.write(0, &data).expect("in the memory");
        let (records, _) = send(&mut copies(), &memory, pages(&[(0, MOST_PAGES + 1)]));
        let firsts = records.iter().map(|record| match record {
            Record::Pages(first, data) => (*first, data.len() as u64 / PAGE_BYTES),
            other => panic!("{other:?}"),
        });
        assert_eq!(
            firsts.collect::<Vec<_>>(),
            [(0, MOST_PAGES), (MOST_PAGES, 1)]
        );
    }

    #[test]
    fn a_rewritten_word_is_sent_alone() {
        let memory = GuestMemory::empty(MEMORY);
        let mut copies = copies();
        let mut data = [3; PAGE_BYTES as usize];
        memory.write(5, &data).expect("in the memory");
        send(&mut copies, &memory, pages(&[(5, 1)]));
        data[80] = 4;
        memory.write(5, &data).expect("in the memory");
        let (records, bytes) = send(&mut copies, &memory, pages(&[(5, 1)]));
        assert!(
            matches!(records[..], [Record::Differences(_)]),
            "{records:?}"
        );
        assert_eq!(bytes, HEADER + 8 + 8 + 1 + 8);
    }

    #[test]
    fn many_differences_are_divided() {
        let count = 8 * MOST_PAGES;
        let memory = GuestMemory::empty(count);
        let mut copies = Copies::new(8 * count * PAGE_BYTES);
        let all = pages(&[(0, count)]);
        for content in [1, 2] {
            let page = std::array::from_fn::<u8, { PAGE_BYTES as usize }, _>(|at| match at % 64 {
                0..16 => content,
                _ => 7,
            });
            let data = page.repeat(count as usize);
            memory.write(0, &data).expect("in the memory");
            let (records, _) = send(&mut copies, &memory, all.clone());
            let is_sent = |record: &Record| match record {
                Record::Differences(data) => content == 2 && data.len() as u64 <= MOST_DATA,
                _ => content == 1,
            };
            assert!(records.len() > 1 && records.iter().all(is_sent));
        }
    }

    #[test]
    fn room_is_kept_up_to_a_bound() {
        let most = KEPT_BYTES as u64 / PAGE_BYTES + 1;
        let memory = GuestMemory::empty(most);
        let mut copies = copies();
        for (pages_now, room) in [(1, 1), (9, 9), (2, 9), (most, most - 1)] {
            send(&mut copies, &memory, pages(&[(0, pages_now)]));
            assert_eq!(copies.room.len() as u64, room * PAGE_BYTES);
        }
    }

    /// A guest's write to a page: from a byte on, so many bytes, all of them one of a few values, so that old contents come
    /// back. No bytes make the page zeroes.
    fn write() -> impl Strategy<Value = (u64, usize, usize, u8)> {
        let page = PAGE_BYTES as usize;
        let length = prop_oneof![Just(0), 1..40_usize, 1..page];
        (0..MEMORY / 3, 0..page, length, 0_u8..3)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_backup_has_the_memory_of_each_checkpoint(epochs in vec(vec(write(), 0..24), 1..8)) {
            let (here, there) = (GuestMemory::empty(MEMORY), GuestMemory::empty(MEMORY));
            let mut copies = copies();
            for mut writes in epochs {
                writes.sort_by_key(|(page, ..)| *page);
                let mut written = Pages::default();
                for (first, at, length, value) in writes {
                    let run = PageRun { first, pages: 1 };
                    written.push(run);
                    let mut page = [0; PAGE_BYTES as usize];
                    if length > 0 {
                        here.read(run, &mut page).expect("in the memory");
                    }
                    let end = (at + length).min(page.len());
                    page[at..end].fill(value);
                    here.write(first, &page).expect("in the memory");
                }
                for record in send(&mut copies, &here, written).0 {
                    record.apply(&there).expect("in the memory");
                }
                prop_assert!(content(&here) == content(&there));
            }
        }
    }
}
