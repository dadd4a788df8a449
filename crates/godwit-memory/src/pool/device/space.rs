//! The place of the next segment in a device.

/// A part of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Extent {
    /// Returns the offset after the last byte.
    pub const fn end(self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }

    /// Returns true if both parts share a byte.
    pub const fn overlaps(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }

    /// Returns true if this part contains all of the other.
    pub const fn has(self, other: Self) -> bool {
        self.offset <= other.offset && other.end() <= self.end()
    }
}

/// The free space when no place is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// Free bytes.
    pub free: u64,
    /// Bytes of the largest free piece.
    pub largest: u64,
}

/// Returns the parts of `all` outside of `used`, in order. The used parts may overlap, and may have odd sizes.
fn gaps(all: Extent, used: &[Extent]) -> Vec<Extent> {
    let mut used: Vec<Extent> = used.to_vec();
    used.sort_by_key(|extent| extent.offset);
    let (mut from, mut gaps) = (all.offset, Vec::new());
    // An empty part at the end closes the last gap.
    used.push(Extent {
        offset: all.end(),
        bytes: 0,
    });
    for extent in used {
        let until = extent.offset.min(all.end());
        if until > from {
            gaps.push(Extent {
                offset: from,
                bytes: until - from,
            });
        }
        from = from.max(extent.end());
    }
    gaps
}

/// Returns the free bytes of `all`.
pub fn free(all: Extent, used: &[Extent]) -> u64 {
    gaps(all, used).iter().map(|gap| gap.bytes).sum()
}

/// Places `bytes` bytes into the smallest sufficient gap, so that large gaps stay whole. All sizes and offsets are
/// multiples of the device's alignment.
///
/// # Errors
/// [`NoRoom`].
pub fn place(all: Extent, used: &[Extent], bytes: u64) -> Result<Extent, NoRoom> {
    let gaps = gaps(all, used);
    let fits = gaps.iter().filter(|gap| gap.bytes >= bytes);
    match fits.min_by_key(|gap| gap.bytes) {
        Some(gap) => Ok(Extent {
            offset: gap.offset,
            bytes,
        }),
        None => Err(NoRoom {
            free: gaps.iter().map(|gap| gap.bytes).sum(),
            largest: gaps.iter().map(|gap| gap.bytes).max().unwrap_or(0),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: u64, bytes: u64) -> Extent {
        Extent { offset, bytes }
    }

    #[test]
    fn the_smallest_piece_that_fits_is_taken() {
        let all = at(10, 90);
        assert_eq!(place(all, &[], 90), Ok(at(10, 90)));
        let used = [at(40, 10), at(10, 5), at(70, 20)];
        // Free: 15-40, 50-70, 90-100.
        assert_eq!(place(all, &used, 10), Ok(at(90, 10)));
        assert_eq!(place(all, &used, 11), Ok(at(50, 11)));
        assert_eq!(place(all, &used, 25), Ok(at(15, 25)));
        let full = place(all, &used, 26);
        assert_eq!(
            full,
            Err(NoRoom {
                free: 55,
                largest: 25
            })
        );
        assert_eq!(free(all, &used), 55);
    }

    #[test]
    fn what_is_used_twice_or_elsewhere_is_never_given() {
        let all = at(10, 90);
        let used = [
            at(0, 12),
            at(20, 30),
            at(30, 5),
            at(95, 1000),
            at(2000, u64::MAX),
        ];
        let mut used = used.to_vec();
        while let Ok(found) = place(all, &used, 3) {
            assert!(all.has(found) && !used.iter().any(|other| other.overlaps(found)));
            used.push(found);
        }
        assert!(free(all, &used) < 3 * 3);
        assert_eq!(
            place(all, &[at(0, u64::MAX)], 1),
            Err(NoRoom {
                free: 0,
                largest: 0
            })
        );
    }
}
