//! A machine stopped by its hypervisor stands still until the disk changes hands: writes delayed for the promise's sake
//! must not hold up the switchover.

use std::time::Duration;

use crate::support::Source;
use godwit_core::request::Operation;
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{MigrationOptions, Switchover};

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
    // The guest sends no request: the whole disk is copied at full speed.
    source.pass(Duration::from_millis(50));
    assert!(source.converged, "all is copied");
    // More than is sent while the guest is held, and than is posted.
    let extent = Extent::new(Lba(0), 2048).expect("an extent");
    source.ask(0, Operation::Write { extent, fua: false });
    // The double write is late, and so becomes a delayed write.
    source.pass(Duration::from_millis(6));
    assert_eq!(
        source.answered, 1,
        "the guest does not wait for the destination"
    );
    assert!(source.core.switch_over(source.now));
    source.pass(Duration::from_millis(1));
    assert!(source.asked_to_accept, "{:?}", source.core.progress());
}
