//! A machine that its hypervisor has stopped stands still until its disk changes hands: nothing
//! that was held back for the sake of its promise may hold that up.

mod support;

use std::time::Duration;

use godwit_core::request::Operation;
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{MigrationOptions, Switchover};
use support::Source;

#[test]
fn a_copy_that_nobody_held_back_holds_up_no_stopped_machine() {
    let options = MigrationOptions {
        sla: Some(LatencyTarget {
            limit: Duration::from_millis(5),
            allowed_per_million: 100,
        }),
        switchover: Switchover::WhenTold,
        peer_timeout: Duration::from_secs(60),
        ..MigrationOptions::new(MigrationId([1; 16]))
    };
    let mut source = Source::leaving(options);
    // The guest asks for nothing: the whole disk is copied as fast as it goes.
    source.pass(Duration::from_millis(50));
    assert!(source.converged, "all is copied");
    // More than is sent while the guest is held, and than is sent without the guest waiting for it.
    let extent = Extent::new(Lba(0), 2048).expect("an extent");
    source.ask(0, Operation::Write { extent, fua: false });
    // Its double write is late, so that the destination is told of it later.
    source.pass(Duration::from_millis(6));
    assert_eq!(
        source.answered, 1,
        "the guest does not wait for the destination"
    );
    assert!(source.core.switch_over(source.now));
    source.pass(Duration::from_millis(1));
    assert!(source.asked_to_accept, "{:?}", source.core.progress());
}
