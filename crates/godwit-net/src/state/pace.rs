//! A limit on unprocessed packets in the guest's ring, used during a move and for a time after the move.
//!
//! A burst of packets held during a move fills the guest's ring at once. A guest with a bounded buffer for answers then
//! loses some: Linux has a send buffer for about 170 short answers to pings, and a ring holds 256 packets. A guest
//! offers buffers again, in order, as the packets in the buffers are processed. The offered buffers thus tell how many
//! packets are unprocessed.

use std::collections::VecDeque;

use godwit_vhost::features::LARGEST_RING;

/// Most unprocessed packets in the guest's ring. The limit is well below the 170 answers, and twice the number
/// processed by Linux before buffers are offered again, so the guest always has packets to process.
pub const MOST_AHEAD: usize = 128;

/// Most packets in a guest's ring: each takes a descriptor.
pub const MOST_IN_RING: usize = LARGEST_RING as usize;

/// Unprocessed packets in the guest's ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Number of buffers of each packet, in order.
    buffers: VecDeque<u16>,
    /// Buffers of the first packet already offered again.
    again: u16,
    /// Buffers offered by the guest, modulo 65536.
    offered: u16,
    /// True if the guest offers no buffers again before having run out.
    lifted: bool,
}

impl Pace {
    /// Restores the pace from the values of [`Self::ahead`] and [`Self::offered_so_far`].
    ///
    /// # Errors
    /// Returns `None` for values that no pace can have.
    pub fn from_told(buffers: Vec<u16>, offered: u16) -> Option<Self> {
        let fits = buffers.len() <= MOST_IN_RING && !buffers.contains(&0);
        fits.then(|| Self {
            buffers: buffers.into(),
            offered,
            ..Self::default()
        })
    }

    /// Returns the number of buffers of each unprocessed packet, in order.
    pub fn ahead(&self) -> impl ExactSizeIterator<Item = u16> {
        let first = self.again;
        self.buffers
            .iter()
            .enumerate()
            .map(move |(place, &count)| if place == 0 { count - first } else { count })
    }

    /// Returns the number of buffers offered by the guest, modulo 65536.
    pub const fn offered_so_far(&self) -> u16 {
        self.offered
    }

    /// Starts to serve the ring at buffer `base`. Depending on `base`, the ring of `size` descriptors continues or is
    /// new.
    pub fn starts(&mut self, base: u16, size: u16) {
        self.lifted = false;
        // A new driver begins with the first buffer.
        if base == 0 || self.offered.wrapping_sub(base) > size {
            self.buffers.clear();
            self.again = 0;
            self.offered = base;
        }
    }

    /// Records the guest's offer of buffers up to `available`, modulo 65536.
    pub fn offered(&mut self, available: u16) {
        let mut more = available.wrapping_sub(self.offered);
        self.offered = available;
        while let Some(first) = self.buffers.front() {
            let missing = first - self.again;
            if more < missing {
                self.again += more;
                return;
            }
            more -= missing;
            self.again = 0;
            self.buffers.pop_front();
        }
    }

    /// Records a packet given to the guest in this many buffers.
    pub fn given(&mut self, buffers: u16) {
        if self.buffers.len() < MOST_IN_RING && buffers > 0 {
            self.buffers.push_back(buffers);
        }
    }

    /// Returns true if the guest must process some packets before getting more.
    pub fn is_ahead(&self) -> bool {
        !self.lifted && self.buffers.len() >= MOST_AHEAD
    }

    /// Lifts the limit: the guest has processed its packets without offering their buffers again, or has offered
    /// nothing for long.
    pub const fn lift(&mut self) {
        self.lifted = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> Pace {
        let mut pace = Pace::default();
        pace.starts(0, 256);
        pace.offered(256);
        for _ in 0..MOST_AHEAD {
            assert!(!pace.is_ahead());
            pace.given(1);
        }
        assert!(pace.is_ahead());
        pace
    }

    #[test]
    fn a_guest_gets_more_as_it_comes_to_what_it_has() {
        let mut pace = full();
        pace.offered(256);
        assert!(pace.is_ahead());
        pace.offered(257);
        assert!(!pace.is_ahead());
        pace.given(3);
        pace.offered(256 + MOST_AHEAD as u16 + 2);
        assert_eq!(pace.ahead().collect::<Vec<_>>(), [1], "its last buffer");
    }

    #[test]
    fn a_ring_that_goes_on_elsewhere_keeps_its_pace_and_a_new_one_has_none() {
        let pace = full();
        let told = Pace::from_told(pace.ahead().collect(), pace.offered_so_far());
        let mut elsewhere = told.expect("was told");
        elsewhere.starts(128, 256);
        assert!(elsewhere.is_ahead());
        elsewhere.offered(257);
        assert!(!elsewhere.is_ahead());
        for base in [0, 7000] {
            let mut anew = full();
            anew.starts(base, 256);
            assert_eq!(anew.ahead().len(), 0, "{base}");
        }
    }

    #[test]
    fn a_guest_that_offers_late_is_given_what_fits() {
        let mut pace = full();
        pace.lift();
        assert!(!pace.is_ahead());
        pace.given(1);
        assert_eq!(pace.ahead().len(), MOST_AHEAD + 1);
        for _ in 0..2 * MOST_IN_RING {
            pace.given(1);
        }
        assert_eq!(pace.ahead().len(), MOST_IN_RING, "no more can be there");
    }

    #[test]
    fn what_a_guest_got_without_a_pace_counts_when_it_has_one() {
        let mut pace = Pace::default();
        pace.starts(0, 256);
        pace.offered(256);
        for _ in 0..256 {
            pace.given(1);
        }
        // The guest has processed more packets than the limit, and as many are left.
        let come_to = MOST_AHEAD as u16;
        pace.offered(256 + come_to);
        assert!(pace.is_ahead());
        pace.offered(256 + come_to + 1);
        assert!(!pace.is_ahead());
    }

    #[test]
    fn nothing_is_believed_that_cannot_be() {
        assert_eq!(Pace::from_told(vec![1; MOST_IN_RING + 1], 0), None);
        assert_eq!(Pace::from_told(vec![0], 0), None);
    }
}
