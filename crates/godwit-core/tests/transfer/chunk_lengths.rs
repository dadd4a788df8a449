//! A guest waits for overlapping chunks, so chunks are short while the guest works. An idle guest meets no chunk.

use std::time::Duration;

use crate::support::Source;
use godwit_core::MigrationOptions;
use godwit_core::request::Operation;
use godwit_core::units::{Extent, Lba, MigrationId};

#[test]
fn chunks_are_short_while_the_guest_works_and_long_while_it_does_not() {
    const LONG: u32 = 2048;
    const SHORT: u32 = 64;
    let mut source = Source::leaving(MigrationOptions {
        chunk_sectors: LONG,
        busy_chunk_sectors: SHORT,
        // The guest has time to work before everything is copied.
        max_bandwidth: Some(100 << 20),
        ..MigrationOptions::new(MigrationId([1; 16]))
    });
    let copied = |source: &mut Source, time| {
        source.pass(Duration::from_millis(time));
        let copies = std::mem::take(&mut source.copies);
        assert!(copies.len() > 1, "{copies:?}");
        copies
    };
    assert!(
        copied(&mut source, 100)
            .iter()
            .all(|&length| length == LONG)
    );
    let extent = Extent::new(Lba(0), 8).expect("an extent");
    source.ask(0, Operation::Read(extent));
    assert!(
        copied(&mut source, 50)
            .iter()
            .all(|&length| length == SHORT)
    );
    source.pass(Duration::from_millis(100));
    source.copies.clear();
    assert!(
        copied(&mut source, 100)
            .iter()
            .all(|&length| length == LONG)
    );
}
