//! Scattered writes are compared in many short pieces at a time.

use std::time::Duration;

use crate::acknowledge::acknowledge;
use crate::support::Source;
use godwit_core::request::Operation;
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{MigrationOptions, Switchover};

const MOMENT: Duration = Duration::from_millis(1);
/// Just enough blocks for another pass.
const BLOCKS: u32 = 17;

#[test]
fn scattered_blocks_are_compared_as_many_at_a_time_as_chunks_would_hold() {
    let in_flight = |busy_window_chunks, busy_chunk_sectors| {
        let mut source = Source::leaving(MigrationOptions {
            busy_window_chunks,
            busy_chunk_sectors,
            verify: true,
            switchover: Switchover::WhenTold,
            peer_timeout: Duration::from_secs(60),
            ..MigrationOptions::new(MigrationId([1; 16]))
        });
        source.pass(Duration::from_millis(50));
        assert!(source.converged, "all is copied and compared");
        source.hold_reads = true;
        for tag in 0..BLOCKS {
            let extent = Extent::new(Lba(u64::from(tag) * 4096), 8).expect("an extent");
            source.ask(tag, Operation::Write { extent, fua: false });
            source.pass(Duration::ZERO);
            acknowledge(&mut source, tag);
        }
        source.pass(MOMENT);
        source.held.len()
    };
    assert_eq!(in_flight(1, 64), 8, "eight blocks are as long as one chunk");
    assert_eq!(in_flight(4, 512), BLOCKS as usize, "all of them");
}
