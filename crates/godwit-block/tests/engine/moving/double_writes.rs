//! Double writes for a guest that does not wait for the other node.

use std::io::Write;
use std::time::{Duration, Instant};

use godwit_block::engine::InterfaceCounter;
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::Event;
use godwit_core::units::{Extent, Lba};
use godwit_core::wire::{Message, double_write_id};
use godwit_core::{MigrationOptions, Switchover};

use crate::puppet::{ID, Puppet, frame, receive};
use crate::support::*;

const BLOCK: u64 = 4096;

/// Returns an engine with a disk of 8 MiB, whose first chunk the other node, played here, has.
fn moving() -> (TestEngine, Client, Puppet) {
    moving_with(options(1), 1)
}

/// As [`moving`], with these options; the other node has this number of chunks.
fn moving_with(options: MigrationOptions, chunks: u32) -> (TestEngine, Client, Puppet) {
    let engine = TestEngine::new("a", 8 << 20, AuthorityRecord::created());
    let mut client = engine.attach(true);
    client.write(0, &[0xaa; 8 << 20]);
    let options = MigrationOptions {
        migration: ID,
        ..options
    };
    let interface = InterfaceCounter::open("lo").expect("loopback");
    let mut puppet = Puppet::destination_of(&engine, options, interface);
    puppet.take_copies(&engine, chunks);
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

#[test]
fn a_double_write_that_a_guest_waits_for_waits_for_no_others() {
    let stays = MigrationOptions {
        verify: false,
        switchover: Switchover::Never { checkpoints: false },
        ..options(1)
    };
    let (engine, mut client, mut puppet) = moving_with(stays, 8);
    while !matches!(receive(&mut puppet.control).0, Message::Follow { .. }) {}
    let follows = Message::Follows { migration: ID };
    puppet.control.write_all(&frame(follows)).expect("sent");
    engine.wait_for_core(|event| matches!(event, Event::Followed { .. }));
    let mut write = |block| {
        let begin = Instant::now();
        client.send(WRITE, 0, block * BLOCK, BLOCK as u32, &content(block));
        let (message, _) = receive(&mut puppet.sync);
        let took = begin.elapsed();
        let Message::DoubleWrite {
            tag,
            turn,
            generation,
            ..
        } = message
        else {
            panic!("{message:?} where a double write should be");
        };
        let ack = Message::Ack {
            tag: double_write_id(tag, turn),
            generation,
            result: Ok(()),
        };
        puppet.sync.write_all(&frame(ack)).expect("sent");
        assert_eq!(client.receive(|_| 0).error, 0);
        took
    };
    let quickest = (0..50).map(&mut write).min().expect("a write");
    assert!(quickest < Duration::from_micros(400), "{quickest:?}");
}
