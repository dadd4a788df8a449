//! Minimum round-trip time to the destination, without queueing.

use core::time::Duration;

use crate::units::Time;

/// Time after which an older minimum is forgotten, once as much time has passed again: a path may change.
const MEMORY: Duration = Duration::from_secs(5);

/// Minimum time of an acknowledgement within [`MEMORY`], and up to as long before.
#[derive(Debug)]
pub(in crate::controller) struct MinRtt {
    since: Time,
    now: Option<Duration>,
    before: Option<Duration>,
}

impl MinRtt {
    pub(in crate::controller) const fn new(now: Time) -> Self {
        Self {
            since: now,
            now: None,
            before: None,
        }
    }

    /// Notes an acknowledgement that took `took`.
    #[inline]
    pub(in crate::controller) fn acknowledged(&mut self, now: Time, took: Duration) {
        if now.since(self.since) >= MEMORY {
            self.since = now;
            self.before = self.now.take();
        }
        self.now = Some(self.now.map_or(took, |least| least.min(took)));
    }

    /// Returns the minimum; zero before the first acknowledgement.
    #[inline]
    pub(in crate::controller) fn least(&self) -> Duration {
        let both = [self.now, self.before].into_iter().flatten();
        both.min().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    #[test]
    fn the_least_counts_until_the_path_has_long_been_another() {
        let mut min_rtt = MinRtt::new(Time(0));
        assert_eq!(min_rtt.least(), Duration::ZERO, "nothing is known");
        let mut now = Time(0);
        min_rtt.acknowledged(now, 7 * MILLISECOND);
        min_rtt.acknowledged(now, 3 * MILLISECOND);
        min_rtt.acknowledged(now, 9 * MILLISECOND);
        assert_eq!(min_rtt.least(), 3 * MILLISECOND);
        now = now.after(MEMORY);
        min_rtt.acknowledged(now, 40 * MILLISECOND);
        assert_eq!(min_rtt.least(), 3 * MILLISECOND, "it may be a queue");
        now = now.after(MEMORY);
        min_rtt.acknowledged(now, 40 * MILLISECOND);
        assert_eq!(min_rtt.least(), 40 * MILLISECOND, "it is the path");
    }
}
