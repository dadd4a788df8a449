//! Changes of a running migration.

use std::time::Duration;

use crate::acknowledge::acknowledge;
use crate::support::Source;
use godwit_core::event::{AbortReason, PauseReason};
use godwit_core::request::Operation;
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{
    ChangeError, DOUBLE_WRITE, LinkSignal, MIRROR, MigrationChange, MigrationOptions, PRE_COPY,
    PUSH_PULL, PushOptions, Switchover,
};

/// 1 GiB.
const CAPACITY: u32 = 2 << 20;
/// Time for a quarter of the disk.
const QUARTER: Duration = Duration::from_millis(2500);
/// Time for the whole disk.
const ALL: Duration = Duration::from_secs(60);

const LEAVE_NOW: MigrationChange = MigrationChange {
    max_bandwidth: None,
    sla: None,
    deadline: None,
    policy: Some(PushOptions {
        threshold: 3,
        longest_push: Some(Duration::ZERO),
    }),
};

/// Returns a source after a quarter of its disk was sent at 100 MB/s.
fn a_quarter_has_left(options: MigrationOptions) -> Source {
    let mut source = Source::leaving(MigrationOptions {
        max_bandwidth: Some(100 << 20),
        switchover: Switchover::WhenTold,
        peer_timeout: Duration::from_secs(600),
        ..options
    });
    source.pass(QUARTER);
    source
}

fn plain() -> MigrationOptions {
    MigrationOptions::new(MigrationId([1; 16]))
}

fn write(source: &mut Source, tag: u32, start: u64) {
    let extent = Extent::new(Lba(start), 8).expect("an extent");
    source.ask(tag, Operation::Write { extent, fua: false });
    source.pass(Duration::ZERO);
}

fn copied(source: &Source) -> u32 {
    source.copies.iter().sum()
}

fn change(source: &mut Source, change: &MigrationChange) {
    let changed = source.core.change_migration(source.now, change);
    assert_eq!(changed, Ok(()));
    source.pass(Duration::from_millis(50));
}

/// Hands the disk over; returns the extents left behind.
fn hand_over(source: &mut Source) -> Vec<(u64, u32)> {
    assert!(source.converged, "{:?}", source.core.progress());
    assert!(source.core.switch_over(source.now));
    source.pass(Duration::from_millis(50));
    assert!(source.asked_to_accept);
    let part = |&(start, sectors, _): &(u64, u32, u8)| (start, sectors);
    source.lacks.iter().map(part).collect()
}

#[test]
fn whatever_the_policy_a_disk_told_to_leave_leaves_what_has_not_been_copied() {
    for policy in [DOUBLE_WRITE, MIRROR, PRE_COPY, PUSH_PULL] {
        let policy = policy.usual;
        let mut source = a_quarter_has_left(MigrationOptions { policy, ..plain() });
        change(&mut source, &LEAVE_NOW);
        let pushed = copied(&source);
        assert!(pushed > CAPACITY / 8 && pushed < CAPACITY / 2, "{pushed}");
        let left = hand_over(&mut source);
        assert_eq!(left, [(u64::from(pushed), CAPACITY - pushed)], "{policy:?}");
    }
}

#[test]
fn a_write_on_its_way_to_the_destination_waits_for_it_no_longer_and_counts_as_left() {
    let mut source = a_quarter_has_left(plain());
    write(&mut source, 0, 0);
    acknowledge(&mut source, 0);
    write(&mut source, 1, 4096);
    assert_eq!(source.doubled.len(), 1);
    change(&mut source, &LEAVE_NOW);
    assert_eq!(source.answered, 2);
    write(&mut source, 2, 8192);
    assert_eq!(source.answered, 3, "nor does one from now on");
    let pushed = copied(&source);
    let left = hand_over(&mut source);
    let rest = (u64::from(pushed), CAPACITY - pushed);
    assert_eq!(left, [(4096, 8), (8192, 8), rest]);
}

#[test]
fn what_a_pause_kept_back_is_left_and_a_promise_taken_back_ends_the_pause() {
    let limit = Duration::from_millis(1);
    let promised = LatencyTarget {
        limit,
        allowed_per_million: 1000,
    };
    let paused = |undone: &MigrationChange| {
        let mut source = a_quarter_has_left(MigrationOptions {
            sla: Some(promised),
            ..plain()
        });
        let jam = LinkSignal {
            queued: 64 << 20,
            delivery_rate: 1 << 20,
            ..LinkSignal::default()
        };
        source.core.handle_link_signal(source.now, jam);
        let reason = source.core.progress().and_then(|it| it.promise.paused);
        assert_eq!(reason, Some(PauseReason::LinkQueue));
        write(&mut source, 1, 4096);
        change(&mut source, undone);
        source
    };
    let no_promise = MigrationChange {
        sla: Some(None),
        ..MigrationChange::default()
    };
    let resumed = paused(&no_promise).core.progress().expect("it goes on");
    assert_eq!(
        (resumed.promise.limit, resumed.promise.paused),
        (None, None)
    );

    let mut left = paused(&LEAVE_NOW);
    left.pass(Duration::from_secs(1));
    assert_eq!(hand_over(&mut left)[0], (4096, 8));
}

#[test]
fn a_disk_that_is_being_compared_may_leave_without_that() {
    let options = MigrationOptions {
        verify: true,
        ..plain()
    };
    let mut source = a_quarter_has_left(options);
    while source.compared.is_empty() {
        source.pass(Duration::from_millis(10));
    }
    source.hold_reads = true;
    source.pass(Duration::from_millis(10));
    assert_eq!(source.core.change_migration(source.now, &LEAVE_NOW), Ok(()));
    source.hold_reads = false;
    source.pass(Duration::from_millis(50));
    assert_eq!(hand_over(&mut source), []);
    let progress = source.core.progress().expect("it leaves");
    assert!(!progress.verified);
}

#[test]
fn a_migration_goes_as_fast_as_it_may_now() {
    let half = |per_second| {
        let mut source = a_quarter_has_left(plain());
        let before = copied(&source);
        let other = MigrationChange {
            max_bandwidth: Some(per_second),
            ..MigrationChange::default()
        };
        let changed = source.core.change_migration(source.now, &other);
        assert_eq!(changed, Ok(()));
        source.pass(QUARTER);
        u64::from(copied(&source) - before) * 512
    };
    let slow = half(Some(10 << 20));
    assert!((20 << 20..36 << 20).contains(&slow), "{slow}");
    assert!(half(None) > 700 << 20);
}

#[test]
fn what_cannot_be_changed_is_refused_and_changes_nothing() {
    let mut source = a_quarter_has_left(plain());
    let nothing_at_all = MigrationChange {
        max_bandwidth: Some(Some(0)),
        ..LEAVE_NOW
    };
    let refused = source.core.change_migration(source.now, &nothing_at_all);
    assert_eq!(refused, Err(ChangeError::Option("bandwidth")));
    source.pass(ALL);
    assert!(source.converged);
    assert_eq!(copied(&source), CAPACITY, "it was copied whole");
    assert_eq!(hand_over(&mut source), []);
    let late = source.core.change_migration(source.now, &LEAVE_NOW);
    assert_eq!(late, Err(ChangeError::TooLate));
    assert!(source.core.cancel(source.now, AbortReason::Cancelled));
    let none = source.core.change_migration(source.now, &LEAVE_NOW);
    assert_eq!(none, Err(ChangeError::NoMigration));
}
