//! The rise of a rate below an unknown limit, the rate at which the guest is strained.

use crate::controller::governor::tuning::rate_search::{
    CALM_PERIODS, FAR_BELOW_PARTS, FAR_PARTS, FIRST_PARTS, FORGET_PERIODS, NEAR_PARTS,
};

/// Rates that the guest bore and did not bear.
#[derive(Debug)]
pub(in crate::controller) struct RateSearch {
    /// Rate at which the last strain of the guest began; `None` while nothing speaks against a higher rate.
    strained_at: Option<u64>,
    /// Periods since the last strained period, and the rate at the onset of the latest run of strained periods.
    calm: u32,
    onset: u64,
}

impl RateSearch {
    /// Starts without knowledge.
    pub(in crate::controller) const fn new() -> Self {
        Self {
            strained_at: None,
            calm: CALM_PERIODS,
            onset: 0,
        }
    }

    /// Ends a period in which this rate did or did not strain the guest.
    pub(in crate::controller) const fn period_ends(&mut self, rate: u64, strained: bool) {
        if !strained {
            self.calm = self.calm.saturating_add(1);
            return;
        }
        if self.calm >= CALM_PERIODS {
            self.onset = rate;
        }
        self.calm = 0;
    }

    /// Notes that this rate goes down: the rate at the onset of the strain was too high. A rate far below the last
    /// known limit has more likely met a moment in which any rate would have strained the guest, so the limit goes down
    /// by steps.
    pub(in crate::controller) const fn yielded(&mut self, rate: u64) {
        self.period_ends(rate, true);
        self.strained_at = Some(match self.strained_at {
            Some(known) if self.onset < known / 10 * 7 => known / 10 * 7,
            _ => self.onset,
        });
    }

    /// Returns the rise of this rate in a period with room left. Without knowledge the rate doubles soon. Far from the
    /// known limit the rate rises quickly. Near the limit the rate rises slowly, and the faster the longer ago the
    /// strain is. On an unchanged machine about one period in a hundred strains the guest, so a single strain does not
    /// hold copies back for long.
    pub(in crate::controller) fn rise(&self, rate: u64) -> u64 {
        let part = match self.strained_at {
            None => FIRST_PARTS,
            Some(known) if rate < known / 2 => FAR_BELOW_PARTS,
            Some(known) if rate < known / 20 * 17 || rate > known / 4 * 5 => FAR_PARTS,
            Some(_) => {
                (NEAR_PARTS >> (self.calm / FORGET_PERIODS).min(NEAR_PARTS.ilog2())).max(FAR_PARTS)
            }
        };
        rate / part + (64 << 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_of_many_periods_is_held_against_the_rate_at_which_it_began() {
        let mut rate_search = RateSearch::new();
        rate_search.period_ends(100 << 20, true);
        for rate in [70 << 20, 49 << 20, 34 << 20] {
            rate_search.yielded(rate);
            rate_search.period_ends(rate, true);
        }
        let far = rate_search.rise(34 << 20);
        assert!(far > (34 << 20) / 80, "{far}");
        let near = rate_search.rise(90 << 20);
        assert!(near < (90 << 20) / 500, "{near}");
        for _ in 0..FORGET_PERIODS * 4 {
            rate_search.period_ends(90 << 20, false);
        }
        let later = rate_search.rise(90 << 20);
        assert!(later > (90 << 20) / 80, "{later}: it is long ago");
    }

    #[test]
    fn a_guest_that_is_strained_far_below_the_rate_that_it_bore_does_not_keep_copies_there() {
        let mut rate_search = RateSearch::new();
        rate_search.yielded(400 << 20);
        for _ in 0..CALM_PERIODS {
            rate_search.period_ends(100 << 20, false);
        }
        rate_search.yielded(100 << 20);
        assert!(rate_search.rise(100 << 20) >= (100 << 20) / FAR_BELOW_PARTS);
        // But a lasting strain is believed.
        for _ in 0..3 {
            for _ in 0..CALM_PERIODS {
                rate_search.period_ends(100 << 20, false);
            }
            rate_search.yielded(100 << 20);
        }
        assert!(rate_search.rise(100 << 20) < (100 << 20) / 500);
    }
}
