//! Quantities with their units, so that a sector number is never taken for a byte count.

use core::fmt;

/// Bytes in a sector, the unit of addressing: every guest request is a whole number of sectors.
pub const SECTOR_SIZE: u64 = 512;

/// Longest extent of a request: 32 MiB, the largest payload the NBD protocol expects every server to take.
pub const MAX_EXTENT_SECTORS: u32 = (32 << 20) / SECTOR_SIZE as u32;

/// The address of a sector, counted in sectors from the start of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lba(pub u64);

impl Lba {
    /// Returns the byte offset of this sector from the start of the disk.
    #[inline]
    pub const fn byte_offset(self) -> u64 {
        self.0 * SECTOR_SIZE
    }
}

impl fmt::Display for Lba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sector {}", self.0)
    }
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Returns the number of whole sectors, or `None` if the count is not a multiple of 512.
    pub const fn sectors(self) -> Option<u64> {
        if self.0.is_multiple_of(SECTOR_SIZE) {
            Some(self.0 / SECTOR_SIZE)
        } else {
            None
        }
    }
}

/// For people: `20 GiB`, `1.5 GiB`, and `953 MiB (1000000000 bytes)` if the short form is not exact.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let bytes = self.0;
        let Some(power) = bytes
            .checked_ilog2()
            .map(|bits| bits / 10)
            .filter(|p| *p > 0)
        else {
            let plural = if bytes == 1 { "" } else { "s" };
            return write!(f, "{bytes} byte{plural}");
        };
        let unit = 1_u128 << (10 * power);
        let scaled = u128::from(bytes) * 100;
        let name = UNITS[power as usize - 1];
        match (scaled.is_multiple_of(unit), scaled / unit) {
            (true, whole) if whole.is_multiple_of(100) => write!(f, "{} {name}", whole / 100),
            (true, tenths) if tenths.is_multiple_of(10) => {
                write!(f, "{}.{} {name}", tenths / 100, tenths / 10 % 10)
            }
            (true, exact) => write!(f, "{}.{:02} {name}", exact / 100, exact % 100),
            (false, less) if less < 1_000 => {
                write!(f, "{}.{:02} {name} ({bytes} bytes)", less / 100, less % 100)
            }
            (false, less) => write!(f, "{} {name} ({bytes} bytes)", less / 100),
        }
    }
}

/// A non-empty run of sectors.
///
/// The end never overflows: [`Extent::new`], the only constructor, refuses such runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    start: Lba,
    sectors: u32,
}

impl Extent {
    /// Creates a run of `sectors` sectors from `start`. Returns `None` if the run is empty, longer than
    /// [`MAX_EXTENT_SECTORS`], or has an end that cannot be expressed in bytes.
    #[inline]
    pub const fn new(start: Lba, sectors: u32) -> Option<Self> {
        if sectors == 0 || sectors > MAX_EXTENT_SECTORS || start.0 > (1 << 54) {
            return None;
        }
        Some(Self { start, sectors })
    }

    /// Creates the extent of `length` bytes from `offset`. Returns `None` if either is not a multiple of 512 or
    /// [`Extent::new`] would refuse the run.
    pub const fn from_bytes(offset: u64, length: u32) -> Option<Self> {
        if !offset.is_multiple_of(SECTOR_SIZE) || !(length as u64).is_multiple_of(SECTOR_SIZE) {
            return None;
        }
        Self::new(Lba(offset / SECTOR_SIZE), length / SECTOR_SIZE as u32)
    }

    /// Returns the first sector.
    #[inline]
    pub const fn start(self) -> Lba {
        self.start
    }

    /// Returns the first sector past the run.
    #[inline]
    pub const fn end(self) -> Lba {
        Lba(self.start.0 + self.sectors as u64)
    }

    /// Returns the number of sectors, at least one.
    #[inline]
    pub const fn sectors(self) -> u32 {
        self.sectors
    }

    /// Returns the length in bytes.
    #[inline]
    pub const fn bytes(self) -> u64 {
        self.sectors as u64 * SECTOR_SIZE
    }

    /// Returns true if the two runs share a sector.
    #[inline]
    pub const fn overlaps(self, other: Self) -> bool {
        self.start.0 < other.end().0 && other.start.0 < self.end().0
    }

    /// Returns true if the run lies within a disk of `capacity` sectors.
    #[inline]
    pub const fn within(self, capacity: Sectors) -> bool {
        self.end().0 <= capacity.0
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sectors {}..{}", self.start.0, self.end().0)
    }
}

/// A number of sectors, such as a disk's capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sectors(pub u64);

impl Sectors {
    /// Returns the same length in bytes.
    pub const fn bytes(self) -> Bytes {
        Bytes(self.0 * SECTOR_SIZE)
    }
}

/// Counts a disk's owners. Every switchover adds one; at most one node serves a disk in any epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

impl Epoch {
    /// Returns the epoch after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Counts the times a migration's locking window was given up (by a pause or a retry). A frame of an older generation
/// must not reach the destination's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u32);

/// Identifies a migration attempt for ever: chosen at random by the source's node, never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MigrationId(pub [u8; 16]);

/// Distinguishes a disk from others with the same name on any node: chosen at random at the disk's creation, never
/// changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskId(pub [u8; 16]);

/// Identifies the protection of a machine for ever: chosen at random, never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProtectionId(pub [u8; 16]);

macro_rules! in_hexadecimal {
    ($($id:ident),*) => {$(
        impl fmt::Display for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl core::str::FromStr for $id {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let digits = text.as_bytes();
                if digits.len() != 32 || !digits.iter().all(u8::is_ascii_hexdigit) {
                    return Err(InvalidId);
                }
                let mut id = [0; 16];
                for (byte, pair) in id.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
                    let pair = core::str::from_utf8(pair).map_err(|_| InvalidId)?;
                    *byte = u8::from_str_radix(pair, 16).map_err(|_| InvalidId)?;
                }
                Ok(Self(id))
            }
        }
    )*};
}

in_hexadecimal!(MigrationId, DiskId, ProtectionId);

/// Error: the text is not an id of 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an id is 32 hexadecimal digits")]
pub struct InvalidId;

/// A point in time: nanoseconds since an origin that the caller chooses once per controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// Returns the time `duration` later, or the last representable time.
    #[must_use]
    pub const fn after(self, duration: core::time::Duration) -> Self {
        let nanoseconds = duration.as_nanos();
        if nanoseconds > u64::MAX as u128 {
            return Self(u64::MAX);
        }
        Self(self.0.saturating_add(nanoseconds as u64))
    }

    /// Returns the time passed since `earlier`; zero if `earlier` is later.
    pub const fn since(self, earlier: Self) -> core::time::Duration {
        core::time::Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

#[cfg(test)]
mod tests {
    use core::time::Duration;

    use super::*;

    #[test]
    fn bytes_are_told_for_people_and_exactly() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1, "1 byte"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (1280, "1.25 KiB"),
            (1000, "1000 bytes"),
            (1025, "1.00 KiB (1025 bytes)"),
            (20 << 30, "20 GiB"),
            (1_000_000_000, "953 MiB (1000000000 bytes)"),
            (1000 << 40, "1000 TiB"),
            (u64::MAX, "15 EiB (18446744073709551615 bytes)"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn a_time_too_far_away_is_the_last_one() {
        let now = Time(7);
        assert_eq!(now.after(Duration::from_nanos(3)), Time(10));
        // 2^64 nanoseconds are 18,446,744,073.7 seconds.
        assert_eq!(
            now.after(Duration::from_secs(18_446_744_074)),
            Time(u64::MAX)
        );
        assert_eq!(now.after(Duration::MAX), Time(u64::MAX));
    }
}
