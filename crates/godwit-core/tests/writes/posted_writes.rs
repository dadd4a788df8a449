//! The guest does not wait for the destination to acknowledge its double writes; the migration does.

use std::time::Duration;

use crate::support::{LIMITS, Sent, Source};
use godwit_core::request::Operation;
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{LinkSignal, MigrationOptions, Switchover};

const MOMENT: Duration = Duration::from_millis(1);

fn options() -> MigrationOptions {
    MigrationOptions {
        switchover: Switchover::WhenTold,
        peer_timeout: Duration::from_secs(60),
        ..MigrationOptions::new(MigrationId([1; 16]))
    }
}

/// Returns a source after the whole copy, waiting for the order to switch over.
fn converged(options: MigrationOptions) -> Source {
    let mut source = Source::leaving(options);
    source.pass(Duration::from_millis(50));
    assert!(source.converged, "all is copied");
    source.sent.clear();
    source
}

fn extent(start: u64, sectors: u32) -> Extent {
    Extent::new(Lba(start), sectors).expect("an extent")
}

fn write(source: &mut Source, tag: u32, extent: Extent) {
    source.ask(tag, Operation::Write { extent, fua: false });
}

/// Acknowledges the oldest double write sent with this tag, as the destination.
fn acknowledge(source: &mut Source, tag: u32) {
    crate::acknowledge::acknowledge(source, tag);
    source.pass(Duration::ZERO);
}

#[test]
fn a_write_is_answered_when_the_local_disk_has_it_and_the_switchover_waits_for_the_destination() {
    let mut source = converged(options());
    write(&mut source, 3, extent(0, 8));
    source.pass(MOMENT);
    assert_eq!(
        (source.answered, &*source.sent),
        (1, &[Sent::DoubleWrite][..])
    );
    assert!(source.core.switch_over(source.now));
    source.pass(MOMENT);
    assert!(!source.asked_to_accept, "the destination may lack a write");
    acknowledge(&mut source, 3);
    assert!(source.asked_to_accept);
}

#[test]
fn a_tag_that_is_used_again_is_acknowledged_as_often() {
    let mut source = converged(options());
    for _ in 0..3 {
        write(&mut source, 3, extent(0, 8));
        source.pass(MOMENT);
    }
    assert_eq!(source.answered, 3);
    assert!(source.core.switch_over(source.now));
    for _ in 0..3 {
        assert!(!source.asked_to_accept);
        acknowledge(&mut source, 3);
    }
    assert!(source.asked_to_accept);
}

#[test]
fn what_the_destination_does_not_take_holds_the_guest_back() {
    const KIB_64: u32 = 128;
    let mut source = converged(options());
    for tag in 0..10 {
        write(&mut source, tag, extent(u64::from(tag * KIB_64), KIB_64));
    }
    source.pass(MOMENT);
    assert_eq!(source.answered, 8, "512 KiB go without an answer");
    acknowledge(&mut source, 8);
    assert_eq!(
        source.answered, 9,
        "one that waits is answered when it arrives"
    );
    acknowledge(&mut source, 0);
    write(&mut source, 20, extent(0, KIB_64));
    source.pass(MOMENT);
    assert_eq!(source.answered, 10, "there is room again");
}

#[test]
fn with_a_promise_a_destination_that_falls_silent_is_noticed() {
    let mut source = converged(MigrationOptions {
        sla: Some(LatencyTarget {
            limit: Duration::from_millis(10),
            allowed_per_million: 100,
        }),
        ..options()
    });
    write(&mut source, 0, extent(0, 8));
    source.pass(Duration::from_millis(6));
    write(&mut source, 1, extent(8, 8));
    source.pass(MOMENT);
    assert_eq!(source.answered, 1, "the second waits for the destination");
    acknowledge(&mut source, 0);
    write(&mut source, 2, extent(16, 8));
    source.pass(MOMENT);
    assert_eq!(source.answered, 2, "the destination answers again");
}

#[test]
fn a_long_way_is_not_taken_for_silence() {
    const THERE_AND_BACK: Duration = Duration::from_millis(40);
    let promised = || MigrationOptions {
        sla: Some(LatencyTarget {
            limit: Duration::from_millis(10),
            allowed_per_million: 100,
        }),
        ..options()
    };
    // Counts the immediate answers to two writes, 30 ms apart, after a time in which each acknowledgement took `takes`.
    let answered = |takes: Duration| {
        let mut source = converged(promised());
        for _ in 0..3 {
            write(&mut source, 0, extent(0, 8));
            source.pass(takes);
            acknowledge(&mut source, 0);
            source.pass(Duration::from_secs(5));
        }
        let before = source.answered;
        write(&mut source, 0, extent(0, 8));
        source.pass(Duration::from_millis(30));
        write(&mut source, 1, extent(8, 8));
        source.pass(MOMENT);
        source.answered - before
    };
    assert_eq!(answered(MOMENT), 1, "the destination has fallen silent");
    assert_eq!(answered(THERE_AND_BACK), 2, "there was no time to answer");
}

#[test]
fn no_more_is_posted_than_leaves_room_for_requests_that_wait() {
    let mut source = converged(options());
    let (most, requests) = (LIMITS.posted_writes() as u32, LIMITS.requests);
    assert!(most < requests / 2);
    for tag in 0..requests / 2 {
        write(&mut source, tag, extent(u64::from(tag) * 8, 8));
    }
    source.pass(MOMENT);
    assert_eq!(source.answered, most);
}

#[test]
fn what_a_pause_drops_is_sent_again() {
    let mut source = converged(MigrationOptions {
        interface_budget: Some(1 << 20),
        ..options()
    });
    let signal = |source: &mut Source, rate| {
        let signal = LinkSignal {
            interface_rate: Some(rate),
            ..LinkSignal::default()
        };
        for _ in 0..50 {
            source.core.handle_link_signal(source.now, signal);
            source.pass(Duration::from_millis(10));
        }
    };
    write(&mut source, 0, extent(0, 8));
    source.pass(MOMENT);
    assert_eq!(source.answered, 1);
    signal(&mut source, 100 << 20);
    assert!(source.paused, "the interface is over its budget");
    acknowledge(&mut source, 0);
    signal(&mut source, 0);
    assert_eq!(source.sent, [Sent::DoubleWrite, Sent::DelayedWrite]);
    assert!(source.core.switch_over(source.now));
    source.pass(MOMENT);
    assert!(source.asked_to_accept);
}

#[test]
fn a_chunk_is_compared_when_all_that_was_written_to_it_has_arrived() {
    let mut source = Source::leaving(MigrationOptions {
        verify: true,
        // The guest has time to write while everything is copied.
        max_bandwidth: Some(1 << 30),
        ..options()
    });
    source.pass(Duration::from_millis(100));
    let written = extent(40_960, 8);
    write(&mut source, 0, written);
    source.pass(Duration::from_secs(3));
    assert_eq!(source.answered, 1);
    let was_compared =
        |source: &Source| source.compared.iter().any(|chunk| chunk.overlaps(written));
    assert!(!source.compared.is_empty() && !was_compared(&source));
    acknowledge(&mut source, 0);
    source.pass(Duration::from_secs(3));
    assert!(was_compared(&source) && source.converged);
}
