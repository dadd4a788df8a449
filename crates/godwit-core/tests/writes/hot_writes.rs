//! A place written repeatedly while the disk is copied is sent once.

use std::time::Duration;

use crate::acknowledge::acknowledge;
use crate::support::{Sent, Source};
use godwit_core::request::Operation;
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{LinkSignal, MigrationOptions, Switchover};

const STEP: Duration = Duration::from_millis(10);

/// Options for a copy of the disk of 1 GiB in about four seconds, with a promise never at risk.
fn options() -> MigrationOptions {
    MigrationOptions {
        switchover: Switchover::WhenConverged,
        peer_timeout: Duration::from_secs(60),
        max_bandwidth: Some(256 << 20),
        sla: Some(LatencyTarget {
            limit: Duration::from_secs(1),
            allowed_per_million: 100,
        }),
        ..MigrationOptions::new(MigrationId([1; 16]))
    }
}

/// Writes `times` times to an extent at the start of the disk; the destination acknowledges every write.
fn write(source: &mut Source, times: usize, extent: Extent) {
    for _ in 0..times {
        let before = count(source, Sent::DoubleWrite);
        source.ask(0, Operation::Write { extent, fua: false });
        source.pass(Duration::ZERO);
        if count(source, Sent::DoubleWrite) > before {
            acknowledge(source, 0);
        }
        source.pass(STEP);
    }
}

fn block(number: u64) -> Extent {
    Extent::new(Lba(number * 8), 8).expect("an extent")
}

fn count(source: &Source, what: Sent) -> usize {
    source.sent.iter().filter(|&&sent| sent == what).count()
}

/// Returns a source after the copy of the first quarter of its disk.
fn copying(options: MigrationOptions) -> Source {
    let mut source = Source::leaving(options);
    source.pass(Duration::from_secs(1));
    assert!(count(&source, Sent::Copy) > 0 && !source.asked_to_accept);
    source
}

#[test]
fn writes_to_one_place_are_sent_three_times_and_once_more_before_the_switchover() {
    let mut source = copying(options());
    write(&mut source, 100, block(0));
    assert_eq!(source.answered, 100);
    assert_eq!(count(&source, Sent::DoubleWrite), 3);
    assert_eq!(count(&source, Sent::DelayedWrite), 0);
    assert_eq!(
        source
            .core
            .progress()
            .expect("it moves")
            .promise
            .delayed_bytes,
        4096
    );
    source.pass(Duration::from_secs(10));
    assert!(source.asked_to_accept);
    assert_eq!(count(&source, Sent::DelayedWrite), 1);
}

#[test]
fn writes_to_many_places_are_all_sent_at_once() {
    let mut source = copying(options());
    for number in 0..100 {
        write(&mut source, 1, block(number));
    }
    assert_eq!(count(&source, Sent::DoubleWrite), 100);
}

#[test]
fn a_place_that_is_hot_before_it_is_copied_is_not_sent_before_the_copy() {
    let mut source = Source::leaving(options());
    source.pass(STEP);
    let late = block(100_000);
    write(&mut source, 10, late);
    assert_eq!(count(&source, Sent::DoubleWrite), 0);
    source.pass(Duration::from_secs(3));
    write(&mut source, 10, late);
    assert_eq!(count(&source, Sent::DoubleWrite), 0);
    source.pass(Duration::from_secs(10));
    assert!(source.asked_to_accept);
    assert_eq!(count(&source, Sent::DelayedWrite), 1);
}

#[test]
fn without_delayed_writes_each_is_sent() {
    let mut source = copying(MigrationOptions {
        delayed_writes: false,
        ..options()
    });
    write(&mut source, 20, block(0));
    assert_eq!(count(&source, Sent::DoubleWrite), 20);
}

#[test]
fn writes_are_sent_at_once_when_the_copy_is_over() {
    let mut source = Source::leaving(MigrationOptions {
        switchover: Switchover::WhenTold,
        ..options()
    });
    source.pass(Duration::from_secs(10));
    assert!(source.converged);
    write(&mut source, 20, block(0));
    assert_eq!(count(&source, Sent::DoubleWrite), 20);
}

#[test]
fn a_pause_has_what_was_kept_back_sent_when_it_ends() {
    let mut source = copying(MigrationOptions {
        interface_budget: Some(512 << 20),
        ..options()
    });
    write(&mut source, 10, block(0));
    assert_eq!(count(&source, Sent::DelayedWrite), 0);
    for rate in [1 << 30, 0] {
        let signal = LinkSignal {
            interface_rate: Some(rate),
            ..LinkSignal::default()
        };
        for _ in 0..50 {
            source.core.handle_link_signal(source.now, signal);
            source.pass(STEP);
        }
    }
    assert!(source.paused && !source.asked_to_accept);
    assert_eq!(count(&source, Sent::DelayedWrite), 1);
}

#[test]
fn what_was_kept_back_is_sent_before_anything_is_compared() {
    let mut source = copying(MigrationOptions {
        verify: true,
        ..options()
    });
    write(&mut source, 20, block(0));
    for _ in 0..1000 {
        source.pass(STEP);
        if !source.compared.is_empty() {
            break;
        }
        assert!(!source.asked_to_accept);
    }
    assert!(!source.compared.is_empty());
    assert_eq!(count(&source, Sent::DelayedWrite), 1);
}
