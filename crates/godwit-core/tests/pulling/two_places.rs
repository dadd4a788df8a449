//! An owner that lacks blocks at the node that gave the disk away, and blocks in the image.

use godwit_core::action::PullSlot;
use godwit_core::units::Extent;
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{ImageOffer, MigrationOptions, Missing, StartError};

use crate::owner::{CAPACITY, MIGRATION, Owner, extent, of};

/// Sectors at the node that gave the disk away: start and count.
const AT_SOURCE: (u64, u32) = (64, 128);

/// Returns an owner that lacks sectors 0 to 256, some of which are at the source.
fn apart() -> Owner {
    let mut words = vec![0; Missing::word_length(CAPACITY)];
    let mut at_source = words.clone();
    words[0] = u64::MAX >> 32;
    at_source[0] = 0xffff << 8;
    let heat = vec![0; Missing::heat_length(CAPACITY)];
    let mut owner = of(CAPACITY, &words, &heat);
    let missing = Missing::from_parts(CAPACITY, &words, &heat).expect("it fits");
    let missing = missing.in_two_places(&at_source).expect("it fits");
    owner.core.restore_missing(missing);
    owner
}

fn image_up(owner: &mut Owner) {
    owner.asked_of_image.clear();
    owner.core.handle_image_up(owner.now);
    let owes = Message::Owes {
        migration: MIGRATION,
        max_bandwidth: None,
    };
    owner
        .core
        .handle_message(owner.now, TrafficClass::Image, owes, None);
    owner.settle();
}

fn come(owner: &mut Owner, class: TrafficClass, (slot, extent): (PullSlot, Extent)) -> bool {
    let message = Message::Pulled {
        slot,
        extent,
        zeroes: false,
        result: Ok(()),
    };
    let expected = owner.core.handle_pulled(owner.now, class, message);
    owner.settle();
    expected
}

#[test]
fn each_place_gives_what_it_has_and_may_be_away_without_the_other() {
    let mut owner = apart();
    owner.connect();
    image_up(&mut owner);
    let (start, sectors) = AT_SOURCE;
    let at_source = (PullSlot(0), extent(start, sectors));
    assert_eq!(owner.asked, [at_source]);
    let in_image = owner.asked_of_image.clone();
    let parts: Vec<Extent> = in_image.iter().map(|(_, part)| *part).collect();
    assert_eq!(parts, [extent(0, 64), extent(192, 64)]);
    // The other place has other blocks there.
    assert!(!come(&mut owner, TrafficClass::Image, at_source));
    assert!(!come(&mut owner, TrafficClass::Pull, in_image[0]));
    assert!(owner.written().is_empty());
    owner.core.handle_image_lost(owner.now);
    owner.settle();
    assert!(!come(&mut owner, TrafficClass::Image, in_image[0]));
    // The disk leaves only without the blocks of the image.
    assert!(owner.core.needs_source());
    let begun = owner.core.begin_comparison();
    assert_eq!(begun, Err(StartError::NeedsSource));
    let whole = MigrationOptions {
        image: ImageOffer::None,
        window_chunks: 4,
        idle_window_chunks: 4,
        busy_window_chunks: 4,
        ..MigrationOptions::new(MIGRATION)
    };
    let started = owner.core.start_source(owner.now, whole);
    assert_eq!(started, Err(StartError::NeedsSource));
    assert!(come(&mut owner, TrafficClass::Pull, at_source));
    assert!(owner.told_whole, "that node is not needed any more");
    assert!(!owner.core.needs_source() && !owner.whole);
    assert_eq!(owner.core.record().remainder, Some(MIGRATION));
    assert!(owner.core.begin_comparison().is_ok());
    owner.core.forget_comparison();
    // Pulls of the lost connection are repeated on the next.
    image_up(&mut owner);
    owner.core.handle_pull_lost(owner.now);
    owner.settle();
    assert_eq!(owner.asked_of_image.len(), 2);
    for asked in owner.asked_of_image.clone() {
        assert!(come(&mut owner, TrafficClass::Image, asked));
    }
    assert!(owner.whole);
    assert_eq!(owner.core.record().remainder, None);
}
