//! Remote keys and queue pair numbers that partners know and that mean another object to the device since a move.
//!
//! A partner translates the numbers in its table and passes on all others. A device at a new place may assign a number
//! that the process has told its partners for another object. A write to the one object would then silently reach the
//! other. Therefore such a number is never accepted from the device.

/// Refused numbers, beyond the taken ones, before the object is given up.
const ATTEMPTS: usize = 256;

/// Makes objects until the number of one is `allowed`. Refused objects are given back only afterwards, because a device
/// would assign the same number again. Returns none if `make` fails or no number was allowed. `taken` is the largest
/// number of refusals to expect: a device that assigns numbers in turn may come to every refused number first.
pub fn make_allowed<T>(
    taken: usize,
    mut make: impl FnMut() -> Option<T>,
    allowed: impl Fn(&T) -> bool,
    give_back: impl FnMut(T),
) -> Option<T> {
    let mut refused = Vec::new();
    let mut found = None;
    while refused.len() < ATTEMPTS.saturating_add(taken) {
        match make() {
            Some(object) if allowed(&object) => {
                found = Some(object);
                break;
            }
            Some(object) => refused.push(object),
            None => break,
        }
    }
    refused.into_iter().for_each(give_back);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    /// A device that assigns the smallest free number.
    #[derive(Default)]
    struct Device(RefCell<BTreeSet<u32>>);

    impl Device {
        fn make(&self) -> Option<u32> {
            let number = (1..).find(|number| !self.0.borrow().contains(number))?;
            self.0.borrow_mut().insert(number);
            Some(number)
        }
    }

    #[test]
    fn a_number_that_partners_know_is_not_used_for_another_object() {
        let device = Device::default();
        let spoken = [1, 2, 3];
        let made = make_allowed(
            spoken.len(),
            || device.make(),
            |number| !spoken.contains(number),
            |number| assert!(device.0.borrow_mut().remove(&number)),
        );
        assert_eq!(made, Some(4));
        assert_eq!(*device.0.borrow(), BTreeSet::from([4]));
    }

    #[test]
    fn it_ends_when_no_number_is_allowed_and_leaves_nothing() {
        let device = Device::default();
        let made = make_allowed(
            0,
            || device.make(),
            |_| false,
            |number| assert!(device.0.borrow_mut().remove(&number)),
        );
        assert_eq!(made, None);
        assert_eq!(device.0.borrow().len(), 0);
    }

    #[test]
    fn objects_in_any_number_get_numbers_of_a_device_that_is_one_behind() {
        let device = Device::default();
        device.0.borrow_mut().insert(1);
        let known: Vec<u32> = (1..=1000).collect();
        for own in &known {
            let made = make_allowed(
                known.len(),
                || device.make(),
                |number| number == own || !known.contains(number),
                |number| assert!(device.0.borrow_mut().remove(&number)),
            );
            assert!(made.is_some(), "{own}");
        }
    }
}
