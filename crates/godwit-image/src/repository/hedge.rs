//! Asks a slow store once more beside: an answer may trickle, or never come, while the store would answer another request
//! at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::sync::Semaphore;

/// Requests beside others at once: a store that is slow because it has much to do is not to get twice as much.
const BESIDE: usize = 8;
/// How many times as long as usual an answer may take before another is asked for.
const TIMES: u32 = 8;
/// The bounds of that.
const SOONEST: Duration = Duration::from_millis(500);
const LATEST: Duration = Duration::from_secs(2);

/// How long answers take, and how many requests are repeated at once.
#[derive(Debug)]
pub(super) struct Hedge {
    /// The average of late, in microseconds; 0 as long as there is none.
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
    /// How long an answer may take before another is asked for.
    fn patience(&self) -> Duration {
        match self.usual.load(Ordering::Relaxed) {
            0 => LATEST,
            usual => (TIMES * Duration::from_micros(usual)).clamp(SOONEST, LATEST),
        }
    }

    fn answered(&self, took: Duration) {
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        // An update that is lost to another is of no account.
        let usual = match self.usual.load(Ordering::Relaxed) {
            0 => took,
            usual => usual - usual / 8 + took / 8,
        };
        self.usual.store(usual, Ordering::Relaxed);
    }

    /// The first whole answer. When one is late another is asked for beside it; when that is late, too, it is given up for a
    /// third, after twice the time, and so on. The first is never given up: on a slow link it may be the one that ends.
    ///
    /// # Errors
    /// What the first request ended with, or the one that is beside it then.
    pub(super) async fn first<'a, T, E>(
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

    /// Takes so many milliseconds for each request in turn, and the last for all after it.
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
        // Two that trickle, as the store does not recover before.
        let takes = [(NEVER, first), (NEVER, first), (1, again)];
        assert_eq!(asks(&quick(), &takes).await, (again, 3));
        // On a slow link the first ends all the same.
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
