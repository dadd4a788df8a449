//! The recent rates of a migration and its guest, for a review of the policy.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use godwit_core::auto::Pace;

/// Length of the window.
const PERIOD: Duration = Duration::from_secs(10);

/// Totals at one time.
#[derive(Clone, Copy, Debug)]
pub(in crate::migrations) struct Sent {
    pub(in crate::migrations) at: Instant,
    /// Bytes copied, as far as they are on the disk.
    pub(in crate::migrations) copies: u64,
    /// Bytes of double writes.
    pub(in crate::migrations) doubled: u64,
    /// Bytes written by the guest, wherever they went.
    pub(in crate::migrations) written: u64,
}

/// The totals of the last ten seconds.
#[derive(Debug, Default)]
pub(in crate::migrations) struct LatelySent(VecDeque<Sent>);

impl LatelySent {
    pub(in crate::migrations) fn add(&mut self, sent: Sent) {
        let all = &mut self.0;
        all.push_back(sent);
        while all.len() > 2 && all.get(1).is_some_and(|it| sent.at - it.at >= PERIOD) {
            all.pop_front();
        }
    }

    /// Returns the pace of a migration with `data` bytes to copy in total and `in_pass` bytes left of its pass.
    /// All-zero data is passed and not copied.
    pub(in crate::migrations) fn pace(&self, data: u64, in_pass: u64) -> Option<Pace> {
        let (first, last) = (self.0.front()?, self.0.back()?);
        let measured = last.at - first.at;
        let rate = |of: fn(&Sent) -> u64| {
            of(last).saturating_sub(of(first)) as f64 / measured.as_secs_f64()
        };
        (!measured.is_zero()).then(|| Pace {
            measured,
            left: data.saturating_sub(last.copies).min(in_pass),
            copied: last.copies,
            copies: rate(|it| it.copies),
            doubled: rate(|it| it.doubled),
            written: rate(|it| it.written),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_that_of_the_last_ten_seconds() {
        let start = Instant::now();
        let mut lately = LatelySent::default();
        assert_eq!(lately.pace(1000, 1000), None);
        for second in 0..=20 {
            lately.add(Sent {
                at: start + Duration::from_secs(second),
                // Twice as fast in the last ten.
                copies: second + second.saturating_sub(10),
                doubled: 3 * second,
                written: 5 * second,
            });
        }
        let pace = lately.pace(1000, 1000).expect("there is one");
        assert_eq!(pace.measured, PERIOD);
        assert_eq!((pace.copied, pace.left), (30, 970));
        assert_eq!([pace.copies, pace.doubled, pace.written], [2.0, 3.0, 5.0]);
        let left = |data, in_pass| lately.pace(data, in_pass).map(|pace| pace.left);
        assert_eq!(left(10, 1000), Some(0));
        assert_eq!(left(1000, 7), Some(7));
    }
}
