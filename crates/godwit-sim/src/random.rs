//! Random numbers from a seed (SplitMix64): the same seed gives the same run.

#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Returns the numbers of one part of a run. Separate streams keep a removed fault or request from changing the
    /// draws of other parts.
    pub(crate) fn stream(seed: u64, part: u64) -> Self {
        let mut random = Self(seed ^ part.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        random.next();
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Returns a number from `low` to below `high`.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// Returns true with a probability of `times` in a thousand.
    pub(crate) fn permille(&mut self, times: u64) -> bool {
        self.below(1000) < times
    }

    /// Returns a number from 0 to below 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number from `low` to `high`, with equal probability for every order of magnitude.
    pub(crate) fn magnitude(&mut self, low: u64, high: u64) -> u64 {
        let ratio = high as f64 / low as f64;
        (low as f64 * ratio.powf(self.fraction())) as u64
    }

    /// Returns a number below `limit`: some often, others seldom: the probability falls with the rank.
    pub(crate) fn skewed(&mut self, limit: u64) -> u64 {
        let rank = (limit as f64).powf(self.fraction()) as u64 - 1;
        rank.wrapping_mul(2_654_435_761) % limit
    }

    /// Returns an exponentially distributed number.
    pub(crate) fn exponential(&mut self, mean: u64) -> u64 {
        (-(1.0 - self.fraction()).ln() * mean as f64) as u64
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}
