//! Limits repeated log lines. The limit counts each kind of line separately, so a flood of one kind hides no other
//! kind.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Time before the count of a kind starts anew.
pub(super) const PERIOD: Duration = Duration::from_secs(10);

/// Lines of one place in the code about one subject (a disk, a VM, a peer) within a period, at most.
const MOST_OF_SUBJECT: u32 = 20;

/// Lines of one place in the code within a period, at most, for all subjects together: a stranger may invent subjects.
const MOST_OF_PLACE: u32 = 200;

/// Subjects told apart at once, at most, for all places together.
const MOST_SUBJECTS: usize = 2048;

/// Longest subject told apart by its name, in bytes.
const LONGEST_SUBJECT: usize = 128;

/// Counts lines; `P` is a place in the code that writes lines.
#[derive(Debug)]
pub(super) struct Flood<P> {
    places: HashMap<P, Count>,
    subjects: HashMap<(P, Box<str>), Count>,
}

#[derive(Debug)]
struct Count {
    since: Instant,
    written: u32,
    left_out: u64,
    /// The text of an omitted line.
    sample: String,
}

/// A summary of the omitted lines of one kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LeftOut<P> {
    /// The place in the code.
    pub(super) place: P,
    /// The disk, VM or peer; empty for several subjects or none.
    pub(super) subject: Box<str>,
    /// Number of omitted lines.
    pub(super) lines: u64,
    /// Time in which the lines were omitted, in seconds.
    pub(super) seconds: u64,
    /// The text of an omitted line.
    pub(super) sample: String,
}

impl<P> Default for Flood<P> {
    fn default() -> Self {
        Self {
            places: HashMap::new(),
            subjects: HashMap::new(),
        }
    }
}

impl<P: Clone + Eq + Hash> Flood<P> {
    /// Returns true if a line is to be written now. Counts the line otherwise; `sample` returns the line's text.
    pub(super) fn admit(
        &mut self,
        now: Instant,
        place: P,
        subject: &str,
        sample: impl FnOnce() -> String,
    ) -> bool {
        let new = || Count {
            since: now,
            written: 0,
            left_out: 0,
            sample: String::new(),
        };
        let subject = if subject.len() > LONGEST_SUBJECT {
            ""
        } else {
            subject
        };
        let in_place = self.places.entry(place.clone()).or_insert_with(new);
        let full = in_place.written >= MOST_OF_PLACE;
        // An entry is made only for a subject that may still be written, which bounds the number of entries.
        let room = !full && self.subjects.len() < MOST_SUBJECTS;
        let own = match self.subjects.entry((place, subject.into())) {
            Entry::Occupied(entry) => Some(entry.into_mut()),
            Entry::Vacant(entry) if room => Some(entry.insert(new())),
            Entry::Vacant(_) => None,
        };
        let written = !full && own.as_ref().is_none_or(|own| own.written < MOST_OF_SUBJECT);
        if written {
            in_place.written += 1;
            if let Some(own) = own {
                own.written += 1;
            }
        } else {
            own.unwrap_or(in_place).leave_out(sample);
        }
        written
    }

    /// Takes out the summaries of ended periods, and forgets their counts.
    pub(super) fn ended(&mut self, now: Instant) -> Vec<LeftOut<P>> {
        let ends = |count: &Count| now.saturating_duration_since(count.since) >= PERIOD;
        self.take_out(now, ends)
    }

    /// Takes out all summaries so far.
    pub(super) fn all(&mut self, now: Instant) -> Vec<LeftOut<P>> {
        self.take_out(now, |_| true)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty() && self.subjects.is_empty()
    }

    fn take_out(&mut self, now: Instant, ends: impl Fn(&Count) -> bool) -> Vec<LeftOut<P>> {
        let mut left_out = Vec::new();
        let mut tell = |place: P, subject: Box<str>, count: Count| {
            if count.left_out > 0 {
                let seconds = now.saturating_duration_since(count.since).as_secs_f64();
                left_out.push(LeftOut {
                    place,
                    subject,
                    lines: count.left_out,
                    seconds: (seconds.round() as u64).max(1),
                    sample: count.sample,
                });
            }
        };
        for (place, count) in self.places.extract_if(|_, count| ends(count)) {
            tell(place, Box::default(), count);
        }
        for ((place, subject), count) in self.subjects.extract_if(|_, count| ends(count)) {
            tell(place, subject, count);
        }
        left_out
    }
}

impl Count {
    fn leave_out(&mut self, sample: impl FnOnce() -> String) {
        if self.left_out == 0 {
            self.sample = sample();
        }
        self.left_out += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the written lines among `lines`.
    fn write(flood: &mut Flood<u8>, now: Instant, place: u8, subject: &str, lines: u32) -> u32 {
        (0..lines)
            .map(|line| u32::from(flood.admit(now, place, subject, || format!("line {line}"))))
            .sum()
    }

    #[test]
    fn a_flood_is_cut_and_counted() {
        let (mut flood, now) = (Flood::default(), Instant::now());
        assert_eq!(write(&mut flood, now, 1, "disk", 50_000), MOST_OF_SUBJECT);
        assert_eq!(flood.ended(now + PERIOD / 2), []);
        let expected = LeftOut {
            place: 1,
            subject: "disk".into(),
            lines: u64::from(50_000 - MOST_OF_SUBJECT),
            seconds: 10,
            sample: format!("line {MOST_OF_SUBJECT}"),
        };
        assert_eq!(flood.ended(now + PERIOD), [expected]);
        assert!(flood.is_empty(), "nothing of it is kept");
        assert_eq!(write(&mut flood, now + PERIOD, 1, "disk", 5), 5);
        assert_eq!(
            flood.all(now + PERIOD),
            [],
            "and nothing was left out since"
        );
    }

    #[test]
    fn a_flood_hides_no_other_line() {
        let (mut flood, now) = (Flood::default(), Instant::now());
        write(&mut flood, now, 1, "noisy", 50_000);
        assert_eq!(write(&mut flood, now, 1, "quiet", 3), 3);
        assert_eq!(write(&mut flood, now, 2, "noisy", 3), 3);
        assert_eq!(write(&mut flood, now, 3, "", 3), 3);
    }

    #[test]
    fn invented_names_are_no_way_around_it() {
        let (mut flood, now) = (Flood::default(), Instant::now());
        let mut written = 0;
        for name in 0..50_000 {
            written += write(&mut flood, now, 1, &format!("disk {name}"), 1);
        }
        assert_eq!(written, MOST_OF_PLACE);
        assert!(flood.subjects.len() <= MOST_SUBJECTS);
        let long = "x".repeat(LONGEST_SUBJECT + 1);
        assert_eq!(write(&mut flood, now, 2, &long, 50_000), MOST_OF_SUBJECT);
        let left_out = flood.all(now);
        let lines = |place| {
            let of_place = left_out.iter().filter(|left| left.place == place);
            of_place.map(|left| left.lines).sum::<u64>()
        };
        assert_eq!(lines(1), u64::from(50_000 - MOST_OF_PLACE));
        assert_eq!(lines(2), u64::from(50_000 - MOST_OF_SUBJECT));
    }
}
