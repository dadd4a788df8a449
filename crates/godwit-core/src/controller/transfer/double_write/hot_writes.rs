//! Hot places: places written repeatedly while the disk is copied.
//!
//! Most writes of a hot set go to a few places, and each would be a double write made obsolete by the next. Such writes
//! are kept back: until switchover only the source's disk has to survive, so the destination needs only the last write.
//! The destination gets this write as a delayed write (Alg. 3 of the SmartNIC storage-migration paper) when the copy
//! nears its end. The threshold of the hybrid push/prefetch paper does the same with chunks that are written often;
//! here the unit is a place, and the time is before the switchover instead of after.

use crate::controller::transfer::double_write::delayed_table::MAX_SECTORS;
use crate::units::Extent;
use crate::write_table::spread;

/// Writes to a place after which the place is hot.
const COLD_WRITES: u8 = 3;

/// Minimum number of watched places per place that may be kept back.
const WATCHED: usize = 4;

/// A place and its count of writes.
#[derive(Clone, Copy, Debug)]
struct Place {
    extent: Extent,
    writes: u8,
    kept: bool,
}

/// The hot places, and the hot places missing at the destination.
///
/// Each address has one room in a table of fixed size. A write to a taken room lowers the occupant's count by one, and
/// moves in when the count is used up. A place thus keeps its room if its writes outnumber the writes of all other
/// places of the room.
#[derive(Debug)]
pub(in crate::controller) struct HotWrites {
    rooms: Box<[Option<Place>]>,
    most: usize,
    kept: usize,
    kept_bytes: u64,
}

/// Treatment of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Heat {
    /// Sent like any other write.
    Cold,
    /// Kept back; nothing was kept back there before.
    Hot,
    /// Kept back in place of an earlier write.
    Again,
    /// Hot, but the maximum number of places is kept back.
    Full,
}

impl HotWrites {
    /// Creates an empty table that keeps back at most `most` places, none with 0.
    pub(in crate::controller) fn new(most: u16) -> Self {
        let most = usize::from(most);
        let rooms = match most {
            0 => 0,
            most => (most * WATCHED).next_power_of_two(),
        };
        Self {
            rooms: vec![None; rooms].into_boxed_slice(),
            most,
            kept: 0,
            kept_bytes: 0,
        }
    }

    /// Returns the bytes kept back.
    #[inline]
    pub(in crate::controller) const fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// Counts a write. The write is kept back if its place is hot and `may_keep` is true.
    #[inline]
    pub(in crate::controller) fn write(&mut self, extent: Extent, may_keep: bool) -> Heat {
        // Longer writes, which do not fit into one delayed write, are typical of sequential writers.
        if self.rooms.is_empty() || extent.sectors() > MAX_SECTORS {
            return Heat::Cold;
        }
        let room = &mut self.rooms[spread(extent.start().0, self.rooms.len())];
        let place = match room {
            Some(place) if place.extent == extent => place,
            Some(place) if place.kept => return Heat::Cold,
            Some(place) if place.writes > 1 => {
                place.writes -= 1;
                return Heat::Cold;
            }
            _ => {
                *room = Some(Place {
                    extent,
                    writes: 1,
                    kept: false,
                });
                return Heat::Cold;
            }
        };
        if place.kept {
            return Heat::Again;
        }
        if place.writes < COLD_WRITES {
            place.writes += 1;
            return Heat::Cold;
        }
        if !may_keep {
            return Heat::Cold;
        }
        if self.kept == self.most {
            return Heat::Full;
        }
        place.kept = true;
        self.kept += 1;
        self.kept_bytes += extent.bytes();
        Heat::Hot
    }

    /// Hands out all places kept back, and forgets all counts.
    pub(in crate::controller) fn release(&mut self, mut each: impl FnMut(Extent)) {
        if self.kept == 0 {
            return;
        }
        for place in self.rooms.iter_mut().filter_map(Option::take) {
            if place.kept {
                each(place.extent);
            }
        }
        self.kept = 0;
        self.kept_bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::Lba;

    fn place(number: u64) -> Extent {
        Extent::new(Lba(number * 8), 8).expect("an extent")
    }

    fn released(hot: &mut HotWrites) -> Vec<Extent> {
        let mut all = Vec::new();
        hot.release(|extent| all.push(extent));
        all
    }

    #[test]
    fn a_place_is_kept_back_after_three_writes_and_handed_out_once() {
        let mut hot = HotWrites::new(8);
        for _ in 0..3 {
            assert_eq!(hot.write(place(5), true), Heat::Cold);
        }
        assert_eq!(hot.write(place(5), true), Heat::Hot);
        assert_eq!(hot.write(place(5), true), Heat::Again);
        assert_eq!(hot.kept_bytes(), 4096);
        assert_eq!(released(&mut hot), [place(5)]);
        assert_eq!(hot.kept_bytes(), 0);
        assert_eq!(released(&mut hot), []);
    }

    #[test]
    fn it_is_not_before_that_is_allowed() {
        let mut hot = HotWrites::new(8);
        for _ in 0..10 {
            assert_eq!(hot.write(place(5), false), Heat::Cold);
        }
        assert_eq!(hot.write(place(5), true), Heat::Hot);
    }

    #[test]
    fn only_so_many_are_kept_back_and_none_of_no_places() {
        let mut hot = HotWrites::new(2);
        let mut heats = Vec::new();
        for number in 0..200 {
            for _ in 0..4 {
                heats.push(hot.write(place(number), true));
            }
        }
        let count = |heat| heats.iter().filter(|&&found| found == heat).count();
        assert_eq!(count(Heat::Hot), 2);
        assert!(count(Heat::Full) > 0);
        assert_eq!(released(&mut hot).len(), 2);

        let mut none = HotWrites::new(0);
        assert!((0..10).all(|_| none.write(place(1), true) == Heat::Cold));
    }

    #[test]
    fn a_long_write_is_never_kept_back() {
        let mut hot = HotWrites::new(8);
        let long = Extent::new(Lba(0), 129).expect("an extent");
        assert!((0..10).all(|_| hot.write(long, true) == Heat::Cold));
    }

    #[test]
    fn a_place_that_is_hot_stays_in_its_room_beside_many_that_are_not() {
        let mut hot = HotWrites::new(8);
        let mut kept = 0;
        for number in 100..10_000 {
            hot.write(place(number), true);
            kept += usize::from(hot.write(place(5), true) != Heat::Cold);
        }
        assert!(kept > 9_000, "{kept}");
    }

    proptest! {
        /// All places kept back are handed out, and no others.
        #[test]
        fn what_is_kept_back_is_handed_out(writes in prop::collection::vec((0u64..40, any::<bool>()), 0..400)) {
            let mut hot = HotWrites::new(8);
            let mut owed = Vec::new();
            for (number, may_keep) in writes {
                let extent = place(number);
                match hot.write(extent, may_keep) {
                    Heat::Cold | Heat::Full => prop_assert!(!owed.contains(&extent)),
                    Heat::Hot => {
                        prop_assert!(may_keep);
                        owed.push(extent);
                    }
                    Heat::Again => prop_assert!(owed.contains(&extent)),
                }
                prop_assert_eq!(hot.kept_bytes(), owed.len() as u64 * 4096);
            }
            let mut all = released(&mut hot);
            all.sort_by_key(|extent| extent.start());
            owed.sort_by_key(|extent| extent.start());
            prop_assert_eq!(all, owed);
        }
    }
}
