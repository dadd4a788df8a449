//! Hedged requests: repeats a request to a slow store in parallel. An answer may trickle or never arrive while the
//! store would answer another request at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::sync::Semaphore;

/// Repeated requests at once, so that an overloaded store does not get twice the load.
const BESIDE: usize = 8;
/// Multiple of the usual time after which a request is repeated.
const TIMES: u32 = 8;
/// Bounds of the time before a request is repeated.
const SOONEST: Duration = Duration::from_millis(500);
const LATEST: Duration = Duration::from_secs(2);

/// The usual time of an answer and the repeated requests under way.
#[derive(Debug)]
pub(in crate::repository) struct Hedge {
    /// Moving average in microseconds; 0 before the first answer.
    usual: AtomicU64,
    beside: Semaphore,
}

impl Default for Hedge {
    fn default() -> Self {
        Self {
            usual: AtomicU64::new(0),
            beside: Semaphore::new(BESIDE),
        }
    }
}

impl Hedge {
    /// Returns the time before a request is repeated.
    fn patience(&self) -> Duration {
        match self.usual.load(Ordering::Relaxed) {
            0 => LATEST,
            usual => (TIMES * Duration::from_micros(usual)).clamp(SOONEST, LATEST),
        }
    }

    fn answered(&self, took: Duration) {
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        // A lost update does not matter.
        let usual = match self.usual.load(Ordering::Relaxed) {
            0 => took,
            usual => usual - usual / 8 + took / 8,
        };
        self.usual.store(usual, Ordering::Relaxed);
    }

    /// Returns the first whole answer. A late request is repeated in parallel. A late repetition is dropped for another
    /// one, after twice the time, and so on. The first request is never dropped: on a slow link no repetition may ever
    /// finish.
    ///
    /// # Errors
    /// The error of the first request or, after a failed first request, of the repetition under way.
    pub(in crate::repository) async fn first<'a, T, E>(
        &self,
        ask: impl Fn() -> BoxFuture<'a, Result<T, E>>,
    ) -> Result<T, E> {
        let begun = Instant::now();
        let mut wait = self.patience();
        let mut first = ask();
        loop {
            if let Ok(answer) = tokio::time::timeout(wait, &mut first).await {
                if answer.is_ok() {
                    self.answered(begun.elapsed());
                }
                return answer;
            }
            wait *= 2;
            let Ok(_one) = self.beside.try_acquire() else {
                continue;
            };
            let mut beside = ask();
            tokio::select! {
                answer = &mut first => match answer {
                    Ok(found) => return Ok(found),
                    Err(_) => return beside.await,
                },
                answer = &mut beside => if answer.is_ok() {
                    return answer;
                },
                () = tokio::time::sleep(wait) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use futures_util::FutureExt;

    use super::*;

    /// Answers each request in turn after so many milliseconds; the last entry holds for all later requests.
    async fn asks(hedge: &Hedge, takes: &[(u64, Result<u8, u8>)]) -> (Result<u8, u8>, usize) {
        let asked = AtomicUsize::new(0);
        let ask = || {
            let number = asked.fetch_add(1, Ordering::Relaxed);
            let (milliseconds, answer) = takes[number.min(takes.len() - 1)];
            let takes = tokio::time::sleep(Duration::from_millis(milliseconds));
            takes.map(move |()| answer).boxed()
        };
        let answer = hedge.first(ask).await;
        (answer, asked.into_inner())
    }

    fn quick() -> Hedge {
        let hedge = Hedge::default();
        hedge.answered(Duration::from_millis(1));
        assert_eq!(hedge.patience(), SOONEST);
        hedge
    }

    const NEVER: u64 = 3_600_000;

    #[tokio::test]
    async fn a_quick_store_is_asked_once_and_a_slow_one_again() {
        let (first, again) = (Ok(1), Ok(2));
        assert_eq!(asks(&quick(), &[(1, first)]).await, (first, 1));
        assert_eq!(
            asks(&quick(), &[(NEVER, first), (1, again)]).await,
            (again, 2)
        );
        // Two answers trickle before the store recovers.
        let takes = [(NEVER, first), (NEVER, first), (1, again)];
        assert_eq!(asks(&quick(), &takes).await, (again, 3));
        // On a slow link the first request still completes.
        assert_eq!(
            asks(&quick(), &[(900, first), (NEVER, again)]).await,
            (first, 2)
        );
    }

    #[tokio::test]
    async fn an_error_beside_is_not_the_answer() {
        let takes = [(800, Ok(1)), (1, Err(2))];
        let (answer, asked) = asks(&quick(), &takes).await;
        assert_eq!((answer, asked), (Ok(1), 2));
        let takes = [(600, Err(1)), (300, Ok(2))];
        assert_eq!(asks(&quick(), &takes).await, (Ok(2), 2));
        assert_eq!(asks(&quick(), &[(1, Err(1))]).await, (Err(1), 1));
    }

    #[test]
    fn patience_follows_what_is_usual_within_bounds() {
        let hedge = Hedge::default();
        assert_eq!(hedge.patience(), LATEST);
        for _ in 0..100 {
            hedge.answered(Duration::from_millis(100));
        }
        let patience = hedge.patience();
        assert!((SOONEST..LATEST).contains(&patience), "{patience:?}");
        hedge.answered(Duration::from_secs(60));
        assert_eq!(hedge.patience(), LATEST);
    }
}
