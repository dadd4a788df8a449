//! Keeps copies within a bandwidth budget after double writes have drawn from the budget.

use core::time::Duration;

use crate::controller::governor::tuning::token_bucket::BURST;
use crate::units::Time;

/// A token bucket that may go into debt: double writes are never held back, copies wait until the debt is paid.
#[derive(Debug)]
pub(in crate::controller) struct TokenBucket {
    bytes_per_second: u64,
    /// Bytes that may be sent now; negative while in debt.
    tokens: i64,
    refilled: Time,
}

impl TokenBucket {
    pub(in crate::controller) fn new(bytes_per_second: u64, now: Time) -> Self {
        Self {
            bytes_per_second: bytes_per_second.max(1),
            tokens: 0,
            refilled: now,
        }
    }

    /// Changes the rate from now on.
    pub(in crate::controller) fn set_rate(&mut self, bytes_per_second: u64) {
        self.bytes_per_second = bytes_per_second.max(1);
    }

    /// Draws from the budget, into debt if necessary.
    pub(in crate::controller) fn spend(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_sub_unsigned(bytes);
    }

    /// Returns unneeded bytes to the budget.
    pub(in crate::controller) fn give_back(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_add_unsigned(bytes);
    }

    /// Succeeds if a copy may be sent; otherwise returns the time of the next attempt.
    pub(in crate::controller) fn ready(&mut self, now: Time) -> Result<(), Time> {
        let elapsed = now.since(self.refilled).as_nanos();
        let earned = elapsed * u128::from(self.bytes_per_second) / 1_000_000_000;
        if earned > 0 {
            let burst =
                (BURST.as_nanos() * u128::from(self.bytes_per_second) / 1_000_000_000) as i64;
            let earned = i64::try_from(earned).unwrap_or(i64::MAX);
            self.tokens = self.tokens.saturating_add(earned).min(burst.max(1));
            self.refilled = now;
        }
        if self.tokens > 0 {
            return Ok(());
        }
        let wait = u128::from(self.tokens.unsigned_abs() + 1) * 1_000_000_000
            / u128::from(self.bytes_per_second);
        Err(now.after(Duration::from_nanos(
            u64::try_from(wait).unwrap_or(u64::MAX).max(50_000),
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_keep_the_rate_and_pay_for_double_writes() {
        let mut now = Time(0);
        let mut token_bucket = TokenBucket::new(10_000_000, now);
        let mut copied = 0;
        while now < Time(1_000_000_000) {
            match token_bucket.ready(now) {
                Ok(()) => {
                    token_bucket.spend(100_000);
                    copied += 100_000;
                }
                Err(next) => {
                    assert!(next > now);
                    token_bucket.spend(next.since(now).as_nanos() as u64 / 250);
                    now = next;
                }
            }
        }
        // 4 of the 10 MB/s went to double writes.
        assert!((5_800_000..=6_300_000).contains(&copied), "{copied}");
    }
}
