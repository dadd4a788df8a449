//! How fast a rate rises that has to stay below what strains the guest, which nobody knows.

use crate::controller::governor::tuning::rate_search::{
    CALM_PERIODS, FAR_BELOW_PARTS, FAR_PARTS, FIRST_PARTS, FORGET_PERIODS, NEAR_PARTS,
};

/// What is known of the rates that the guest bore and did not bear.
#[derive(Debug)]
pub(in crate::controller) struct RateSearch {
    /// The rate at which the guest last began to be strained; `None` while nothing has spoken
    /// against a higher one yet.
    strained_at: Option<u64>,
    /// Periods since the last strained one, and the rate when it and those just before it began.
    calm: u32,
    onset: u64,
}

impl RateSearch {
    /// Nothing is known.
    pub(in crate::controller) const fn new() -> Self {
        Self {
            strained_at: None,
            calm: CALM_PERIODS,
            onset: 0,
        }
    }

    /// A period is over in which this rate did or did not strain the guest.
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

    /// This rate goes down: what it was when the guest began to need that is too much. A rate far below
    /// the one that was too much before is more likely to have met a moment in which any would have
    /// been, so what is known goes down by steps.
    pub(in crate::controller) const fn yielded(&mut self, rate: u64) {
        self.period_ends(rate, true);
        self.strained_at = Some(match self.strained_at {
            Some(known) if self.onset < known / 10 * 7 => known / 10 * 7,
            _ => self.onset,
        });
    }

    /// By how much this rate rises in a period with room left: doubling soon while nothing is known,
    /// quickly where the guest was not strained, and slowly near where it was: the faster, the longer
    /// ago that is. While the machine stays the same the guest is strained in about one of a hundred
    /// periods, and what strained it once does not hold copies back for long.
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
        // But what goes on is believed.
        for _ in 0..3 {
            for _ in 0..CALM_PERIODS {
                rate_search.period_ends(100 << 20, false);
            }
            rate_search.yielded(100 << 20);
        }
        assert!(rate_search.rise(100 << 20) < (100 << 20) / 500);
    }
}
