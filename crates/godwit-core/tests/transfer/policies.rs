//! Routes of a guest's writes under each policy.

use std::time::Duration;

use crate::acknowledge::acknowledge;
use crate::support::{Sent, Source};
use godwit_core::action::Content;
use godwit_core::request::Operation;
use godwit_core::units::{Bytes, Extent, Lba, MigrationId};
use godwit_core::{MigrationOptions, PolicyOptions, PushOptions, RoundOptions, Switchover};

/// 1 GiB.
const CAPACITY: u32 = 2 << 20;
/// 64 KiB.
const BLOCK: u32 = 128;
/// Time for a quarter of the disk.
const QUARTER: Duration = Duration::from_millis(2500);
/// Time for the whole disk.
const ALL: Duration = Duration::from_secs(60);

/// Returns a source whose disk leaves at 100 MB/s.
fn leaving(policy: PolicyOptions) -> Source {
    Source::leaving(MigrationOptions {
        policy,
        max_bandwidth: Some(100 << 20),
        switchover: Switchover::WhenTold,
        peer_timeout: Duration::from_secs(600),
        ..MigrationOptions::new(MigrationId([1; 16]))
    })
}

fn pre_copy(most_rounds: u32, most_left: u64) -> PolicyOptions {
    PolicyOptions::PreCopy(RoundOptions {
        block_sectors: BLOCK,
        most_rounds,
        most_left: Bytes(most_left),
    })
}

fn write(source: &mut Source, tag: u32, start: u64) {
    let extent = Extent::new(Lba(start), 8).expect("an extent");
    source.ask(tag, Operation::Write { extent, fua: false });
    source.pass(Duration::ZERO);
}

fn double_writes(source: &Source) -> usize {
    let doubled = |sent: &&Sent| **sent == Sent::DoubleWrite;
    source.sent.iter().filter(doubled).count()
}

fn copied(source: &Source) -> u32 {
    source.copies.iter().sum()
}

#[test]
fn a_write_ahead_of_the_copy_goes_to_both_nodes_only_in_a_mirror() {
    let doubled = |policy| {
        let mut source = leaving(policy);
        source.pass(QUARTER);
        write(&mut source, 0, u64::from(CAPACITY) - 8);
        let ahead = double_writes(&source);
        write(&mut source, 1, 0);
        (ahead, double_writes(&source) - ahead)
    };
    assert_eq!(doubled(PolicyOptions::DoubleWrite), (0, 1));
    assert_eq!(doubled(PolicyOptions::Mirror), (1, 1));
    assert_eq!(doubled(pre_copy(8, 0)), (0, 0));
}

#[test]
fn pre_copy_copies_again_what_was_written_behind_it() {
    let mut source = leaving(pre_copy(8, 0));
    source.pass(QUARTER);
    write(&mut source, 0, 0);
    write(&mut source, 1, 8);
    write(&mut source, 2, 4096);
    write(&mut source, 3, u64::from(CAPACITY) - 8);
    assert_eq!(source.answered, 4, "no write waits for the destination");
    source.pass(ALL);
    assert!(source.converged);
    assert_eq!(copied(&source), CAPACITY + 2 * BLOCK);
    assert_eq!(double_writes(&source), 0);
}

#[test]
fn what_pre_copy_left_is_copied_while_the_guest_stands_still() {
    let left = 4 * u64::from(BLOCK) * 512;
    let mut source = leaving(pre_copy(8, left));
    source.pass(ALL);
    assert!(source.converged);
    for tag in 0..4 {
        write(&mut source, tag, u64::from(tag * BLOCK));
    }
    source.pass(QUARTER);
    assert_eq!(copied(&source), CAPACITY, "it is little enough");
    write(&mut source, 4, u64::from(9 * BLOCK));
    source.pass(QUARTER);
    assert_eq!(copied(&source), CAPACITY + 5 * BLOCK, "now it is not");
    write(&mut source, 5, 0);
    assert!(!source.asked_to_accept);
    assert!(source.core.switch_over(source.now));
    source.pass(QUARTER);
    assert_eq!(copied(&source), CAPACITY + 6 * BLOCK);
    assert!(source.asked_to_accept);
    assert_eq!(double_writes(&source), 0);
}

fn push_pull(threshold: u8, longest_push: Option<Duration>) -> PolicyOptions {
    PolicyOptions::PushPull(PushOptions {
        threshold,
        longest_push,
    })
}

#[test]
fn what_is_written_too_often_is_pushed_no_more_and_stays() {
    let mut source = leaving(push_pull(2, None));
    source.pass(QUARTER);
    for (tag, start) in [(0, 0), (1, 128), (2, 128), (3, 4096)] {
        write(&mut source, tag, start);
    }
    source.pass(ALL);
    assert!(source.converged);
    // The chunks written once are pushed again, the chunk written twice is not.
    assert_eq!(copied(&source), CAPACITY + 2 * 8);
    assert_eq!(double_writes(&source), 0);
    assert!(source.core.switch_over(source.now));
    source.pass(Duration::ZERO);
    assert!(source.asked_to_accept);
    assert_eq!(source.lacks, [(128, 8, 2)]);
    assert_eq!(
        copied(&source),
        CAPACITY + 2 * 8,
        "the guest stands still for nothing"
    );
}

#[test]
fn nothing_is_pushed_by_post_copy_and_everything_stays() {
    let mut source = leaving(push_pull(0, None));
    source.pass(Duration::ZERO);
    assert!(source.converged);
    assert!(source.core.switch_over(source.now));
    source.pass(Duration::ZERO);
    assert!(source.asked_to_accept);
    assert_eq!(
        (copied(&source), &*source.lacks),
        (0, &[(0, CAPACITY, 0)][..])
    );
}

#[test]
fn pushing_ends_when_it_is_ordered_to_or_its_time_is_over() {
    let mut ordered = leaving(push_pull(3, None));
    ordered.pass(QUARTER);
    assert!(!ordered.converged);
    assert!(ordered.core.switch_over(ordered.now));
    ordered.pass(Duration::from_millis(100));
    assert!(ordered.asked_to_accept);
    let mut timed = leaving(push_pull(3, Some(QUARTER)));
    timed.pass(QUARTER + Duration::from_millis(100));
    assert!(timed.converged);
    for source in [ordered, timed] {
        let pushed = copied(&source);
        assert!(pushed > CAPACITY / 8 && pushed < CAPACITY / 2, "{pushed}");
    }
}

#[test]
fn a_place_that_is_written_without_end_is_not_copied_without_end() {
    let mut source = leaving(pre_copy(1, 0));
    source.pass(QUARTER);
    write(&mut source, 0, 0);
    // The guest writes there whenever a chunk is being read.
    source.hold_reads = true;
    let mut written = 0;
    while !source.converged && written < 20_000 {
        source.pass(Duration::from_millis(1));
        if source.core.requests_in_flight() == 0 {
            written += 1;
            write(&mut source, 1 + written % 8, 0);
        }
        for (tag, _) in std::mem::take(&mut source.held) {
            let read = Ok(Content::Data);
            source.core.handle_disk_done(source.now, tag, read);
        }
        source.pass(Duration::ZERO);
        while let Some(&(tag, ..)) = source.doubled.first() {
            acknowledge(&mut source, tag.0);
        }
    }
    assert!(source.converged, "{:?}", source.core.progress());
}

#[test]
fn after_the_last_round_pre_copy_writes_through() {
    let mut source = leaving(pre_copy(1, 0));
    source.pass(QUARTER);
    // A second's worth for the next round.
    for tag in 0..32 {
        write(&mut source, tag % 8, u64::from(tag * 2048));
        source.pass(Duration::from_millis(1));
    }
    while copied(&source) < CAPACITY {
        source.pass(Duration::from_millis(1));
    }
    assert!(!source.converged);
    write(&mut source, 40, 0);
    assert_eq!(double_writes(&source), 1);
    acknowledge(&mut source, 40);
    source.pass(ALL);
    assert!(source.converged);
    assert_eq!(copied(&source), CAPACITY + 32 * BLOCK);
    // Behind this round writes are copied as before.
    write(&mut source, 41, 0);
    assert_eq!(double_writes(&source), 2);
}
