//! VLANs.

/// A VLAN, 1 to 4094.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Vlan(u16);

impl Vlan {
    /// Returns the VLAN of a number; `None` if the number is out of range.
    pub const fn new(number: u16) -> Option<Self> {
        match number {
            1..=4094 => Some(Self(number)),
            _ => None,
        }
    }

    /// Returns the VLAN's number.
    pub const fn number(self) -> u16 {
        self.0
    }
}
