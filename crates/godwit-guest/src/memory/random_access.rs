//! Reads and writes of single words at random places. Unlike in the pointer chase, accesses need not wait for each
//! other. Each read is compared with the last write to the place.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use super::{PAGE_WORDS, pages};
use crate::random::{Random, mix};
use crate::stats::Stats;

/// Accesses between two rests.
const SLICE: usize = 2048;
/// Length of a rest.
const REST: Duration = Duration::from_millis(2);
/// Words of a place: its number of writes, and a proof of the number.
const PLACE_WORDS: usize = PAGE_WORDS / 2;

/// Accesses `megabytes` MiB until told to stop, and then checks every place once.
pub(super) fn run(megabytes: u64, seed: u64, stats: &Stats, stop: &AtomicBool) {
    let mut memory = Places::new(pages(megabytes) * PAGE_WORDS / PLACE_WORDS);
    let mut random = Random::new(seed ^ 0x7261_6e64);
    while !stop.load(Relaxed) {
        for _ in 0..SLICE {
            let place = random.below(memory.written.len() as u64) as usize;
            if !memory.visit(place) {
                stats.mismatch(&format!("place {place} of the random accesses changed"));
            }
        }
        thread::sleep(REST);
    }
    for place in 0..memory.written.len() {
        if !memory.is_right(place) {
            stats.mismatch(&format!("place {place} of the random accesses is wrong"));
        }
    }
}

/// The accessed places, and the number of writes to each, kept apart from the places.
struct Places {
    words: Vec<u64>,
    written: Vec<u32>,
}

impl Places {
    fn new(count: usize) -> Self {
        Self {
            words: vec![0; count * PLACE_WORDS],
            written: vec![0; count],
        }
    }

    fn is_right(&self, place: usize) -> bool {
        let at = place * PLACE_WORDS;
        let (count, proof) = (self.words[at], self.words[at + 1]);
        count == u64::from(self.written[place]) && proof == prove(place, count)
    }

    /// Reads a place and writes it anew. Returns true if the read was right.
    fn visit(&mut self, place: usize) -> bool {
        let right = self.is_right(place);
        let count = &mut self.written[place];
        *count = count.wrapping_add(1);
        let at = place * PLACE_WORDS;
        self.words[at] = u64::from(*count);
        self.words[at + 1] = prove(place, u64::from(*count));
        right
    }
}

/// Returns the proof of a place's number of writes; new memory has zeroes.
const fn prove(place: usize, count: u64) -> u64 {
    match count {
        0 => 0,
        _ => mix((place as u64) << 32 ^ count),
    }
}

#[cfg(test)]
mod tests {
    use super::{PLACE_WORDS, Places};

    #[test]
    fn a_write_that_was_lost_and_a_place_of_another_are_noticed() {
        let mut places = Places::new(3);
        assert!((0..3).all(|place| places.visit(place) && places.visit(place)));
        let before = places.words.clone();
        assert!(places.visit(1));
        places.words[PLACE_WORDS] = before[PLACE_WORDS];
        places.words[PLACE_WORDS + 1] = before[PLACE_WORDS + 1];
        assert!(!places.visit(1), "lost");
        places.words[0] = places.words[2 * PLACE_WORDS];
        places.words[1] = places.words[2 * PLACE_WORDS + 1];
        assert!(!places.visit(0), "another's");
        assert!(places.visit(2));
    }
}
