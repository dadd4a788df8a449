//! Which IP addresses the guest used lately: they are announced at the guest's new place.

use crate::frame::source::Source;

/// Most addresses that are remembered.
pub const MOST_ADDRESSES: usize = 32;

/// Addresses, the one that was used last first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressBook(Vec<Source>);

impl AddressBook {
    /// The guest sent something from this address.
    pub fn used(&mut self, address: Source) {
        if self.0.first() == Some(&address) {
            return;
        }
        match self.0.iter().position(|known| *known == address) {
            Some(place) => self.0[..=place].rotate_right(1),
            None => {
                self.0.truncate(MOST_ADDRESSES - 1);
                self.0.insert(0, address);
            }
        }
    }

    /// The addresses, the one that was used last first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Source> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    fn address(number: u8) -> Source {
        IpAddr::from(Ipv4Addr::new(10, 0, 0, number)).into()
    }

    #[test]
    fn the_addresses_used_last_are_known() {
        let mut book = AddressBook::default();
        for number in 0..100 {
            book.used(address(number));
        }
        book.used(address(80));
        let known: Vec<_> = book.iter().collect();
        assert_eq!(known.len(), MOST_ADDRESSES);
        assert_eq!(known[..3], [address(80), address(99), address(98)]);
        assert_eq!(
            known.iter().filter(|&&known| known == address(80)).count(),
            1
        );
    }
}
