//! Moves between two engines: under load, by every policy, cancelled, and with a lost peer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use godwit_block::engine::{PeerStreams, Snapshot};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::{AbortReason, Event, Phase};
use godwit_core::units::{Bytes, MigrationId};
use godwit_core::{MigrationOptions, PolicyOptions, RoundOptions, StartError, Switchover};

use crate::pair::*;
use crate::support::*;

const MIB: u64 = 1 << 20;

#[test]
fn an_idle_disk_moves() {
    let pair = Pair::new(32 * MIB + 512);
    let mut client = pair.a.attach(true);
    let data = Random(1).bytes(3 << 20);
    client.write(5 * MIB + 512, &data);
    client.write(32 * MIB, &data[..512]);
    start(&pair.a, &pair.b, options(1), links(2));
    wait_for_success(&pair.a, &pair.b);
    let snapshot = pair.a.handle.snapshot();
    let progress = snapshot.progress.expect("progress");
    assert_eq!(progress.phase, Phase::Completed);
    assert!(progress.verified);
    assert!(
        progress.copy_bytes_sent < 8 * MIB,
        "zeroes were sent: {progress:?}"
    );
    assert!(!snapshot.serves);
    pair.a
        .wait_until(|snapshot| matches!(snapshot.record.ownership, Ownership::Departed { .. }));
    // The client stayed, and the engine forwards the client's requests. The first goes in three pieces.
    assert!(client.read(5 * MIB + 512, 3 << 20) == data);
    client.write(0, &data[..4096]);
    assert_eq!(client.call(FLUSH, 0, 0, 0, &[]).error, 0);
    assert_eq!(
        client.call(TRIM, 0, 5 * MIB + 512, MIB as u32, &[]).error,
        0
    );
    pair.b
        .wait_until(|snapshot| snapshot.counters.forwarded == 3 + 3);
    let moved = pair.b.finish();
    assert!(moved[..4096] == data[..4096]);
    assert!(moved[32 * MIB as usize..] == data[..512]);
    let start = 5 * MIB as usize + 512;
    assert!(
        moved[start..start + MIB as usize]
            .iter()
            .all(|&byte| byte == 0)
    );
    assert!(moved[start + MIB as usize..start + data.len()] == data[MIB as usize..]);
}

#[test]
fn a_disk_moves_there_and_back_under_load() {
    load_and_move(links);
}

pub(crate) fn load_and_move(links: impl Fn(usize) -> (PeerStreams, PeerStreams)) {
    load_and_move_with(links, options);
}

fn load_and_move_with(
    links: impl Fn(usize) -> (PeerStreams, PeerStreams),
    options: impl Fn(u8) -> MigrationOptions,
) {
    let pair = Pair::new(64 * MIB);
    let stop = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..2)
        .map(|n| {
            load(
                pair.a.attach(n == 0),
                n * 32 * MIB,
                32 * MIB,
                n + 5,
                Arc::clone(&stop),
            )
        })
        .collect();
    std::thread::sleep(Duration::from_millis(100));
    for round in 0..3 {
        start(&pair.a, &pair.b, options(10 + round), links(2));
        wait_for_success(&pair.a, &pair.b);
        std::thread::sleep(Duration::from_millis(100));
        start(&pair.b, &pair.a, options(20 + round), links(1));
        wait_for_success(&pair.b, &pair.a);
        std::thread::sleep(Duration::from_millis(50));
    }
    stop.store(true, Ordering::Relaxed);
    let expected: Vec<u8> = workers
        .into_iter()
        .flat_map(|worker| worker.join().expect("a worker"))
        .collect();
    pair.a
        .wait_until(|snapshot| snapshot.requests_in_flight == 0);
    assert_eq!(pair.a.handle.snapshot().counters.errors, 0);
    assert!(
        pair.a.finish() == expected,
        "the image differs from what was acknowledged"
    );
}

#[test]
fn a_disk_moves_by_every_policy_under_load() {
    let rounds = RoundOptions {
        block_sectors: 8,
        most_rounds: 3,
        most_left: Bytes(256 << 10),
    };
    for policy in [PolicyOptions::Mirror, PolicyOptions::PreCopy(rounds)] {
        for verify in [false, true] {
            load_and_move_with(links, |id| MigrationOptions {
                policy,
                verify,
                ..options(id)
            });
        }
    }
}

#[test]
fn cancelled_migrations_leave_the_source_serving() {
    let pair = Pair::new(64 * MIB);
    let stop = Arc::new(AtomicBool::new(false));
    let worker = load(pair.a.attach(true), 0, 64 * MIB, 3, Arc::clone(&stop));
    let mut random = Random(77);
    for attempt in 0..8 {
        let mut options = options(attempt);
        options.max_bandwidth = Some(200 << 20);
        // Unwritten parts would be there at once.
        options.find_holes = false;
        start(&pair.a, &pair.b, options, links(2));
        std::thread::sleep(Duration::from_millis(random.below(120)));
        assert!(cancel(&pair.a), "too late to cancel after 120 ms");
        pair.b
            .wait_for_core(|event| matches!(event, Event::ReceiveAborted { .. }));
        assert!(pair.a.handle.snapshot().serves);
    }
    stop.store(true, Ordering::Relaxed);
    let expected = worker.join().expect("a worker");
    assert!(pair.a.finish() == expected);
}

#[test]
fn a_migration_starts_right_after_another_was_cancelled() {
    let pair = Pair::new(256 * MIB);
    pair.a.attach(true).write(0, &Random(8).bytes(32 << 20));
    for attempt in 0..20 {
        // Chunks are read even without a receiver.
        let (ours, theirs) = links(1);
        let started = start_source(&pair.a, options(attempt), ours, None);
        assert_eq!(started, Ok(()), "attempt {attempt}");
        assert!(cancel(&pair.a), "attempt {attempt}");
        drop(theirs);
    }
}

#[test]
fn a_lost_destination_leaves_the_source_serving() {
    let pair = Pair::new(64 * MIB);
    let mut client = pair.a.attach(true);
    client.write(0, &Random(8).bytes(16 << 20));
    let mut options = options(1);
    options.max_bandwidth = Some(50 << 20);
    start(&pair.a, &pair.b, options, links(1));
    client.write(4 * MIB, &[3; 4096]);
    pair.b.handle.shutdown();
    pair.b.handle.clone().join().expect("a clean end");
    pair.a
        .wait_for_core(|event| matches!(event, Event::MigrationAborted { .. }));
    assert!(client.read(4 * MIB, 4096) == [3; 4096]);
    client.write(0, &[1; 512]);
}

#[test]
fn a_source_that_vanishes_frees_the_destination() {
    let pair = Pair::new(MIB);
    let (ours, theirs) = links(1);
    let (migration, timeout) = (MigrationId([1; 16]), Duration::from_secs(5));
    let handle = &pair.b.handle;
    let started = ask(|reply| handle.start_destination(migration, timeout, theirs, reply));
    assert_eq!(started, Ok(()));
    drop(ours);
    let event = pair
        .b
        .wait_for_core(|event| matches!(event, Event::ReceiveAborted { .. }));
    let reason = AbortReason::PeerLost;
    assert_eq!(
        event,
        Event::ReceiveAborted {
            migration: MigrationId([1; 16]),
            reason
        }
    );
}

#[test]
fn only_the_owner_can_start_a_migration_and_only_one() {
    let pair = Pair::new(MIB);
    let refused = |engine, id| start_source(engine, options(id), links(1).0, None);
    assert_eq!(refused(&pair.b, 1), Err(StartError::NotServing));
    let (ours, theirs) = links(1);
    assert_eq!(start_source(&pair.a, options(2), ours, None), Ok(()));
    assert_eq!(refused(&pair.a, 3), Err(StartError::Busy));
    drop(theirs);
    pair.a
        .wait_for_core(|event| matches!(event, Event::MigrationAborted { .. }));
}

#[test]
fn a_disk_that_waits_for_its_machine_converges_and_moves_when_told() {
    let pair = Pair::new(8 * MIB);
    let mut client = pair.a.attach(true);
    let data = Random(9).bytes(MIB as usize);
    client.write(0, &data);
    let waits = MigrationOptions {
        switchover: Switchover::WhenTold,
        ..options(9)
    };
    start(&pair.a, &pair.b, waits, links(1));
    let phase = |snapshot: &Snapshot| snapshot.progress.map(|progress| progress.phase);
    pair.a
        .wait_until(|snapshot| phase(snapshot) == Some(Phase::Converged));
    // The guest goes on here, and all its writes go to both sides.
    client.write(4 * MIB, &data);
    assert!(pair.a.handle.snapshot().serves);
    let leaves = || ask(|reply| pair.a.handle.switch_over(reply));
    assert!(leaves(), "a migration leaves");
    wait_for_success(&pair.a, &pair.b);
    assert!(!leaves(), "nothing leaves any more");
    let moved = pair.b.finish();
    assert!(moved[..data.len()] == data && moved[4 * MIB as usize..][..data.len()] == data);
}

/// Returns the `nice` value of an engine's thread.
fn nice(name: &str) -> i32 {
    std::fs::read_dir("/proc/self/task")
        .expect("the threads")
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok())
        .find_map(|stat| {
            let (thread, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
            let nice = rest.split_whitespace().nth(16)?.parse().ok();
            nice.filter(|_| thread == format!("disk {name}"))
        })
        .expect("an engine's thread")
}

#[test]
fn a_disk_that_leaves_runs_before_others_where_that_is_allowed_and_one_that_comes_does_not() {
    let own = rustix::process::nice(0).expect("its own value");
    let allowed = std::thread::spawn(move || rustix::process::nice(-5 - own).is_ok());
    let allowed = allowed.join().expect("a thread");
    let better = if allowed { own.min(-5) } else { own };
    let (from, to) = ("leaving", "coming");
    let a = TestEngine::new(from, 8 * MIB, AuthorityRecord::created());
    let b = TestEngine::new(to, 8 * MIB, AuthorityRecord::vacant());
    let wait_for = |leaving: i32| {
        a.wait_until(|_| nice(from) == leaving);
        b.wait_until(|_| nice(to) == own);
    };
    wait_for(own);
    let waits = MigrationOptions {
        switchover: Switchover::WhenTold,
        ..options(12)
    };
    start(&a, &b, waits, links(1));
    wait_for(better);
    // All has been copied by then, so the other thread has long known its role as receiver.
    a.wait_until(|snapshot| {
        snapshot.progress.map(|progress| progress.phase) == Some(Phase::Converged)
    });
    assert_eq!(nice(to), own);
    a.handle.switch_over(Box::new(|_| {}));
    wait_for_success(&a, &b);
    wait_for(own);
}
