//! Answers to clients, and the clients' view of a server.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug)]
struct Answer {
    /// Time at which the request left.
    asked: Instant,
    /// Time at which the whole answer had arrived.
    came: Instant,
}

/// The clients' view of a window of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// The longest time without an answer to any client.
    pub gap: Duration,
    /// The longest wait of one client for one answer.
    pub longest_wait: Duration,
    pub answers: usize,
}

/// State that the threads of clients share with their owner.
#[derive(Debug, Default)]
pub(super) struct Shared {
    stop: AtomicBool,
    broken: AtomicU32,
    answers: Mutex<Vec<Answer>>,
}

impl Shared {
    /// Ends the clients after their present requests.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Counts a broken connection.
    pub(super) fn broke(&self) {
        self.broken.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn broken(&self) -> u32 {
        self.broken.load(Ordering::Relaxed)
    }

    /// Records an answer that has just arrived.
    pub(super) fn answered(&self, asked: Instant) {
        let came = Instant::now();
        let answers = self.answers.lock();
        answers
            .unwrap_or_else(PoisonError::into_inner)
            .push(Answer { asked, came });
    }

    pub(super) fn between(&self, from: Instant, to: Instant) -> Service {
        let answers = self.answers.lock();
        let answers = answers.unwrap_or_else(PoisonError::into_inner);
        service(&answers, from, to)
    }
}

fn service(answers: &[Answer], from: Instant, to: Instant) -> Service {
    let within = || {
        answers
            .iter()
            .filter(|answer| (from..=to).contains(&answer.came))
    };
    let mut came: Vec<Instant> = within().map(|answer| answer.came).collect();
    came.sort_unstable();
    // The ends of the window count: a server that has not come back has a gap until the end.
    came.insert(0, from);
    came.push(to);
    let gaps = came.windows(2).map(|pair| pair[1] - pair[0]);
    let waits = within().map(|answer| answer.came - answer.asked);
    Service {
        gap: gaps.max().unwrap_or_default(),
        longest_wait: waits.max().unwrap_or_default(),
        answers: came.len() - 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_nobodys_answer_and_a_wait_is_one_clients() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let answer = |asked, came| Answer {
            asked: at(asked),
            came: at(came),
        };
        // Two clients: the first hears nothing for 300 ms, the second for 200 ms of these.
        let answers = [
            answer(100, 101),
            answer(110, 111),
            answer(150, 350),
            answer(120, 420),
            answer(5, 6),
        ];
        let seen = service(&answers, at(90), at(430));
        assert_eq!(seen.gap, Duration::from_millis(239));
        assert_eq!(seen.longest_wait, Duration::from_millis(300));
        assert_eq!(seen.answers, 4);
        // A server that never comes back has a gap to the end.
        let seen = service(&answers, at(90), at(1420));
        assert_eq!(seen.gap, Duration::from_secs(1));
        assert_eq!(service(&[], at(0), at(7)).gap, Duration::from_millis(7));
    }
}
