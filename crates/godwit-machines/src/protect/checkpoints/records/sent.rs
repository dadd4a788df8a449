//! The contents of pages as they were sent last, for pages that are written again and again.

use super::{Page, difference};

/// Part of a machine's memory that the contents take at most.
const PART: u64 = 8;
/// Most bytes of the contents.
const MOST_BYTES: u64 = 256 << 20;

/// The owner of a slot.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    page: Option<u64>,
    /// True if the page was sent again since another page wanted the slot.
    is_hot: bool,
}

/// The contents of pages. A page has one slot, by its number, and shares it with other pages.
#[derive(Debug)]
pub(super) struct Sent {
    slots: Vec<Slot>,
    contents: Vec<u8>,
}

impl Sent {
    /// Makes room for an eighth of a machine's memory, at most 256 MiB. The room is not touched before its use.
    pub(super) fn new(memory_bytes: u64) -> Self {
        let bytes = (memory_bytes / PART).min(MOST_BYTES) as usize;
        let slots = (bytes / size_of::<Page>()).max(1);
        Self {
            slots: vec![Slot::default(); slots],
            contents: vec![0; slots * size_of::<Page>()],
        }
    }

    /// Appends the number of a page that is sent, and its difference to the content that was sent last. Appends nothing and
    /// returns false if that content is not known any more, or differs much.
    pub(super) fn put_difference(&mut self, out: &mut Vec<u8>, page: u64, new: &Page) -> bool {
        let (slot, content) = self.slot(page);
        if slot.page == Some(page) {
            slot.is_hot = true;
            let begin = out.len();
            out.extend_from_slice(&page.to_le_bytes());
            let is_short = difference::put(out, content, new);
            if !is_short {
                out.truncate(begin);
            }
            *content = *new;
            return is_short;
        }
        // A hot page keeps its slot against one page that is sent once.
        if !std::mem::take(&mut slot.is_hot) {
            slot.page = Some(page);
            *content = *new;
        }
        false
    }

    /// Takes notice of a page that is sent as zeroes.
    pub(super) fn zeroed(&mut self, page: u64) {
        let (slot, content) = self.slot(page);
        if slot.page == Some(page) {
            content.fill(0);
        }
    }

    fn slot(&mut self, page: u64) -> (&mut Slot, &mut Page) {
        let at = (page % self.slots.len() as u64) as usize;
        let (contents, _) = self.contents.as_chunks_mut();
        (&mut self.slots[at], &mut contents[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 64;
    const SLOTS: u64 = PAGES / PART;

    fn sent() -> Sent {
        Sent::new(PAGES * size_of::<Page>() as u64)
    }

    /// Sends a page. Returns true if it was sent as a difference.
    fn send(sent: &mut Sent, page: u64, content: u8) -> bool {
        let mut new = [0; size_of::<Page>()];
        new[5] = content;
        let mut out = Vec::new();
        let is_short = sent.put_difference(&mut out, page, &new);
        assert_eq!(out.is_empty(), !is_short);
        is_short
    }

    #[test]
    fn a_page_that_is_sent_again_differs_little() {
        let mut sent = sent();
        assert!(!send(&mut sent, 3, 1));
        assert!(send(&mut sent, 3, 2));
        assert!(!send(&mut sent, 4, 2));
    }

    #[test]
    fn a_hot_page_stays_against_one_other() {
        let mut sent = sent();
        send(&mut sent, 3, 1);
        send(&mut sent, 3, 2);
        assert!(!send(&mut sent, 3 + SLOTS, 1));
        assert!(send(&mut sent, 3, 3), "the hot page has stayed");
        assert!(!send(&mut sent, 3 + SLOTS, 1));
        assert!(!send(&mut sent, 3 + SLOTS, 1));
        assert!(send(&mut sent, 3 + SLOTS, 1), "a cold one has not");
    }

    #[test]
    fn the_contents_have_a_bound() {
        for (memory, bound) in [(64 << 20, 8 << 20), (1 << 40, 256 << 20), (0, 4096)] {
            assert_eq!(Sent::new(memory).contents.len(), bound);
        }
    }
}
