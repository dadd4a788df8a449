//! Memory of the application's own: an eighth is written all the time, and all is checked in the end.

use std::io;

/// Words of a page.
const PAGE: usize = 512;
/// Number of equal parts, of which the first is written. The others stay unchanged: where Linux uses large pages, one
/// written word dirties 2 MiB.
const PARTS: usize = 8;
/// Odd stride that spreads successive writes over the pages.
const STRIDE: usize = 0x9e37_79b1;
/// Turns between two page writes: slow enough for pre-copy on an emulated processor.
const PAUSE: usize = 4;

/// Pages, each filled with a word derived from its place and its number of writes.
pub(crate) struct Memory {
    pages: Vec<[u64; PAGE]>,
    written: Vec<u32>,
    turns: usize,
}

impl Memory {
    pub(crate) fn new(mib: u16) -> Self {
        let count = usize::from(mib) << 8;
        let pages = (0..count).map(|page| [content(page, 0); PAGE]).collect();
        Self {
            pages,
            written: vec![0; count],
            turns: 0,
        }
    }

    /// Writes a page anew, now and then.
    pub(crate) fn write_sometimes(&mut self) {
        self.turns += 1;
        if self.pages.is_empty() || !self.turns.is_multiple_of(PAUSE) {
            return;
        }
        let page = (self.turns / PAUSE).wrapping_mul(STRIDE) % self.pages.len().div_ceil(PARTS);
        self.written[page] += 1;
        self.pages[page] = [content(page, self.written[page]); PAGE];
    }

    /// Checks all of the memory; returns the number of page writes.
    pub(crate) fn check(&self) -> io::Result<usize> {
        for (page, words) in self.pages.iter().enumerate() {
            let wanted = content(page, self.written[page]);
            if let Some(word) = words.iter().position(|word| *word != wanted) {
                return Err(io::Error::other(format!(
                    "word {word} of page {page} is {:#x}, and was written {} times, last with {wanted:#x}",
                    words[word], self.written[page]
                )));
            }
        }
        Ok(self.written.iter().map(|times| *times as usize).sum())
    }
}

fn content(page: usize, written: u32) -> u64 {
    (page as u64 + 1) << 32 | u64::from(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_not_the_newest_is_found() {
        let mut memory = Memory::new(1);
        for _ in 0..1000 * PAUSE {
            memory.write_sometimes();
        }
        assert_eq!(memory.check().expect("is whole"), 1000);
        let (changes, stays) = memory.written.split_at(256 / PARTS);
        assert!(changes.iter().all(|times| *times > 0) && stays.iter().all(|times| *times == 0));
        memory.pages[7][511] = content(7, memory.written[7] - 1);
        let error = memory.check().expect_err("is old").to_string();
        assert!(error.contains("page 7"), "{error}");
        let mut none = Memory::new(0);
        (0..=PAUSE).for_each(|_| none.write_sometimes());
        assert_eq!(none.check().expect("is nothing"), 0);
    }
}
