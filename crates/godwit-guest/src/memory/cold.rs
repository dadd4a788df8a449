//! Memory that is written once and not touched again before the end. Such memory moves last, and a loss would go
//! unnoticed until then.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use super::{PAGE_WORDS, WINDOW, first, pages};
use crate::console;
use crate::stats::Stats;

/// Fills `megabytes` MiB, reports so, and checks all of the memory when told to stop.
pub(super) fn run(megabytes: u64, stats: &Stats, stop: &AtomicBool) {
    let words = pages(megabytes) * PAGE_WORDS;
    let memory: Vec<u64> = (0..words).map(first).collect();
    console::say(&format!("{{\"cold\":{{\"pages\":{}}}}}", pages(megabytes)));
    while !stop.load(Relaxed) {
        thread::sleep(WINDOW);
    }
    for place in wrong(&memory) {
        stats.mismatch(&format!(
            "page {} of cold memory is wrong",
            place / PAGE_WORDS
        ));
    }
}

/// Returns the first wrong place of each page with a wrong word.
fn wrong(memory: &[u64]) -> impl Iterator<Item = usize> {
    let pages = memory.chunks(PAGE_WORDS).enumerate();
    pages.filter_map(|(page, words)| {
        let begins = page * PAGE_WORDS;
        let places = words.iter().enumerate();
        let mut bad = places.filter(|(place, word)| **word != first(begins + place));
        bad.next().map(|(place, _)| begins + place)
    })
}

#[cfg(test)]
mod tests {
    use super::{PAGE_WORDS, first, wrong};

    #[test]
    fn each_page_that_changed_is_named_once() {
        let mut memory: Vec<u64> = (0..3 * PAGE_WORDS).map(first).collect();
        assert_eq!(wrong(&memory).count(), 0);
        memory[2 * PAGE_WORDS..].fill(0);
        assert_eq!(wrong(&memory).collect::<Vec<_>>(), [2 * PAGE_WORDS]);
    }
}
