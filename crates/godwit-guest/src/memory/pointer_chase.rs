//! A random pointer chase through memory: each place names the next one, so that nothing can be prefetched. The chase
//! measures the latency of memory. Reports on the console for each 100 ms the mean time of an access, and the time of
//! the slowest run of [`RUN`] accesses.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use super::{PAGE_WORDS, Windows, pages};
use crate::console;
use crate::random::{Random, mix};
use crate::stats::Stats;

/// Words of a place: the index of the next place, and a proof of the right content. The rest is padding, so that each
/// access is to another line of the cache.
const PLACE_WORDS: usize = 64;
/// Accesses between two looks at the clock. A look costs more than an access.
const RUN: u32 = 16;
/// Working time before a rest, for a chase with rests.
const TURN: Duration = Duration::from_millis(2);

/// Chases through `megabytes` MiB until told to stop, for `percent` per cent of the time, and then checks every place
/// once.
pub(super) fn run(megabytes: u64, percent: u64, seed: u64, stats: &Stats, stop: &AtomicBool) {
    let places = pages(megabytes) * PAGE_WORDS / PLACE_WORDS;
    let memory = circle(places, seed);
    let rest = TURN.mul_f64(100.0 / percent.clamp(1, 100) as f64 - 1.0);
    let mut windows = Windows::begin();
    let (mut at, mut accesses, mut busy, mut worst) = (0, 0u64, Duration::ZERO, Duration::ZERO);
    let mut begun = Instant::now();
    let mut turn = begun;
    while !stop.load(Relaxed) {
        for _ in 0..RUN {
            match next(&memory, at, seed) {
                Some(next) => at = next,
                None => {
                    stats.mismatch(&format!("place {at} of the pointer chase changed"));
                    at = (at + 1) % places;
                }
            }
        }
        let now = Instant::now();
        accesses += u64::from(RUN);
        busy += now - begun;
        worst = worst.max(now - begun);
        begun = now;
        if let Some(took) = windows.over(now) {
            console::say(&format!(
                "{{\"pointer_chase\":{{\"window_us\":{},\"accesses\":{accesses},\"mean_ns\":{:.1},\
                 \"slowest_run_ns\":{}}}}}",
                took.as_micros(),
                busy.as_nanos() as f64 / accesses as f64,
                worst.as_nanos(),
            ));
            (accesses, busy, worst) = (0, Duration::ZERO, Duration::ZERO);
            begun = Instant::now();
        }
        if !rest.is_zero() && now - turn >= TURN {
            thread::sleep(rest);
            begun = Instant::now();
            turn = begun;
        }
    }
    check(&memory, seed, stats);
}

/// Returns places in one circle through all of them, in an order from the seed (Sattolo's shuffle).
fn circle(places: usize, seed: u64) -> Vec<u64> {
    let mut order: Vec<u32> = (0..places as u32).collect();
    let mut random = Random::new(seed);
    for last in (1..places).rev() {
        order.swap(last, random.below(last as u64) as usize);
    }
    let mut memory = vec![0; places * PLACE_WORDS];
    for (place, next) in order.into_iter().enumerate() {
        memory[place * PLACE_WORDS] = u64::from(next);
        memory[place * PLACE_WORDS + 1] = proof(place, next.into(), seed);
    }
    memory
}

const fn proof(place: usize, next: u64, seed: u64) -> u64 {
    mix(seed ^ (place as u64) << 32 ^ next)
}

/// Returns the place after `place`; `None` if its memory has changed.
fn next(memory: &[u64], place: usize, seed: u64) -> Option<usize> {
    let at = place * PLACE_WORDS;
    let (next, found) = black_box((memory[at], memory[at + 1]));
    (found == proof(place, next, seed)).then_some(next as usize)
}

fn check(memory: &[u64], seed: u64, stats: &Stats) {
    for place in 0..memory.len() / PLACE_WORDS {
        if next(memory, place, seed).is_none() {
            stats.mismatch(&format!("place {place} of the pointer chase is wrong"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{PLACE_WORDS, circle, next};

    #[test]
    fn the_chase_comes_to_every_place_once() {
        let memory = circle(1000, 7);
        let mut seen = vec![false; 1000];
        let mut at = 0;
        for _ in 0..1000 {
            assert!(!std::mem::replace(&mut seen[at], true), "twice at {at}");
            at = next(&memory, at, 7).unwrap();
        }
        assert_eq!(at, 0);
    }

    #[test]
    fn a_page_that_is_lost_or_another_s_is_noticed() {
        let mut memory = circle(16, 7);
        let other = memory[3 * PLACE_WORDS..4 * PLACE_WORDS].to_vec();
        memory[..PLACE_WORDS].copy_from_slice(&other);
        assert_eq!(next(&memory, 0, 7), None);
        memory[PLACE_WORDS..2 * PLACE_WORDS].fill(0);
        assert_eq!(next(&memory, 1, 7), None);
        assert!(next(&memory, 2, 7).is_some());
    }
}
