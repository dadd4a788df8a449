//! The effect of a promise such as *p99 < 5 ms* on single requests: the slowest requests are spared, but not without
//! end, and a write may pass an overlapping chunk.

use std::time::Duration;

use crate::support::{Sent, Source};
use godwit_core::request::Operation;
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{MigrationOptions, Switchover};

#[test]
fn a_request_that_the_percentile_spares_is_late_for_a_time_only() {
    let mut source = Source::leaving(MigrationOptions {
        sla: Some(LatencyTarget {
            limit: Duration::from_millis(5),
            allowed_per_million: 500_000,
        }),
        delayed_writes: false,
        switchover: Switchover::WhenTold,
        peer_timeout: Duration::from_secs(60),
        ..MigrationOptions::new(MigrationId([1; 16]))
    });
    source.pass(Duration::from_millis(50));
    // Of this many requests, one may be late.
    let extent = Extent::new(Lba(0), 8).expect("an extent");
    for tag in 0..20 {
        source.ask(tag, Operation::Read(extent));
    }
    source.pass(Duration::from_millis(1));
    assert_eq!(source.answered, 20);
    // The destination stops answering: a first write goes on without the destination, the next has to wait.
    source.ask(20, Operation::Write { extent, fua: false });
    source.pass(Duration::from_millis(5));
    assert_eq!(source.answered, 21);
    source.ask(0, Operation::Write { extent, fua: false });
    source.pass(Duration::from_millis(15));
    assert!(!source.paused, "it is spared");
    source.pass(Duration::from_millis(6));
    assert!(source.paused, "four times the promise is too late");
}

#[test]
fn with_a_promise_a_write_does_not_wait_for_the_chunk_that_it_meets() {
    let leaving = |delayed_writes| {
        let mut source = Source::leaving(MigrationOptions {
            sla: Some(LatencyTarget {
                limit: Duration::from_millis(5),
                allowed_per_million: 100,
            }),
            delayed_writes,
            ..MigrationOptions::new(MigrationId([1; 16]))
        });
        // The first chunk is being read.
        source.hold_reads = true;
        source.pass(Duration::from_millis(1));
        let extent = Extent::new(Lba(8), 8).expect("an extent");
        source.ask(0, Operation::Write { extent, fua: false });
        source.pass(Duration::from_millis(1));
        let answered = source.answered;
        source.hold_reads = false;
        source.pass(Duration::from_millis(20));
        (answered, source.sent)
    };
    let (answered, sent) = leaving(true);
    assert_eq!(answered, 1, "it waited for the chunk");
    let delayed = sent.iter().position(|it| *it == Sent::DelayedWrite);
    let copied = sent.iter().position(|it| *it == Sent::Copy);
    assert!(copied.is_some() && copied < delayed, "{sent:?}");
    let (answered, sent) = leaving(false);
    assert_eq!(answered, 0, "the destination would never hear of it");
    assert!(!sent.contains(&Sent::DelayedWrite), "{sent:?}");
}
