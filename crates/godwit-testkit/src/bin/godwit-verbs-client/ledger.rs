//! What has to come next. Nothing here knows verbs.

use std::collections::BTreeSet;

/// Bytes of a message.
pub(crate) const MESSAGE: usize = 1024;
/// 64-bit words of a message.
const WORDS: usize = MESSAGE / 8;

/// Operations in this order, over and over: sends, then a write and the read that fetches it back.
const ROUND: u64 = 16;

/// What operation `number` of a queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// The message with this number.
    Send(u64),
    /// Writes a message with this number into the peer's memory.
    Write(u64),
    /// Reads what was written with this number.
    ReadBack(u64),
}

pub(crate) fn operation(number: u64) -> Operation {
    let (round, place) = (number / ROUND, number % ROUND);
    match place {
        14 => Operation::Write(round),
        15 => Operation::ReadBack(round),
        _ => Operation::Send(round * (ROUND - 2) + place),
    }
}

/// Fills `into` with message `number` of the queue pair `pair` of the side `side`. `last` says that none follows.
pub(crate) fn fill(into: &mut [u8], side: u8, pair: usize, number: u64, last: bool) {
    let words = into.chunks_exact_mut(8).take(WORDS);
    for (place, word) in words.enumerate() {
        word.copy_from_slice(&expected(side, pair, number, last, place).to_le_bytes());
    }
}

fn expected(side: u8, pair: usize, number: u64, last: bool, place: usize) -> u64 {
    match place {
        0 => number,
        1 => u64::from(last),
        _ => (number << 20 | (pair as u64) << 12 | u64::from(side) << 8)
            .wrapping_add(place as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// Checks that `message` is message `number`, whole. Says whether it is the last one.
pub(crate) fn check(message: &[u8], side: u8, pair: usize, number: u64) -> Result<bool, String> {
    let words: Vec<u64> = message
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
        .collect();
    let (Some(&found), Some(&last), WORDS) = (words.first(), words.get(1), words.len()) else {
        return Err(format!("a message of {} bytes", message.len()));
    };
    if found != number {
        return Err(format!(
            "queue pair {pair}: message {found} came in place of message {number}"
        ));
    }
    let last = last == 1;
    let bad = (1..WORDS).find(|&place| words[place] != expected(side, pair, number, last, place));
    match bad {
        None => Ok(last),
        Some(place) => Err(format!(
            "queue pair {pair}: word {place} of message {number} is {:#x}",
            words[place]
        )),
    }
}

/// Requests of a queue that complete in the order in which they were posted.
#[derive(Default)]
pub(crate) struct InOrder {
    posted: u64,
    completed: u64,
}

impl InOrder {
    /// The number of the next request.
    pub(crate) fn post(&mut self) -> u64 {
        self.posted += 1;
        self.posted - 1
    }

    /// Request `number` has completed.
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

    pub(crate) fn outstanding(&self) -> u64 {
        self.posted - self.completed
    }

    pub(crate) fn completed(&self) -> u64 {
        self.completed
    }
}

/// Requests of a queue that several queue pairs take from: each completes once, in any order.
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
        fill(&mut message, 1, 2, 7, false);
        assert_eq!(check(&message, 1, 2, 7), Ok(false));
        for other in [6, 8] {
            assert!(
                check(&message, 1, 2, other)
                    .unwrap_err()
                    .contains("message 7 came in place")
            );
        }
        assert!(check(&message, 0, 2, 7).is_err());
        assert!(check(&message, 1, 3, 7).is_err());
        for damaged in [8, 16, MESSAGE - 1] {
            let mut message = message;
            message[damaged] ^= 2;
            assert!(check(&message, 1, 2, 7).is_err(), "byte {damaged}");
        }
        fill(&mut message, 1, 2, 7, true);
        assert_eq!(check(&message, 1, 2, 7), Ok(true));
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
