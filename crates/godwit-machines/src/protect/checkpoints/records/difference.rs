//! The difference between two contents of a page. Eight bytes name the lines of 64 bytes that differ, a bit each. For each
//! of these lines follow a byte that names its words of eight bytes that differ, a bit each, and the new words.

use super::Page;

/// Bytes of a word.
const WORD: usize = 8;
/// Bytes of a line.
const LINE: usize = 64;
/// Most bytes of a difference. A longer one saves too little for its work at both nodes.
const MOST_BYTES: usize = size_of::<Page>() * 3 / 4;

// Each line has a bit among eight bytes, and each word of a line among eight bits.
const _: () = assert!(size_of::<Page>() == 64 * LINE && LINE == 8 * WORD);

/// Appends the difference that makes the new content of the old one. Appends nothing and returns false if the difference
/// is longer than three quarters of a page.
pub(super) fn put(out: &mut Vec<u8>, old: &Page, new: &Page) -> bool {
    let begin = out.len();
    let mut lines = 0_u64;
    out.extend_from_slice(&lines.to_le_bytes());
    let ((old, _), (new, _)) = (old.as_chunks::<LINE>(), new.as_chunks::<LINE>());
    for (at, (old, new)) in old.iter().zip(new).enumerate() {
        if old == new {
            continue;
        }
        lines |= 1 << at;
        let head = out.len();
        let mut words = 0_u8;
        out.push(words);
        let ((old, _), (new, _)) = (old.as_chunks::<WORD>(), new.as_chunks::<WORD>());
        for (at, (old, new)) in old.iter().zip(new).enumerate() {
            if old != new {
                words |= 1 << at;
                out.extend_from_slice(new);
            }
        }
        out[head] = words;
        if out.len() - begin > MOST_BYTES {
            out.truncate(begin);
            return false;
        }
    }
    out[begin..begin + size_of::<u64>()].copy_from_slice(&lines.to_le_bytes());
    true
}

/// Changes a page by the difference that the data begins with. Returns the data after it; `None` if the data ends before
/// the difference does, with a part of the page changed.
pub(super) fn apply<'a>(page: &mut Page, data: &'a [u8]) -> Option<&'a [u8]> {
    let (lines, mut data) = data.split_first_chunk()?;
    let lines = u64::from_le_bytes(*lines);
    let (page, _) = page.as_chunks_mut::<LINE>();
    for (at, line) in page.iter_mut().enumerate() {
        if lines >> at & 1 == 0 {
            continue;
        }
        let (words, rest) = data.split_first()?;
        data = rest;
        let (line, _) = line.as_chunks_mut::<WORD>();
        for (at, word) in line.iter_mut().enumerate() {
            if words >> at & 1 == 1 {
                let (new, rest) = data.split_first_chunk()?;
                *word = *new;
                data = rest;
            }
        }
    }
    Some(data)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn page(seed: &[u8]) -> Page {
        std::array::from_fn(|at| seed[at % seed.len()])
    }

    #[test]
    fn few_words_are_short() {
        let old = page(&[1, 2, 3]);
        let mut new = old;
        new[77] ^= 1;
        let mut out = b"before".to_vec();
        assert!(put(&mut out, &old, &old));
        assert_eq!(out.len(), 6 + 8, "nothing differs");
        assert!(put(&mut out, &old, &new));
        assert_eq!(out.len(), 6 + 8 + 8 + 1 + 8, "a word differs");
    }

    #[test]
    fn a_difference_as_long_as_a_page_is_none() {
        let mut out = b"before".to_vec();
        assert!(!put(&mut out, &page(&[0]), &page(&[1])));
        assert_eq!(out, b"before");
    }

    proptest! {
        #[test]
        fn the_old_page_and_the_difference_are_the_new_page(
            seed in vec(any::<u8>(), 1..300),
            writes in vec((any::<prop::sample::Index>(), vec(any::<u8>(), 1..600)), 0..12),
            rest in vec(any::<u8>(), 0..20),
        ) {
            let old = page(&seed);
            let mut new = old;
            for (at, bytes) in writes {
                let place = &mut new[at.index(size_of::<Page>())..];
                let length = bytes.len().min(place.len());
                place[..length].copy_from_slice(&bytes[..length]);
            }
            let mut out = Vec::new();
            let is_short = put(&mut out, &old, &new);
            prop_assert!(out.len() <= MOST_BYTES);
            prop_assert_eq!(is_short, !out.is_empty());
            if is_short {
                out.extend_from_slice(&rest);
                let mut changed = old;
                prop_assert_eq!(apply(&mut changed, &out), Some(&rest[..]));
                prop_assert!(changed == new);
                let cut = out.len() - rest.len() - 1;
                prop_assert_eq!(apply(&mut old.clone(), &out[..cut]), None);
            }
        }

        #[test]
        fn any_data_is_a_difference_or_ends_too_early(data in vec(any::<u8>(), 0..5000)) {
            let mut changed = page(&[7]);
            if let Some(rest) = apply(&mut changed, &data) {
                prop_assert!(data.ends_with(rest));
            }
        }
    }
}
