//! The view of a disk's clients and both nodes while the disk changes hands, and afterwards.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use godwit_block::engine::{EngineConfig, EngineEvent, Snapshot};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::{AbortReason, Event, Phase};
use godwit_core::units::MigrationId;
use godwit_core::wire::Message;
use godwit_core::{MigrationOptions, Switchover};

use crate::pair::*;
use crate::puppet::{ID, Puppet, frame, receive};
use crate::support::*;

const MIB: u64 = 1 << 20;

#[test]
fn the_guest_is_answered_before_the_destination_has_stored_that_it_serves() {
    let size = 4 * MIB;
    let a = TestEngine::new("a", size, AuthorityRecord::created());
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let serving = |event: &EngineEvent| matches!(event, EngineEvent::Persist(record) if record.ownership == Ownership::Serving);
    let b = TestEngine::with_image(
        EngineConfig::new("b".to_owned()),
        directory,
        size,
        AuthorityRecord::vacant(),
        |image| image,
        move |event| !serving(event),
    );
    let mut client = a.attach(true);
    client.write(0, &[1; 4096]);
    start(&a, &b, options(1), links(1));
    b.wait_for(serving);
    client.write(4096, &[2; 4096]);
    assert!(client.read(0, 4096) == [1; 4096]);
    b.wait_until(|snapshot| snapshot.counters.forwarded == 2 && snapshot.serves);
    let accepted =
        |snapshot: Snapshot| matches!(snapshot.record.ownership, Ownership::Accepted { .. });
    assert!(accepted(b.handle.snapshot()));
    let progress = a.handle.snapshot().progress.expect("progress");
    assert_eq!(progress.phase, Phase::Committing, "it is not confirmed");
    b.handle.persisted();
    wait_for_success(&a, &b);
    assert!(b.finish()[4096..8192] == [2; 4096]);
}

#[test]
fn forwarding_survives_a_lost_connection() {
    let pair = Pair::new(16 * MIB);
    let stop = Arc::new(AtomicBool::new(false));
    let worker = load(pair.a.attach(true), 0, 16 * MIB, 21, Arc::clone(&stop));
    start(&pair.a, &pair.b, options(1), links(1));
    wait_for_success(&pair.a, &pair.b);
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(60));
        let (ours, theirs) = tcp_pair();
        pair.b.handle.serve_forwarded("a".to_owned(), plain(theirs));
        pair.a.wait_for(|event| *event == EngineEvent::ForwardDown);
        pair.a.handle.forward(plain(ours));
    }
    stop.store(true, Ordering::Relaxed);
    let expected = worker.join().expect("a worker");
    assert!(
        pair.b.finish() == expected,
        "the image differs from what was acknowledged"
    );
}

#[test]
fn clients_of_a_disk_that_left_wait_for_its_owner() {
    let size = 4 * MIB;
    let owner = AuthorityRecord {
        epoch: departed().epoch,
        ownership: Ownership::Serving,
        remainder: None,
    };
    let a = TestEngine::new("a", size, departed());
    let b = TestEngine::new("b", size, owner);
    let mut client = a.attach(false);
    let write = client.send(WRITE, 0, 0, 512, &[5; 512]);
    a.wait_for(|event| *event == EngineEvent::ForwardDown);
    let (ours, theirs) = tcp_pair();
    b.handle.serve_forwarded("a".to_owned(), plain(theirs));
    a.handle.forward(plain(ours));
    assert_eq!(
        client.receive(|_| 0),
        Answer {
            cookie: write,
            error: 0,
            data: vec![]
        }
    );
    // Without an owner, requests fail after the node has given up.
    b.handle.shutdown();
    a.wait_for(|event| *event == EngineEvent::ForwardDown);
    client.send(READ, 0, 0, 512, &[]);
    a.handle.fail_forwarded();
    assert_eq!(client.receive(|_| 512).error, 108);
}

#[test]
fn clients_of_a_disk_whose_return_was_called_off_wait_for_its_owner() {
    let engine = TestEngine::new("a", 4 * MIB, departed());
    let _client = engine.attach(false);
    engine.wait_for(|event| *event == EngineEvent::ForwardDown);
    let (owner, ours) = tcp_pair();
    engine.handle.forward(plain(ours));
    let mut source = Puppet::source_of(&engine);
    let prepare = Message::Prepare {
        migration: ID,
        epoch: departed().epoch.next(),
        shared: false,
        lacks: false,
    };
    source.control.write_all(&frame(prepare)).expect("sent");
    let prepared = receive(&mut source.control).0;
    assert!(matches!(prepared, Message::Prepared { .. }), "{prepared:?}");
    let abort = Message::Abort {
        migration: ID,
        reason: AbortReason::Cancelled,
    };
    source.control.write_all(&frame(abort)).expect("sent");
    engine.wait_until(|snapshot| snapshot.record.ownership == Ownership::Vacant);
    drop(owner);
    engine.wait_for(|event| *event == EngineEvent::ForwardDown);
}

#[test]
fn an_undecided_migration_is_resolved_over_a_new_control_connection() {
    let migration = MigrationId([4; 16]);
    let epoch = AuthorityRecord::created().epoch.next();
    let gave = AuthorityRecord {
        epoch,
        ownership: Ownership::Relinquished { migration },
        remainder: None,
    };
    let took = AuthorityRecord {
        epoch,
        ownership: Ownership::Accepted { migration },
        remainder: None,
    };
    let a = TestEngine::new("a", MIB, gave);
    let b = TestEngine::new("b", MIB, took);
    for engine in [&a, &b] {
        engine.wait_for_core(|event| *event == Event::NeedPeer { migration });
    }
    let (ours, theirs) = tcp_pair();
    a.handle.control_up(migration, plain(ours));
    b.handle.control_up(migration, plain(theirs));
    b.wait_for_core(|event| *event == Event::ReceiveCompleted { migration });
    a.wait_for_core(|event| *event == Event::MigrationCompleted { migration });
    b.wait_until(|snapshot| snapshot.serves);
}

#[test]
fn holes_are_told_only_by_a_node_that_has_all_of_the_disk() {
    let pair = Pair::new(8 * MIB);
    let mut client = pair.a.attach(true);
    client.write(MIB, &[7; 65536]);
    let (all, mib) = (8 * MIB as u32, MIB as u32);
    let known = [mib, 3, 65536, 0, all - mib - 65536, 3];
    let nothing_known = [all, 0];
    assert_eq!(client.allocation(0, (0, all), 3), known);
    let waits = MigrationOptions {
        switchover: Switchover::WhenTold,
        ..options(10)
    };
    start(&pair.a, &pair.b, waits, links(1));
    pair.a.wait_until(|snapshot| {
        snapshot.progress.map(|progress| progress.phase) == Some(Phase::Converged)
    });
    assert_eq!(client.allocation(0, (0, all), 1), nothing_known);
    pair.a.handle.switch_over(Box::new(|_| {}));
    wait_for_success(&pair.a, &pair.b);
    let (ours, theirs) = tcp_pair();
    pair.b.handle.serve_forwarded("a".to_owned(), plain(theirs));
    pair.a.handle.forward(plain(ours));
    // The image here is outdated.
    assert_eq!(client.allocation(0, (0, all), 1), nothing_known);
    client.write(4 * MIB, &[8; 4096]);
    let rest = all - 4 * mib - 4096;
    let grown = [mib, 3, 65536, 0, 3 * mib - 65536, 3, 4096, 0, rest, 3];
    let mut there = pair.b.attach(true);
    assert_eq!(there.allocation(0, (0, all), 5), grown);
}
