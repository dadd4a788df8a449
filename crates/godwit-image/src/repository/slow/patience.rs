//! Retries while a store is overloaded or down.

use std::time::{Duration, Instant};

use crate::error::RepositoryError;
use crate::repository::Repository;
use crate::repository::progress::Progress;

/// Longest time for the retries of one operation.
const LONGEST: Duration = Duration::from_secs(5 * 60);
/// Pause before a retry: the first and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

impl Repository {
    /// Returns true if a retry may help. A directory repeats its errors.
    pub(in crate::repository) const fn bears(&self, error: &RepositoryError) -> bool {
        self.directory.is_none() && error.passes_by_itself()
    }

    /// Repeats the work until success or an error that does not pass by itself.
    ///
    /// # Errors
    /// Errors of the work; after five minutes also errors that may pass.
    pub(in crate::repository) async fn patiently<T>(
        &self,
        progress: &Progress,
        work: impl AsyncFn() -> Result<T, RepositoryError>,
    ) -> Result<T, RepositoryError> {
        let (begun, (mut pause, most)) = (Instant::now(), PAUSES);
        loop {
            let done = work().await;
            let passes = match &done {
                Err(error) if self.bears(error) => error,
                _ => {
                    progress.goes_on();
                    return done;
                }
            };
            if begun.elapsed() + pause > LONGEST {
                return done;
            }
            progress.waits_for(passes);
            tokio::time::sleep(pause).await;
            pause = most.min(2 * pause);
        }
    }
}
