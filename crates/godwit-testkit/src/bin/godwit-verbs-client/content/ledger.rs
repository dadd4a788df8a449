//! The expected sequence of messages and completions, without verbs.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

/// Bytes of a message.
pub(crate) const MESSAGE: usize = 1024;
/// 64-bit words of a message.
const WORDS: usize = MESSAGE / 8;

/// Operations in this order, over and over: sends, then a write and a read of the written data.
const ROUND: u64 = 16;

/// An operation of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Sends the message with this number.
    Send(u64),
    /// Writes a message with this number into the peer's memory.
    Write(u64),
    /// Reads the message written with this number.
    ReadBack(u64),
}

/// Returns true if operation `number` is the first of a round.
pub(crate) fn begins_round(number: u64) -> bool {
    number.is_multiple_of(ROUND)
}

pub(crate) fn operation(number: u64) -> Operation {
    let (round, place) = (number / ROUND, number % ROUND);
    match place {
        14 => Operation::Write(round),
        15 => Operation::ReadBack(round),
        _ => Operation::Send(round * (ROUND - 2) + place),
    }
}

/// A message's content besides the number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Note {
    /// True if no message follows.
    pub(crate) last: bool,
    /// 63 further bits. Of datagrams: the number after the highest one received from the other side on this queue pair.
    /// With windows: the word of [`super::super::handover::Told`].
    pub(crate) more: u64,
}

impl Note {
    fn word(self) -> u64 {
        self.more << 1 | u64::from(self.last)
    }

    fn of(word: u64) -> Self {
        Self {
            last: word & 1 == 1,
            more: word >> 1,
        }
    }
}

/// Fills `into` with message `number` of the queue pair `pair` of the side `side`.
pub(crate) fn fill(into: &mut [u8], side: u8, pair: usize, number: u64, note: Note) {
    let words = into.chunks_exact_mut(8).take(WORDS);
    for (place, word) in words.enumerate() {
        word.copy_from_slice(&expected(side, pair, number, note, place).to_le_bytes());
    }
}

fn expected(side: u8, pair: usize, number: u64, note: Note, place: usize) -> u64 {
    match place {
        0 => number,
        1 => note.word(),
        _ => (number << 20 | (pair as u64) << 12 | u64::from(side) << 8)
            .wrapping_add(place as u64)
            .wrapping_add(note.word().rotate_left(32))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// Returns the number that `message` claims; [`check`] verifies it.
pub(crate) fn number_of(message: &[u8]) -> u64 {
    let first = message.first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(first)
}

/// Checks that `message` is message `number`, whole. Returns the note.
pub(crate) fn check(message: &[u8], side: u8, pair: usize, number: u64) -> Result<Note, String> {
    let words: Vec<u64> = message
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
        .collect();
    let (Some(&found), Some(&note), WORDS) = (words.first(), words.get(1), words.len()) else {
        return Err(format!("a message of {} bytes", message.len()));
    };
    if found != number {
        return Err(format!(
            "queue pair {pair}: message {found} came in place of message {number}"
        ));
    }
    let note = Note::of(note);
    let bad = (1..WORDS).find(|&place| words[place] != expected(side, pair, number, note, place));
    match bad {
        None => Ok(note),
        Some(place) => Err(format!(
            "queue pair {pair}: word {place} of message {number} is {:#x}",
            words[place]
        )),
    }
}

/// Requests of a queue that complete in the order of posting.
#[derive(Default)]
pub(crate) struct InOrder {
    posted: u64,
    completed: u64,
}

impl InOrder {
    /// Returns the number of the next request.
    pub(crate) fn post(&mut self) -> u64 {
        self.posted += 1;
        self.posted - 1
    }

    /// Records the completion of request `number`.
    pub(crate) fn complete(&mut self, number: u64) -> Result<(), String> {
        if number != self.completed || number >= self.posted {
            return Err(format!(
                "the completion of request {number} came in place of that of request {}, with {} posted",
                self.completed, self.posted
            ));
        }
        self.completed += 1;
        Ok(())
    }

    /// Returns the number of posted requests, which is the number of the next one.
    pub(crate) fn posted(&self) -> u64 {
        self.posted
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.posted - self.completed
    }

    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }
}

/// Requests of a queue shared by several queue pairs: each completes once, in any order.
#[derive(Default)]
pub(crate) struct Once {
    outstanding: BTreeSet<u64>,
}

impl Once {
    pub(crate) fn post(&mut self, number: u64) {
        self.outstanding.insert(number);
    }

    pub(crate) fn complete(&mut self, number: u64) -> Result<(), String> {
        if self.outstanding.remove(&number) {
            Ok(())
        } else {
            Err(format!(
                "receive {number} of the shared queue completed and was not posted"
            ))
        }
    }
}

/// Datagrams of one queue pair: each comes once or never.
#[derive(Default)]
pub(crate) struct AtMostOnce {
    next: u64,
    missing: BTreeSet<u64>,
}

impl AtMostOnce {
    /// Missing datagrams at which the sender counts as broken.
    const MOST_MISSING: u64 = 1 << 20;

    /// Records the arrival of datagram `number`. Returns the earlier numbers that are newly found missing.
    pub(crate) fn arrive(&mut self, number: u64) -> Result<Range<u64>, String> {
        if number < self.next {
            return if self.missing.remove(&number) {
                Ok(0..0)
            } else {
                Err(format!("datagram {number} came twice"))
            };
        }
        let lost = self.next..number;
        if number - self.next > Self::MOST_MISSING - self.missing() {
            return Err(format!(
                "datagram {number} came where {} is the next one",
                self.next
            ));
        }
        self.missing.extend(lost.clone());
        self.next = number + 1;
        Ok(lost)
    }

    /// Returns the number after the highest one received.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Returns the number of earlier datagrams still missing.
    pub(crate) fn missing(&self) -> u64 {
        self.missing.len() as u64
    }
}

/// The lead of a sender of datagrams over the acknowledged ones: a window, and one more now and then during silence,
/// since the acknowledgement may be lost.
#[derive(Default)]
pub(crate) struct Window {
    seen: u64,
    moved_at: Duration,
}

impl Window {
    /// Length of a silence before one more is sent.
    const SILENCE: Duration = Duration::from_millis(250);

    /// Returns true if `number` may be sent: the lead over the acknowledged ones is less than `size`, or there was a
    /// long silence.
    pub(crate) fn allows(&mut self, number: u64, size: u64, now: Duration) -> bool {
        // Another host's clock may be behind.
        self.moved_at = self.moved_at.min(now);
        if number < self.seen + size {
            return true;
        }
        let silent = now - self.moved_at >= Self::SILENCE;
        if silent {
            self.moved_at = now;
        }
        silent
    }

    /// Takes the other side's acknowledgement: `seen` is the number after the highest one received, of `sent`.
    pub(crate) fn hear(&mut self, seen: u64, sent: u64, now: Duration) -> Result<(), String> {
        if seen > sent {
            return Err(format!(
                "the peer has seen datagram {} of {sent} that were sent",
                seen - 1
            ));
        }
        if seen > self.seen {
            (self.seen, self.moved_at) = (seen, now);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_numbered_without_a_gap() {
        let sends: Vec<u64> = (0..64)
            .filter_map(|number| match operation(number) {
                Operation::Send(message) => Some(message),
                _ => None,
            })
            .collect();
        assert_eq!(sends, (0..56).collect::<Vec<_>>());
        assert_eq!(operation(30), Operation::Write(1));
        assert_eq!(operation(31), Operation::ReadBack(1));
    }

    #[test]
    fn loss_repetition_and_damage_are_found() {
        let mut message = [0; MESSAGE];
        let note = Note {
            last: false,
            more: 5,
        };
        fill(&mut message, 1, 2, 7, note);
        assert_eq!(
            (number_of(&message), check(&message, 1, 2, 7)),
            (7, Ok(note))
        );
        for other in [6, 8] {
            assert!(
                check(&message, 1, 2, other)
                    .unwrap_err()
                    .contains("message 7 came in place")
            );
        }
        assert!(check(&message, 0, 2, 7).is_err());
        assert!(check(&message, 1, 3, 7).is_err());
        for damaged in [8, 9, 16, MESSAGE - 1] {
            for bit in [1, 2] {
                let mut message = message;
                message[damaged] ^= bit;
                assert!(check(&message, 1, 2, 7).is_err(), "byte {damaged}");
            }
        }
        let last = Note {
            last: true,
            more: 0,
        };
        fill(&mut message, 1, 2, 7, last);
        assert_eq!(check(&message, 1, 2, 7), Ok(last));
    }

    #[test]
    fn datagrams_that_come_twice_are_found_and_lost_ones_are_counted() {
        let mut came = AtMostOnce::default();
        assert_eq!(came.arrive(0), Ok(0..0));
        assert_eq!(came.arrive(3), Ok(1..3));
        assert_eq!((came.missing(), came.next()), (2, 4));
        // A late datagram.
        assert_eq!(came.arrive(2), Ok(0..0));
        assert_eq!(came.missing(), 1);
        for twice in [0, 2, 3] {
            assert!(came.arrive(twice).unwrap_err().contains("twice"));
        }
        assert!(came.arrive(1 << 40).is_err());
        assert_eq!(came.arrive(4), Ok(4..4));
    }

    #[test]
    fn a_sender_that_hears_nothing_sends_little() {
        let at = Duration::from_millis;
        let mut window = Window::default();
        assert!(window.allows(7, 8, at(1000)));
        window.hear(1, 8, at(1000)).unwrap();
        assert!(window.allows(8, 8, at(1000)));
        assert!(!window.allows(9, 8, at(1100)));
        assert!(window.allows(9, 8, at(1250)));
        assert!(!window.allows(10, 8, at(1300)));
        // A delayed acknowledgement has a lower number than an earlier one.
        window.hear(10, 10, at(1300)).unwrap();
        window.hear(4, 10, at(1400)).unwrap();
        assert!(window.allows(17, 8, at(1400)));
        assert!(window.hear(12, 11, at(1500)).is_err());
        // After a move to a host whose clock is behind.
        assert!(!window.allows(18, 8, at(10)));
        assert!(window.allows(18, 8, at(260)));
    }

    #[test]
    fn completions_out_of_turn_are_found() {
        let mut queue = InOrder::default();
        assert_eq!((queue.post(), queue.post()), (0, 1));
        assert!(queue.complete(1).is_err());
        queue.complete(0).unwrap();
        assert!(queue.complete(0).is_err());
        queue.complete(1).unwrap();
        assert!(queue.complete(2).is_err());
        let mut shared = Once::default();
        shared.post(5);
        shared.complete(5).unwrap();
        assert!(shared.complete(5).is_err());
    }
}
