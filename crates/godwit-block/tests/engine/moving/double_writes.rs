//! Double writes for a guest that does not wait for the other node.

use std::time::{Duration, Instant};

use godwit_block::engine::InterfaceCounter;
use godwit_core::MigrationOptions;
use godwit_core::authority::AuthorityRecord;
use godwit_core::units::{Extent, Lba};
use godwit_core::wire::Message;

use crate::puppet::{ID, Puppet, receive};
use crate::support::*;

const BLOCK: u64 = 4096;

/// Returns an engine with a disk of 8 MiB, whose first chunk the other node, played here, has.
fn moving() -> (TestEngine, Client, Puppet) {
    let engine = TestEngine::new("a", 8 << 20, AuthorityRecord::created());
    let mut client = engine.attach(true);
    client.write(0, &[0xaa; 8 << 20]);
    let options = MigrationOptions {
        migration: ID,
        ..options(1)
    };
    let interface = InterfaceCounter::open("lo").expect("loopback");
    let mut puppet = Puppet::destination_of(&engine, options, interface);
    puppet.take_copies(&engine, 1);
    (engine, client, puppet)
}

fn content(block: u64) -> Vec<u8> {
    vec![block as u8 + 1; BLOCK as usize]
}

#[test]
fn the_guest_goes_on_while_the_other_node_reads_nothing_and_loses_nothing_by_it() {
    const BLOCKS: u64 = 100;
    let (_engine, mut client, mut puppet) = moving();
    for block in 0..BLOCKS {
        // Each write is answered, so the next one may reuse the buffer.
        client.write(block * BLOCK, &content(block));
    }
    for block in 0..BLOCKS {
        let (message, data) = receive(&mut puppet.sync);
        let sectors = BLOCK / 512;
        let expected = Extent::new(Lba(block * sectors), sectors as u32);
        let Message::DoubleWrite { extent, .. } = message else {
            panic!("{message:?} where a double write should be");
        };
        assert_eq!((Some(extent), data), (expected, content(block)));
    }
}

#[test]
fn a_double_write_waits_a_moment_for_others() {
    let (_engine, mut client, mut puppet) = moving();
    for block in 0..20 {
        let begin = Instant::now();
        client.write(block * BLOCK, &content(block));
        let (message, _) = receive(&mut puppet.sync);
        assert!(matches!(message, Message::DoubleWrite { .. }));
        let took = begin.elapsed();
        assert!(took >= Duration::from_micros(400), "sent after {took:?}");
    }
}
