//! Memory that is rewritten and checked as a whole, again and again.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use super::{PAGE_WORDS, pages};
use crate::random::mix;
use crate::stats::Stats;

/// Pages between two looks at the clock.
const SLICE: usize = 64;

/// Rewrites and checks `megabytes` MiB until told to stop, at most `rate` MiB a second. Every pass checks each page for
/// the content of the pass before.
pub(super) fn run(megabytes: u64, rate: u64, stats: &Stats, stop: &AtomicBool) {
    let pages = pages(megabytes);
    let mut memory = vec![0u64; pages * PAGE_WORDS];
    let pause = Duration::from_micros((SLICE as u64 * 4096 * 1_000_000) / (rate << 20));
    let mut next = Instant::now();
    let mut pass = 0;
    while !stop.load(Relaxed) && pages > 0 {
        for (index, page) in memory.chunks_exact_mut(PAGE_WORDS).enumerate() {
            if pass > 0 && !holds(page, index, pass) {
                stats.mismatch(&format!("memory page {index} changed in pass {pass}"));
            }
            write(page, index, pass + 1);
            if index % SLICE == SLICE - 1 {
                next = (next + pause).max(Instant::now());
                thread::sleep(next.saturating_duration_since(Instant::now()));
                // A whole pass may take too long to wait for.
                if stop.load(Relaxed) {
                    break;
                }
            }
        }
        pass += 1;
        stats.memory_pass();
    }
}

fn write(page: &mut [u64], index: usize, pass: u64) {
    let base = mix((index as u64) << 32 ^ pass);
    for (place, word) in page.iter_mut().enumerate() {
        *word = base.wrapping_add(place as u64);
    }
}

fn holds(page: &[u64], index: usize, pass: u64) -> bool {
    let base = mix((index as u64) << 32 ^ pass);
    page.iter()
        .enumerate()
        .all(|(place, word)| *word == base.wrapping_add(place as u64))
}

#[cfg(test)]
mod tests {
    use super::{PAGE_WORDS, holds, write};

    #[test]
    fn a_page_of_another_pass_or_place_is_noticed() {
        let mut page = vec![0; PAGE_WORDS];
        write(&mut page, 3, 7);
        assert!(holds(&page, 3, 7));
        assert!(!holds(&page, 3, 6));
        assert!(!holds(&page, 4, 7));
        page[PAGE_WORDS - 1] ^= 1;
        assert!(!holds(&page, 3, 7));
    }
}
