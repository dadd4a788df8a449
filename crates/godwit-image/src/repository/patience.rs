//! Bears it for a while that a store has too much to do, or is away.

use std::time::{Duration, Instant};

use crate::error::RepositoryError;
use crate::repository::Repository;
use crate::repository::progress::Progress;

/// How long a store is asked again for one thing.
const LONGEST: Duration = Duration::from_secs(5 * 60);
/// How long is waited before it is asked again: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

impl Repository {
    /// Whether it helps to ask again: what a directory says of itself, it says again.
    pub(super) const fn bears(&self, error: &RepositoryError) -> bool {
        self.directory.is_none() && error.passes_by_itself()
    }

    /// Does this until it is done, or fails in a way that does not pass by itself.
    ///
    /// # Errors
    /// Those of the work, after some minutes also those that may pass.
    pub(super) async fn patiently<T>(
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
