//! The time of a push: the second from which a name stands for an image.

use std::fmt;
use std::str::FromStr;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A second in UTC in the catalog's form, `2025-01-31T12:00:00Z`. The later of two times is the greater, as far as the
/// hosts' clocks tell them apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PushTime([u8; Self::LENGTH]);

impl PushTime {
    /// Bytes of the text.
    pub const LENGTH: usize = 20;

    /// Returns the second of a time; none beyond the year 9999.
    pub fn at(time: std::time::SystemTime) -> Option<Self> {
        let second = OffsetDateTime::from(time).replace_nanosecond(0).ok()?;
        second.format(&Rfc3339).ok()?.parse().ok()
    }

    /// The text as bytes.
    pub const fn as_bytes(&self) -> &[u8; Self::LENGTH] {
        &self.0
    }

    /// Reads a text of the right form. A date that does not exist is accepted too.
    pub fn from_bytes(bytes: &[u8; Self::LENGTH]) -> Option<Self> {
        let like = b"0000-00-00T00:00:00Z";
        let fits = |(byte, like): (&u8, &u8)| match like {
            b'0' => byte.is_ascii_digit(),
            _ => byte == like,
        };
        bytes.iter().zip(like).all(fits).then_some(Self(*bytes))
    }
}

impl FromStr for PushTime {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let bytes = text.as_bytes().try_into().map_err(|_| ())?;
        Self::from_bytes(bytes).ok_or(())
    }
}

impl fmt::Display for PushTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.0).unwrap_or_default())
    }
}

impl fmt::Debug for PushTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_read_as_they_are_written_and_nothing_else_is() {
        let text = "2025-01-31T12:00:00Z";
        let time: PushTime = text.parse().expect("a second");
        assert_eq!(time.to_string(), text);
        let later = "2025-01-31T12:00:01Z".parse().expect("a second");
        assert!(time < later);
        let day = std::time::Duration::from_secs(24 * 60 * 60);
        let second = PushTime::at(std::time::UNIX_EPOCH + day).expect("a second");
        assert_eq!(second.to_string(), "1970-01-02T00:00:00Z");
        for wrong in [
            "",
            "2025-01-31T12:00:00",
            "2025-01-31T12:00:00.5Z",
            "2025-01-31 12:00:00Z",
            "2025-01-31T12:00:0xZ",
            "+025-01-31T12:00:00Z",
        ] {
            assert_eq!(wrong.parse::<PushTime>(), Err(()), "{wrong}");
        }
    }
}
