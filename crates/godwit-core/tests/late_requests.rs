//! A promise such as *p99 < 5 ms* spares the slowest requests, but not without end.

mod support;

use std::time::Duration;

use godwit_core::request::Operation;
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{MigrationOptions, Switchover};
use support::Source;

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
    // Of so many requests, one may be late.
    let extent = Extent::new(Lba(0), 8).expect("an extent");
    for tag in 0..20 {
        source.ask(tag, Operation::Read(extent));
    }
    source.pass(Duration::from_millis(1));
    assert_eq!(source.answered, 20);
    source.ask(0, Operation::Write { extent, fua: false });
    source.pass(Duration::from_millis(15));
    assert!(!source.paused, "it is spared");
    source.pass(Duration::from_millis(6));
    assert!(source.paused, "four times the promise is too late");
}
