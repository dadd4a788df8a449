//! Pulling keeps to the migration's bandwidth bound.

use std::time::Duration;

use godwit_core::units::Time;

use crate::owner::{Owner, extent, lacking};

/// Bytes per second.
const BOUND: u64 = 1 << 20;

/// Lets the source answer everything at once for up to `longest`; returns the bytes sent.
fn pulled_within(owner: &mut Owner, longest: Duration) -> u64 {
    let ends = owner.now.after(longest);
    let mut bytes = 0;
    while owner.now < ends {
        while !owner.asked.is_empty() {
            bytes += owner.send(Ok(())).bytes();
        }
        if owner.whole {
            break;
        }
        pass_time(owner, ends);
    }
    bytes
}

fn pass_time(owner: &mut Owner, most: Time) {
    let next = owner.core.next_deadline().unwrap_or(most);
    owner.now = next
        .max(owner.now.after(Duration::from_micros(1)))
        .min(most);
    owner.core.handle_timer(owner.now);
    owner.settle();
}

#[test]
fn what_nobody_waits_for_is_pulled_within_the_bound() {
    let mut owner = lacking(&[(extent(0, 8192), 0)]);
    owner.connect_within(Some(BOUND));
    let second = pulled_within(&mut owner, Duration::from_secs(1));
    assert!(
        (BOUND * 3 / 4..=BOUND * 5 / 4).contains(&second),
        "{second} bytes in a second"
    );
    pulled_within(&mut owner, Duration::from_secs(5));
    assert!(owner.whole);
}

#[test]
fn what_somebody_waits_for_goes_first_and_counts() {
    let mut owner = lacking(&[(extent(0, 8192), 0)]);
    owner.connect_within(Some(BOUND));
    let begun = owner.now;
    let mut bytes = 0;
    for tag in 0..12 {
        let place = 8000 - u64::from(tag) * 512;
        owner.read(tag, place, 8);
        let waits_since = owner.now;
        while !owner.answered(tag) {
            while let Some((slot, part)) = owner.asked.pop() {
                bytes += part.bytes();
                owner.send_in(slot, part, Ok(()));
            }
            if !owner.answered(tag) {
                pass_time(&mut owner, Time(u64::MAX));
            }
        }
        let waited = owner.now.since(waits_since);
        // Earlier pulls have to be paid for: a part of 256 KiB at most.
        assert!(waited < Duration::from_millis(330), "{waited:?}");
    }
    let took = owner.now.since(begun).as_secs_f64();
    let most = BOUND as f64 * took + f64::from(600 << 10);
    assert!(bytes as f64 <= most, "{bytes} bytes in {took} s");
}

#[test]
fn zeroes_cost_nothing_and_without_a_bound_nothing_is_held_back() {
    let mut owner = lacking(&[(extent(0, 8192), 0)]);
    owner.connect_within(Some(BOUND));
    pass_time(&mut owner, Time(1_000_000));
    while !owner.asked.is_empty() {
        owner.send_zeroes();
    }
    assert!(owner.whole, "all of it was zeroes");
    let mut owner = lacking(&[(extent(0, 8192), 0)]);
    owner.connect();
    while !owner.asked.is_empty() {
        owner.send(Ok(()));
    }
    assert!(owner.whole);
}
