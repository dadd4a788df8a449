//! Runs of pages of a memory.

/// Bytes of a page.
pub const PAGE_BYTES: u64 = 4096;

/// Consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// Number of the first page in the memory.
    pub first: u64,
    /// Number of pages, at least one.
    pub pages: u64,
}

/// Pages of a memory, as ordered runs that neither touch nor overlap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    runs: Vec<PageRun>,
}

impl Pages {
    /// Returns the runs, in order.
    pub fn runs(&self) -> &[PageRun] {
        &self.runs
    }

    /// Returns the number of pages.
    pub fn count(&self) -> u64 {
        self.runs.iter().map(|run| run.pages).sum()
    }

    /// Returns true if there are no pages.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns true if the page is in one of the runs.
    pub fn contains(&self, page: u64) -> bool {
        let before = self.runs.partition_point(|run| run.first <= page);
        before > 0 && page - self.runs[before - 1].first < self.runs[before - 1].pages
    }

    /// Adds a run, in the order of a scan. The run must not begin before the last one.
    ///
    /// # Panics
    /// If the run begins before the last one.
    pub fn push(&mut self, run: PageRun) {
        if run.pages == 0 {
            return;
        }
        if let Some(last) = self.runs.last_mut() {
            assert!(run.first >= last.first, "runs come in order");
            if run.first <= last.first + last.pages {
                let end = (run.first + run.pages).max(last.first + last.pages);
                last.pages = end - last.first;
                return;
            }
        }
        self.runs.push(run);
    }

    /// Adds the pages of a bitmap's word, whose lowest bit is page `first`, in the order of a scan.
    ///
    /// # Panics
    /// If the word begins before the last run.
    pub fn push_bits(&mut self, first: u64, mut bits: u64) {
        while bits != 0 {
            let skipped = bits.trailing_zeros();
            let pages = (bits >> skipped).trailing_ones();
            self.push(PageRun {
                first: first + u64::from(skipped),
                pages: pages.into(),
            });
            bits &= u64::MAX.checked_shl(skipped + pages).unwrap_or(0);
        }
    }

    /// Returns the pages of both, for a copy that two scans follow.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let mut all: Vec<PageRun> = self.runs.iter().chain(&other.runs).copied().collect();
        all.sort_by_key(|run| run.first);
        let mut union = Self::default();
        all.into_iter().for_each(|run| union.push(run));
        union
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(runs: &[(u64, u64)]) -> Pages {
        let mut pages = Pages::default();
        for (first, count) in runs {
            pages.push(PageRun {
                first: *first,
                pages: *count,
            });
        }
        pages
    }

    #[test]
    fn runs_that_touch_or_overlap_become_one() {
        let found = pages(&[(0, 2), (2, 1), (2, 4), (9, 0), (10, 1)]);
        assert_eq!(found, pages(&[(0, 6), (10, 1)]));
        assert_eq!((found.count(), found.runs().len()), (7, 2));
        let has: Vec<u64> = (0..12).filter(|page| found.contains(*page)).collect();
        assert_eq!(has, [0, 1, 2, 3, 4, 5, 10]);
        assert!(!Pages::default().contains(0));
    }

    #[test]
    fn bits_become_runs_across_words() {
        let mut found = Pages::default();
        for (first, bits) in [(0, 0), (64, 1 << 63 | 0b110), (128, u64::MAX), (192, 1)] {
            found.push_bits(first, bits);
        }
        assert_eq!(found, pages(&[(65, 2), (127, 66)]));
    }

    #[test]
    fn what_either_look_found_is_in_both_together() {
        let both = pages(&[(1, 1), (5, 3)]).union(&pages(&[(0, 1), (6, 4)]));
        assert_eq!(both, pages(&[(0, 2), (5, 5)]));
        assert_eq!(both.union(&Pages::default()), both);
    }
}
