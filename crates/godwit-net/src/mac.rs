//! MAC addresses.

use std::fmt;
use std::str::FromStr;

/// The address of a NIC: six bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

/// The reason why a text is not the address of a NIC.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MacError {
    /// The text is not six pairs of hexadecimal digits.
    #[error(
        "{0:?} is no MAC address, which is six pairs of hexadecimal digits such as 52:54:00:12:34:56"
    )]
    Form(String),
    /// The address is a group's, or zero.
    #[error("{0} is the address of a group or of nobody, not of a NIC")]
    Group(Mac),
}

impl Mac {
    /// The zero address, which no station has.
    pub const NOBODY: Self = Self([0; 6]);

    /// The broadcast address.
    pub const ALL: Self = Self([0xff; 6]);

    /// Returns true if the address is a multicast or broadcast address.
    pub const fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for Mac {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Self, MacError> {
        let wrong = || MacError::Form(text.chars().take(40).collect());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2);
            let digits = part.filter(|part| part.bytes().all(|digit| digit.is_ascii_hexdigit()));
            *byte = u8::from_str_radix(digits.ok_or_else(wrong)?, 16).map_err(|_| wrong())?;
        }
        if parts.next().is_some() {
            return Err(wrong());
        }
        let mac = Self(bytes);
        if mac.is_group() || mac == Self::NOBODY {
            return Err(MacError::Group(mac));
        }
        Ok(mac)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        let mac: Mac = "52:54:00:aB:cd:0f".parse().expect("an address");
        assert_eq!(mac.to_string(), "52:54:00:ab:cd:0f");
        for wrong in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "52-54-00-12-34-56",
            "5:54:00:12:34:56",
            "52:54:00:12:34:zz",
            "52:54:00:12:34:+6",
        ] {
            assert!(
                matches!(wrong.parse::<Mac>(), Err(MacError::Form(_))),
                "{wrong}"
            );
        }
        for group in [
            "ff:ff:ff:ff:ff:ff",
            "01:00:5e:00:00:01",
            "00:00:00:00:00:00",
        ] {
            assert!(
                matches!(group.parse::<Mac>(), Err(MacError::Group(_))),
                "{group}"
            );
        }
    }
}
