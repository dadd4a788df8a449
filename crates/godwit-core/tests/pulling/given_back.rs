//! Requests given back to their sender while their blocks are missing.

use godwit_core::request::RequestError;
use godwit_core::units::{Extent, Time};

use crate::owner::{extent, lacking};

#[test]
fn what_is_given_back_is_pulled_as_if_it_was_waited_for() {
    let mut owner = lacking(&[(extent(0, 7168), 0)]);
    owner.read(1, 7000, 8);
    owner.read(2, 6000, 8);
    assert_eq!(owner.core.missing_waits_since(), Some(Time(0)));
    owner.core.give_back_missing(owner.now, |tag| tag.0 == 1);
    owner.settle();
    assert_eq!(owner.answers, [(1, Err(RequestError::NotServing))]);
    owner.connect();
    // Nothing else is asked for before.
    let asked: Vec<Extent> = owner.asked.iter().map(|(_, part)| *part).collect();
    assert_eq!(asked, [extent(6000, 16), extent(7000, 40)]);
    owner.send(Ok(()));
    assert!(owner.answered(2) && owner.core.wants_missing());
    owner.send(Ok(()));
    assert!(!owner.core.wants_missing());
}

#[test]
fn what_cannot_be_read_at_the_source_is_wanted_no_more() {
    let mut owner = lacking(&[(extent(0, 7168), 0)]);
    for (tag, start) in [(1, 7000), (2, 6000)] {
        owner.read(tag, start, 8);
    }
    owner.core.give_back_missing(owner.now, |_| true);
    owner.settle();
    owner.connect();
    let parts: Vec<Extent> = owner.asked.iter().map(|(_, part)| *part).collect();
    assert_eq!(parts, [extent(7000, 40), extent(6000, 16)]);
    owner.send(Err(RequestError::Io));
    assert!(owner.core.wants_missing(), "the other may come");
    owner.send(Err(RequestError::Io));
    assert!(
        !owner.core.wants_missing(),
        "whoever waits for them is to hear of it"
    );
}

#[test]
fn nobody_waits_for_what_those_wanted_who_are_gone() {
    let mut owner = lacking(&[(extent(0, 7168), 0)]);
    owner.read(1, 7000, 8);
    owner.core.give_back_missing(owner.now, |_| true);
    owner.settle();
    assert!(owner.core.wants_missing());
    owner.core.forget_wanted();
    assert!(!owner.core.wants_missing());
    owner.connect();
    assert_ne!(owner.asked[0].1, extent(7000, 40), "it is not hurried");
}
