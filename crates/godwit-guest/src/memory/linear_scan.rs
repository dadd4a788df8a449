//! A scan of memory from start to end, again and again: each word is read and compared.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use super::{PAGE_WORDS, first, pages};
use crate::stats::Stats;

/// Pages between two rests.
const SLICE: usize = 256;
/// Length of a rest. A scan without rests would leave other programs no processor.
const REST: Duration = Duration::from_millis(2);

/// Scans `megabytes` MiB until told to stop, and then once as a whole.
pub(super) fn run(megabytes: u64, stats: &Stats, stop: &AtomicBool) {
    let words = pages(megabytes) * PAGE_WORDS;
    let memory: Vec<u64> = (0..words).map(first).collect();
    let check = |slice: usize| {
        let begins = slice * SLICE * PAGE_WORDS;
        let until = (begins + SLICE * PAGE_WORDS).min(words);
        if let Some(place) = wrong(&memory[begins..until], begins) {
            stats.mismatch(&format!(
                "page {} of the linear scan changed",
                place / PAGE_WORDS
            ));
        }
    };
    let slices = pages(megabytes).div_ceil(SLICE);
    for slice in (0..slices).cycle() {
        if stop.load(Relaxed) {
            break;
        }
        check(slice);
        thread::sleep(REST);
    }
    (0..slices).for_each(check);
}

/// Returns the first wrong place among words that begin at `begins`.
fn wrong(words: &[u64], begins: usize) -> Option<usize> {
    let bad = |(at, word): (usize, &u64)| (*word != first(begins + at)).then_some(begins + at);
    words.iter().enumerate().find_map(bad)
}

#[cfg(test)]
mod tests {
    use super::{first, wrong};

    #[test]
    fn a_word_of_another_place_is_noticed() {
        let mut words: Vec<u64> = (100..200).map(first).collect();
        assert_eq!(wrong(&words, 100), None);
        words.swap(7, 8);
        assert_eq!(wrong(&words, 100), Some(107));
        assert_eq!(wrong(&words, 99), Some(99));
    }
}
