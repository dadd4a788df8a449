//! Comparisons of chunks: their number at a time, and the guest's writes meanwhile.

use std::time::Duration;

use crate::acknowledge::acknowledge;
use crate::support::Source;
use godwit_core::action::{Content, DiskOperation, Inspect};
use godwit_core::request::Operation;
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{MigrationOptions, OlderCopy, Switchover};

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

/// Returns a source whose chunks stay under comparison until `hold_reads` ends.
fn comparing(options: MigrationOptions) -> Source {
    let mut source = Source::staying();
    source.hold_reads = true;
    let options = MigrationOptions {
        switchover: Switchover::WhenTold,
        peer_timeout: Duration::from_secs(60),
        ..options
    };
    source
        .core
        .start_source(source.now, options)
        .expect("it starts");
    source.pass(Duration::ZERO);
    assert!(!source.held.is_empty());
    source
}

fn write(source: &mut Source, tag: u32) {
    let extent = Extent::new(Lba(8), 8).expect("an extent");
    source.ask(tag, Operation::Write { extent, fua: false });
    source.pass(Duration::ZERO);
}

#[test]
fn a_write_does_not_wait_for_the_comparison_with_an_older_copy() {
    let mut source = comparing(MigrationOptions {
        older_copy: OlderCopy::Unknown,
        ..MigrationOptions::new(MigrationId([1; 16]))
    });
    write(&mut source, 0);
    assert_eq!(source.answered, 1);
    source.hold_reads = false;
    source.pass(MOMENT);
    assert_eq!(source.copies, [8], "the written block differs");
}

/// Returns a source that verifies its disk, whose first chunk is under comparison.
fn verifying() -> Source {
    let mut source = comparing(MigrationOptions {
        verify: true,
        ..MigrationOptions::new(MigrationId([1; 16]))
    });
    let copies = |operation: &DiskOperation| !matches!(operation, DiskOperation::Read { inspect, .. } if *inspect == Inspect::Digest);
    while source.held.iter().any(|(_, operation)| copies(operation)) {
        for (tag, _) in std::mem::take(&mut source.held) {
            let read = Ok(Content::Data);
            source.core.handle_disk_done(source.now, tag, read);
        }
        source.pass(MOMENT);
    }
    source
}

#[test]
fn a_write_does_not_wait_for_the_verification_of_its_chunk() {
    for (writes, differs) in [(true, true), (true, false), (false, true)] {
        let mut source = verifying();
        if writes {
            write(&mut source, 0);
            acknowledge(&mut source, 0);
            source.pass(Duration::ZERO);
            assert_eq!(source.answered, 1);
        }
        // Another block of the chunk may differ, and is compared again.
        source.differs_at = differs.then_some(Lba(0));
        source.hold_reads = false;
        source.pass(MOMENT);
        assert_eq!(source.converged, writes, "a difference without a write");
        let times = source.compared.iter().filter(|it| it.start() == Lba(0));
        assert_eq!(times.count(), 1 + usize::from(writes && differs));
    }
}
