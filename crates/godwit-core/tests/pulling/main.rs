//! The owner's part for a disk whose remainder is still at the node that gave the disk away.

mod bounded;
mod given_back;
mod owner;
mod third_node;
mod two_places;

use std::time::Duration;

use godwit_core::Missing;
use godwit_core::action::{DiskOperation, DiskTag, PULL_SLOTS, PullSlot};
use godwit_core::request::{Operation, RequestError, RequestTag};
use godwit_core::units::{Lba, Sectors, Time};
use godwit_core::wire::{Message, TrafficClass};

use crate::owner::{Owner, extent, lacking, of};

#[test]
fn everything_is_pulled_hottest_first_and_then_the_source_is_not_needed() {
    let mut owner = lacking(&[
        (extent(0, 128), 0),
        (extent(1024, 256), 3),
        (extent(4096, 8), 8),
        (extent(8184, 8), 1),
    ]);
    assert!(owner.core.serves());
    owner.connect();
    let mut order = Vec::new();
    while !owner.asked.is_empty() {
        order.push(owner.send(Ok(())));
    }
    let expected = [
        extent(4096, 8),
        extent(1024, 256),
        extent(8184, 8),
        extent(0, 128),
    ];
    assert_eq!(order, expected);
    assert_eq!(owner.written(), expected);
    assert!(owner.whole && owner.told_whole);
    assert_eq!(owner.core.record().remainder, None);
}

#[test]
fn a_read_of_what_is_here_waits_for_nothing_and_one_of_what_is_missing_goes_first() {
    let mut owner = lacking(&[(extent(0, 7168), 0)]);
    owner.connect();
    let prefetched = owner.asked.len();
    assert!(
        prefetched > 0 && prefetched < usize::from(PULL_SLOTS),
        "slots are left for guests"
    );
    owner.read(1, 7168, 8);
    assert!(owner.answered(1));
    owner.read(2, 7000, 8);
    assert!(!owner.answered(2));
    assert_eq!(owner.asked.len(), prefetched + 1);
    let (slot, wanted) = owner.asked.pop().expect("it was asked for");
    assert!(wanted.overlaps(extent(7000, 8)), "{wanted}");
    // Nothing else is asked for while a request waits.
    owner.send(Ok(()));
    owner.send(Ok(()));
    assert_eq!(owner.asked.len(), prefetched - 2, "{:?}", owner.asked);
    owner.send_in(slot, wanted, Ok(()));
    assert!(owner.answered(2));
    assert!(owner.asked.len() >= prefetched - 2);
}

#[test]
fn a_write_of_whole_blocks_waits_for_nothing_and_what_was_pulled_there_is_dropped() {
    let mut owner = lacking(&[(extent(0, 16), 0)]);
    owner.connect();
    assert_eq!(owner.asked, [(PullSlot(0), extent(0, 16))]);
    owner.write(1, 8, 8);
    assert!(owner.answered(1));
    assert_eq!(owner.noted, [extent(8, 8)]);
    // The guest's newer data is not overwritten, and the rest is pulled.
    owner.send(Ok(()));
    assert_eq!(owner.written(), []);
    assert_eq!(owner.asked, [(PullSlot(0), extent(0, 8))]);
    owner.send(Ok(()));
    assert_eq!(owner.written(), [extent(0, 8)]);
    assert!(owner.whole);
}

#[test]
fn what_was_pulled_waits_for_a_write_that_is_at_the_disk() {
    let mut owner = lacking(&[(extent(0, 16), 0)]);
    owner.connect();
    owner.hold_disk = true;
    owner.write(1, 0, 8);
    owner.send(Ok(()));
    assert_eq!(owner.written(), []);
    owner.finish_disk();
    assert!(owner.answered(1));
    assert_eq!(owner.written(), [], "some of it is here already");
    assert_eq!(owner.asked, [(PullSlot(0), extent(8, 8))]);
}

#[test]
fn a_write_waits_for_what_is_pulled_and_being_written_there() {
    let mut owner = lacking(&[(extent(0, 16), 0)]);
    owner.connect();
    owner.hold_disk = true;
    owner.send(Ok(()));
    assert_eq!(owner.written(), [extent(0, 16)]);
    owner.write(1, 0, 8);
    assert_eq!(owner.held.len(), 1, "the write is not at the disk");
    owner.finish_disk();
    assert!(owner.answered(1));
}

#[test]
fn a_write_to_a_part_of_a_missing_block_waits_for_the_rest() {
    let mut owner = lacking(&[(extent(0, 24), 0)]);
    owner.write(1, 4, 16);
    assert!(!owner.answered(1));
    owner.connect();
    while !owner.asked.is_empty() {
        owner.send(Ok(()));
    }
    assert!(owner.answered(1));
    let written: Vec<_> = owner
        .disk
        .iter()
        .filter(|(_, operation)| matches!(operation, DiskOperation::Write { .. }))
        .map(|(tag, _)| *tag)
        .collect();
    assert_eq!(written.last(), Some(&DiskTag::Request(RequestTag(1))));
}

#[test]
fn discarded_blocks_are_not_pulled() {
    let mut owner = lacking(&[(extent(0, 64), 0)]);
    let discard = Operation::WriteZeroes {
        extent: extent(0, 60),
        fua: false,
        unmap: true,
    };
    owner.ask(1, discard);
    assert!(!owner.answered(1), "it covers the last block in part");
    owner.connect();
    owner.send(Ok(()));
    assert!(owner.answered(1));
    assert!(owner.whole);
}

#[test]
fn a_flush_is_answered_when_it_is_durable_that_what_came_has_come() {
    let mut owner = lacking(&[(extent(0, 64), 0)]);
    owner.ask(0, Operation::Flush);
    assert_eq!(
        owner.stored, 1,
        "what was noted before a restart is not durable"
    );
    owner.ask(1, Operation::Flush);
    assert!(owner.answered(1), "nothing has come");
    assert_eq!(owner.stored, 1);
    owner.write(2, 0, 8);
    owner.hold_store = true;
    owner.ask(3, Operation::Flush);
    assert_eq!(owner.stored, 2);
    // Blocks that arrive during the store are not included: another flush waits for the next store.
    owner.write(4, 8, 8);
    owner.ask(5, Operation::Flush);
    assert!(!owner.answered(3) && !owner.answered(5));
    owner.core.handle_missing_stored(owner.now);
    owner.settle();
    assert!(owner.answered(3) && !owner.answered(5));
    assert_eq!(owner.stored, 3);
    owner.core.handle_missing_stored(owner.now);
    owner.settle();
    assert!(owner.answered(5));
    owner.ask(6, Operation::Flush);
    assert!(owner.answered(6));
    assert_eq!(owner.stored, 3);
    let extent = extent(16, 8);
    owner.ask(7, Operation::Write { extent, fua: true });
    assert!(
        !owner.answered(7),
        "a write that must be durable is like a flush"
    );
}

/// Returns the missing ones of the first 64 blocks as stored for a flush, during which the guest writes this extent.
fn stored_by_a_flush(owner: &mut Owner, start: u64, sectors: u32) -> u64 {
    owner.hold_disk = true;
    owner.ask(8, Operation::Flush);
    let flush = std::mem::take(&mut owner.held);
    owner.hold_disk = false;
    owner.write(9, start, sectors);
    owner.hold_store = true;
    owner.held = flush;
    owner.finish_disk();
    let pieces = owner.core.missing_to_store().expect("it lacks something");
    pieces.first().expect("it has changed").1[0]
}

#[test]
fn what_came_since_the_flush_began_counts_as_missing_when_that_is_stored() {
    let mut owner = lacking(&[(extent(0, 64), 0)]);
    owner.write(1, 0, 8);
    assert_eq!(stored_by_a_flush(&mut owner, 8, 8), 0b1111_1110);
}

#[test]
fn what_was_durable_before_stays_so_beside_what_came_since_the_flush_began() {
    let mut owner = lacking(&[(extent(0, 64), 0)]);
    owner.write(1, 0, 8);
    owner.ask(2, Operation::Flush);
    assert!(owner.answered(2), "its first block is durable");
    owner.write(6, 56, 8);
    // The write covers the durable block and a missing one. Pulled again after a power loss, the durable block would
    // lose flushed data.
    assert_eq!(stored_by_a_flush(&mut owner, 0, 16), 0b0111_1110);
}

#[test]
fn after_a_lost_connection_everything_is_asked_for_again() {
    let mut owner = lacking(&[(extent(0, 16), 0)]);
    owner.connect();
    assert_eq!(owner.asked.len(), 1);
    owner.core.handle_pull_lost(owner.now);
    owner.settle();
    owner.read(1, 0, 8);
    let stale = Message::Pulled {
        slot: PullSlot(0),
        extent: extent(0, 16),
        zeroes: false,
        result: Ok(()),
    };
    assert!(
        !owner
            .core
            .handle_pulled(owner.now, TrafficClass::Pull, stale),
        "nobody asked"
    );
    owner.connect();
    while !owner.asked.is_empty() {
        owner.send(Ok(()));
    }
    assert!(owner.answered(1) && owner.whole);
}

#[test]
fn what_cannot_be_read_at_the_source_fails_those_who_wait_and_is_tried_again() {
    let mut owner = lacking(&[(extent(0, 8), 0)]);
    owner.connect();
    owner.read(1, 0, 8);
    owner.send(Err(RequestError::Io));
    assert_eq!(owner.answers, [(1, Err(RequestError::Io))]);
    assert_eq!(owner.asked, []);
    let at = owner.core.next_deadline().expect("it is tried again");
    assert!(at <= owner.now.after(Duration::from_secs(2)));
    owner.now = at;
    owner.core.handle_timer(at);
    owner.settle();
    owner.send(Ok(()));
    assert!(owner.whole);
}

#[test]
fn who_has_waited_for_too_long_fails_and_everything_else_goes_on() {
    let mut owner = lacking(&[(extent(0, 64), 0)]);
    owner.core.fail_missing_after(Duration::from_secs(5));
    owner.now = Time(1_000_000_000);
    // The source is away.
    owner.read(1, 0, 8);
    owner.now = owner.now.after(Duration::from_secs(2));
    owner.write(2, 60, 8);
    owner.read(3, 72, 8);
    owner.write(4, 8, 8);
    assert!(owner.answered(3) && owner.answered(4));
    let mut ends = Vec::new();
    for _ in 0..2 {
        let at = owner.core.next_deadline().expect("somebody waits");
        owner.now = at;
        owner.core.handle_timer(at);
        owner.settle();
        let answered = owner.answers.last().expect("an answer");
        ends.push((*answered, at));
    }
    let second = |seconds: u64| Time(seconds * 1_000_000_000);
    let failed = Err(RequestError::Io);
    assert_eq!(ends, [((1, failed), second(6)), ((2, failed), second(8))]);
    owner.connect();
    while !owner.asked.is_empty() {
        owner.send(Ok(()));
    }
    assert!(owner.whole);
}

#[test]
fn without_a_bound_who_waits_waits_for_ever() {
    let mut owner = lacking(&[(extent(0, 64), 0)]);
    owner.read(1, 0, 8);
    owner.core.handle_timer(Time(u64::MAX / 2));
    owner.settle();
    assert!(!owner.answered(1));
}

#[test]
fn what_the_other_end_cannot_get_now_is_put_off_and_the_rest_comes() {
    let mut owner = lacking(&[(extent(0, 7168), 0)]);
    owner.connect();
    owner.read(1, 0, 8);
    let mut came = 0;
    let mut tried = 0;
    while !owner.asked.is_empty() {
        if owner.asked[0].1.start() == Lba(0) {
            owner.send(Err(RequestError::NotServing));
            tried += 1;
        } else {
            came += u64::from(owner.send(Ok(())).sectors());
        }
    }
    assert_eq!(tried, 1, "it is not asked for again at once");
    assert!(!owner.answered(1) && !owner.whole);
    let left = owner.core.missing().expect("it lacks a part").bytes().0 / 512;
    assert_eq!(came + left, 7168, "everything else has come");
    assert!(left <= 512, "{left} sectors are missing");
    let at = owner.core.next_deadline().expect("it is tried again");
    assert!(at <= owner.now.after(Duration::from_secs(2)));
    owner.now = at;
    owner.core.handle_timer(at);
    owner.settle();
    owner.send(Ok(()));
    assert!(owner.answered(1));
    while !owner.asked.is_empty() {
        owner.send(Ok(()));
    }
    assert!(owner.whole);
}

#[test]
fn where_nothing_can_be_had_it_is_not_tried_without_end() {
    let mut owner = lacking(&[(extent(0, 8192), 0)]);
    owner.connect();
    let mut tried = 0;
    while !owner.asked.is_empty() {
        owner.send(Err(RequestError::NotServing));
        tried += 1;
        assert!(tried < 1000, "it never rests");
    }
    assert!(owner.core.next_deadline().is_some());
}

#[test]
fn a_request_whose_client_is_gone_waits_no_longer() {
    let mut owner = lacking(&[(extent(0, 8), 0)]);
    owner.read(1, 0, 8);
    owner.core.handle_client_left(owner.now, [RequestTag(1)]);
    owner.settle();
    assert!(owner.answered(1));
}

#[test]
fn a_last_block_that_the_disk_cuts_short_is_pulled_and_covered_like_any_other() {
    let mut words = vec![0; Missing::word_length(Sectors(21))];
    words[0] = 0b100;
    for writes in [false, true] {
        let mut owner = of(Sectors(21), &words, &[0]);
        owner.read(1, 17, 2);
        owner.connect();
        assert_eq!(owner.asked, [(PullSlot(0), extent(16, 5))]);
        if writes {
            owner.write(2, 16, 5);
            assert!(owner.answered(2) && owner.answered(1));
        }
        owner.send(Ok(()));
        assert!(owner.answered(1) && owner.whole);
    }
}

#[test]
fn what_the_source_sends_unasked_is_refused() {
    let mut owner = lacking(&[(extent(0, 64), 0)]);
    owner.connect();
    for (slot, part) in [
        (PullSlot(0), extent(0, 8)),
        (PullSlot(5), extent(0, 64)),
        (PullSlot(PULL_SLOTS), extent(0, 64)),
    ] {
        let message = Message::Pulled {
            slot,
            extent: part,
            zeroes: true,
            result: Ok(()),
        };
        assert!(
            !owner
                .core
                .handle_pulled(owner.now, TrafficClass::Pull, message)
        );
    }
}
