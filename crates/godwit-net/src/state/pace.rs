//! How many packets a guest is given before it has come to those that it has, while its machine moves and for a time
//! after that.
//!
//! A burst of packets that were held while a machine changed hosts fills the guest's ring at once. A guest that answers
//! each out of a bounded buffer loses answers then: Linux has a send buffer for about 170 short answers to pings, and a
//! ring holds 256 packets. A guest offers its buffers again as it comes to the packets in them, in their order, which
//! tells how many it has not come to.

use std::collections::VecDeque;

use godwit_vhost::features::LARGEST_RING;

/// Most packets in the ring that the guest has not come to: well below the 170 answers, and twice what Linux takes at
/// once before it offers buffers again, so that it always has some to take.
pub const MOST_AHEAD: usize = 128;

/// Most packets that can be in a guest's ring: each has a descriptor of its own.
pub const MOST_IN_RING: usize = LARGEST_RING as usize;

/// Packets in the guest's ring that it has not come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Into how many buffers each of them went, in order.
    buffers: VecDeque<u16>,
    /// Buffers of the first that the guest has offered again.
    again: u16,
    /// Buffers that the guest has offered, modulo 65536.
    offered: u16,
    /// The guest does not offer buffers again before it has none.
    lifted: bool,
}

impl Pace {
    /// The pace that was told by [`Self::ahead`] and [`Self::offered_so_far`].
    ///
    /// # Errors
    /// When nothing can have been told so.
    pub fn from_told(buffers: Vec<u16>, offered: u16) -> Option<Self> {
        let fits = buffers.len() <= MOST_IN_RING && !buffers.contains(&0);
        fits.then(|| Self {
            buffers: buffers.into(),
            offered,
            ..Self::default()
        })
    }

    /// Buffers of each packet that the guest has not come to, in order.
    pub fn ahead(&self) -> impl ExactSizeIterator<Item = u16> {
        let first = self.again;
        self.buffers
            .iter()
            .enumerate()
            .map(move |(place, &count)| if place == 0 { count - first } else { count })
    }

    /// Buffers that the guest has offered, modulo 65536.
    pub const fn offered_so_far(&self) -> u16 {
        self.offered
    }

    /// The ring is served from this buffer on, of so many at most: it goes on, or is a new one.
    pub fn starts(&mut self, base: u16, size: u16) {
        self.lifted = false;
        // A driver that starts anew begins with the first buffer.
        if base == 0 || self.offered.wrapping_sub(base) > size {
            self.buffers.clear();
            self.again = 0;
            self.offered = base;
        }
    }

    /// The guest has offered buffers up to this one, modulo 65536.
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

    /// The guest got a packet in so many buffers.
    pub fn given(&mut self, buffers: u16) {
        if self.buffers.len() < MOST_IN_RING && buffers > 0 {
            self.buffers.push_back(buffers);
        }
    }

    /// Whether the guest gets no more before it has come to some of what it has.
    pub fn is_ahead(&self) -> bool {
        !self.lifted && self.buffers.len() >= MOST_AHEAD
    }

    /// The guest has come to what it has and has not offered its buffers again, or has offered nothing for long: it is
    /// given what fits, from now on.
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
        // It has come to more than may be ahead of it, and as many are left.
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
