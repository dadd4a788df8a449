//! A writer with the stride of a page: reads and writes one word of each page, in sequence, at a nominal rate. Reports
//! on the console for each 100 ms the number of pages reached.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use super::{PAGE_WORDS, Windows, pages};
use crate::console;
use crate::random::mix;
use crate::stats::Stats;

/// Pages between two looks at the clock.
const SLICE: u64 = 64;

/// Writes to the pages of `megabytes` MiB again and again until told to stop, `rate_mb` MiB of pages a second, or
/// without a limit for 0. Each write first checks the word of the pass before. In the end every page is checked.
pub(super) fn run(megabytes: u64, rate_mb: u64, stats: &Stats, stop: &AtomicBool) {
    let pages = pages(megabytes);
    let mut memory = vec![0u64; pages * PAGE_WORDS];
    // The first pass is neither paced nor reported: the kernel has yet to allocate the memory.
    for page in 0..pages {
        visit(&mut memory, page, 0);
    }
    let mut windows = Windows::begin();
    let pause =
        |pages: u64| Duration::from_micros(pages * 4096 * 1_000_000 / (rate_mb.max(1) << 20));
    let (mut pass, mut index, mut reached) = (1, 0, 0);
    let mut next = Instant::now();
    while !stop.load(Relaxed) {
        for _ in 0..SLICE {
            if !visit(&mut memory, index, pass) {
                stats.mismatch(&format!(
                    "page {index} of the page writer changed in pass {pass}"
                ));
            }
            reached += 1;
            index += 1;
            if index == pages {
                (index, pass) = (0, pass + 1);
            }
        }
        if rate_mb > 0 {
            // Missed pages are not made up for: the reported rate shows how many were missed.
            next = (next + pause(SLICE)).max(Instant::now());
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        if let Some(took) = windows.over(Instant::now()) {
            console::say(&format!(
                "{{\"dirty_pages\":{{\"window_us\":{},\"pages\":{reached}}}}}",
                took.as_micros()
            ));
            reached = 0;
        }
    }
    for page in 0..pages {
        let expected = word(page, if page < index { pass + 1 } else { pass });
        if memory[page * PAGE_WORDS + place(page)] != expected {
            stats.mismatch(&format!("page {page} of the page writer is wrong"));
        }
    }
}

/// Reads the word that the pass before wrote to a page, and writes the word of this pass. Returns true if the old word
/// was right.
fn visit(memory: &mut [u64], page: usize, pass: u64) -> bool {
    let at = &mut memory[page * PAGE_WORDS + place(page)];
    let right = *at == word(page, pass);
    *at = word(page, pass + 1);
    right
}

/// Returns the index of the page's written word. The index varies, because the first words alone would use few lines of
/// the cache.
const fn place(page: usize) -> usize {
    page * 8 % PAGE_WORDS
}

/// Returns the word of a page after `passes` passes; new memory has zeroes.
const fn word(page: usize, passes: u64) -> u64 {
    match passes {
        0 => 0,
        _ => mix((page as u64) << 32 ^ passes),
    }
}

#[cfg(test)]
mod tests {
    use super::{PAGE_WORDS, place, visit, word};

    #[test]
    fn a_write_that_was_lost_is_noticed_in_the_next_pass() {
        let mut memory = vec![0; 2 * PAGE_WORDS];
        for pass in 0..3 {
            assert!(visit(&mut memory, 0, pass) && visit(&mut memory, 1, pass));
        }
        memory[PAGE_WORDS + place(1)] = word(1, 2);
        assert!(visit(&mut memory, 0, 3) && !visit(&mut memory, 1, 3));
    }
}
