//! The figures of a session's checkpoints, for users.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_api::CheckpointFigures;
use godwit_protect::checkpoints::{Acknowledged, Checkpoint};

use super::capture::Pause;

/// Checkpoints that the figures look back on.
const REMEMBERED: usize = 512;

/// A captured checkpoint.
#[derive(Clone, Copy, Debug)]
struct Capture {
    at: Instant,
    pause: Pause,
    pages: u64,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Kept {
    captures: VecDeque<Capture>,
    lags: VecDeque<Duration>,
    captured: u64,
    acknowledged: u64,
    bytes: u64,
}

/// The figures of a session.
#[derive(Debug, Default)]
pub(super) struct Figures(Mutex<Kept>);

fn remember<T>(all: &mut VecDeque<T>, new: T) {
    if all.len() == REMEMBERED {
        all.pop_front();
    }
    all.push_back(new);
}

/// Returns the value below which this part of the values lies, in microseconds.
fn quantile(values: impl Iterator<Item = Duration>, part: f64) -> u64 {
    let mut sorted: Vec<Duration> = values.collect();
    sorted.sort_unstable();
    let last = sorted.len().saturating_sub(1);
    let at = ((sorted.len() as f64 * part) as usize).min(last);
    sorted.get(at).map_or(0, |value| value.as_micros() as u64)
}

impl Figures {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a captured checkpoint.
    pub(super) fn captured(&self, number: Checkpoint, pause: Pause, pages: u64, bytes: u64) {
        let mut kept = self.lock();
        kept.captured = number.0;
        kept.bytes += bytes;
        let at = Instant::now();
        remember(
            &mut kept.captures,
            Capture {
                at,
                pause,
                pages,
                bytes,
            },
        );
    }

    /// Counts an acknowledged checkpoint.
    pub(super) fn acknowledged(&self, acknowledged: Acknowledged) {
        let mut kept = self.lock();
        kept.acknowledged = acknowledged.release.0;
        remember(&mut kept.lags, acknowledged.lag);
    }

    /// Returns the figures as the API shows them.
    pub(super) fn view(&self, asked_per_second: u32) -> CheckpointFigures {
        let kept = self.lock();
        let pause = |part: fn(&Pause) -> Duration, quota| {
            quantile(
                kept.captures.iter().map(|capture| part(&capture.pause)),
                quota,
            )
        };
        let span = match (kept.captures.front(), kept.captures.back()) {
            (Some(first), Some(last)) => (last.at - first.at).as_secs_f64(),
            _ => 0.0,
        };
        let count = kept.captures.len();
        let per_second = |sum: f64| if span > 0.0 { sum / span } else { 0.0 };
        let later = || kept.captures.iter().skip(1);
        CheckpointFigures {
            asked_per_second,
            per_second: per_second(count.saturating_sub(1) as f64),
            captured: kept.captured,
            acknowledged: kept.acknowledged,
            pause_p50_us: pause(|pause| pause.whole, 0.5),
            pause_p99_us: pause(|pause| pause.whole, 0.99),
            stop_p50_us: pause(|pause| pause.stop, 0.5),
            copy_p50_us: pause(|pause| pause.copy, 0.5),
            state_p50_us: pause(|pause| pause.state, 0.5),
            resume_p50_us: pause(|pause| pause.resume, 0.5),
            lag_p50_us: quantile(kept.lags.iter().copied(), 0.5),
            lag_p99_us: quantile(kept.lags.iter().copied(), 0.99),
            pages_per_second: per_second(later().map(|it| it.pages as f64).sum()),
            bytes_per_second: per_second(later().map(|it| it.bytes as f64).sum()),
            bytes_sent: kept.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_values() {
        let values = || (1..=100).map(Duration::from_micros);
        assert_eq!(quantile(values(), 0.5), 51);
        assert_eq!(quantile(values(), 0.99), 100);
        assert_eq!(quantile(std::iter::empty(), 0.5), 0);
    }

    #[test]
    fn old_checkpoints_are_forgotten() {
        let figures = Figures::default();
        for number in 1..=2 * REMEMBERED as u64 {
            let pause = Pause {
                whole: Duration::from_micros(number),
                ..Pause::default()
            };
            figures.captured(Checkpoint(number), pause, 1, 10);
        }
        let view = figures.view(20);
        assert_eq!((view.captured, view.bytes_sent), (1024, 10_240));
        assert!(view.pause_p50_us > REMEMBERED as u64);
    }
}
