//! A destination that follows with checkpoints keeps the writes behind each checkpoint apart, and takes the disk as of the
//! last checkpoint that was to be applied.

use std::time::Duration;

use crate::receiving::{Destination, MIGRATION, extent};
use godwit_core::StartError;
use godwit_core::action::{ChunkSlot, DelayedSlot, DiskOperation};
use godwit_core::event::AbortReason;
use godwit_core::request::{RequestError, RequestTag};
use godwit_core::units::{Epoch, Extent, Generation, Lba, MigrationId, Time};
use godwit_core::wire::{Message, TrafficClass};

/// Returns a destination that follows with checkpoints, or without them.
fn following(checkpoints: bool) -> Destination {
    let mut destination = Destination::receiving();
    let message = Message::Follow {
        migration: MIGRATION,
        epoch: Epoch(1),
        checkpoints,
    };
    destination.hear(TrafficClass::Control, message, None);
    destination.said.clear();
    destination
}

/// Returns a destination with checkpoint 1 on its disk.
fn at_first() -> Destination {
    let mut destination = following(true);
    mark(&mut destination, 1);
    apply(&mut destination, 1);
    applied(&mut destination, Ok(()));
    destination
}

fn mark(destination: &mut Destination, number: u64) {
    let migration = MIGRATION;
    let message = Message::CheckpointMark { migration, number };
    destination.hear(TrafficClass::Sync, message, None);
}

fn apply(destination: &mut Destination, number: u64) {
    let may = destination.controller.apply_checkpoints(Time(0), number);
    assert!(may, "checkpoint {number} is here");
    destination.carry_out();
}

fn applied(destination: &mut Destination, result: Result<(), RequestError>) {
    destination.applying.take().expect("something is applied");
    destination.controller.handle_kept_applied(Time(0), result);
    destination.carry_out();
}

/// Takes the disk, up to what has to be waited for.
fn take(destination: &mut Destination) -> Result<(), StartError> {
    assert!(destination.controller.sever(Time(0)));
    let taken = destination.controller.take(Time(0));
    destination.carry_out();
    taken
}

fn kept(block: u32, epoch: u64) -> DiskOperation {
    let extent = extent(block);
    DiskOperation::Keep { extent, epoch }
}

#[test]
fn a_write_behind_a_checkpoint_is_kept_and_acknowledged_and_not_written() {
    let mut destination = at_first();
    destination.double_write(3);
    let zeroes = Message::DoubleWrite {
        tag: RequestTag(4),
        turn: 0,
        generation: Generation(0),
        extent: extent(4),
        zeroes: true,
        unmap: true,
    };
    destination.hear(TrafficClass::Sync, zeroes, Some(4));
    assert_eq!(destination.take_acknowledged(), [3, 4]);
    assert_eq!(destination.released.len(), 2);
    assert!(destination.writing.is_empty());
    let zeroes = DiskOperation::KeepZeroes {
        extent: extent(4),
        unmap: true,
        epoch: 2,
    };
    assert_eq!(destination.kept, [kept(3, 2), zeroes]);
}

#[test]
fn overlapping_writes_are_kept_in_the_order_in_which_they_came() {
    let mut destination = at_first();
    destination.double_write(3);
    mark(&mut destination, 2);
    destination.double_write(3);
    destination.double_write(3);
    assert_eq!(destination.kept, [kept(3, 2), kept(3, 3), kept(3, 3)]);
    assert_eq!(destination.marked, [1, 2]);
}

#[test]
fn a_checkpoint_is_told_of_once_every_write_before_its_mark_is_here() {
    let mut destination = following(true);
    destination.double_write(3);
    assert_eq!(destination.writing.len(), 1, "the first epoch is not kept");
    mark(&mut destination, 1);
    destination.double_write(4);
    mark(&mut destination, 2);
    assert_eq!(destination.kept, [kept(4, 2)]);
    assert!(destination.marked.is_empty());
    let early = destination.controller.apply_checkpoints(Time(0), 1);
    assert!(!early, "a write may be older than what is kept");
    destination.finish_write(Ok(()));
    assert_eq!(destination.marked, [1, 2]);
}

#[test]
fn only_what_is_here_is_applied_one_order_after_the_other() {
    let mut destination = at_first();
    mark(&mut destination, 2);
    mark(&mut destination, 3);
    for wrong in [0, 4, u64::MAX] {
        assert!(!destination.controller.apply_checkpoints(Time(0), wrong));
    }
    apply(&mut destination, 2);
    apply(&mut destination, 3);
    apply(&mut destination, 1);
    assert_eq!(destination.applying, Some(2));
    applied(&mut destination, Ok(()));
    assert_eq!(destination.applying, Some(3));
    applied(&mut destination, Ok(()));
    assert_eq!(destination.applying, None);
}

/// Handles the source's double write of 32 MiB.
fn long_write(destination: &mut Destination, tag: u32) {
    let message = Message::DoubleWrite {
        tag: RequestTag(tag),
        turn: 0,
        generation: Generation(0),
        extent: Extent::new(Lba(0), 1 << 16).expect("an extent"),
        zeroes: false,
        unmap: false,
    };
    destination.hear(TrafficClass::Sync, message, Some(tag));
}

#[test]
fn a_disk_that_falls_behind_its_checkpoints_is_waited_for() {
    let mut destination = at_first();
    (1..4).for_each(|tag| long_write(&mut destination, tag));
    assert_eq!(destination.take_acknowledged(), [1, 2, 3]);
    mark(&mut destination, 2);
    apply(&mut destination, 2);
    (4..8).for_each(|tag| long_write(&mut destination, tag));
    assert_eq!(destination.take_acknowledged(), [4, 5]);
    mark(&mut destination, 3);
    assert_eq!((destination.marked.len(), destination.kept.len()), (2, 7));
    applied(&mut destination, Ok(()));
    assert_eq!(destination.take_acknowledged(), [6, 7]);
    assert_eq!(destination.marked, [1, 2, 3]);
    apply(&mut destination, 3);
    long_write(&mut destination, 8);
    assert_eq!(destination.take_acknowledged(), [8], "there is room again");
}

#[test]
fn a_write_that_was_waited_for_is_dropped_with_its_epoch() {
    let mut destination = at_first();
    mark(&mut destination, 2);
    apply(&mut destination, 2);
    (4..8).for_each(|tag| long_write(&mut destination, tag));
    assert_eq!(destination.take_acknowledged(), [4, 5]);
    assert_eq!(take(&mut destination), Ok(()));
    applied(&mut destination, Ok(()));
    assert!(destination.said.is_empty(), "nobody hears an answer");
    assert_eq!((destination.drops, destination.flushes), (1, 1));
}

#[test]
fn a_taken_disk_has_nothing_of_an_epoch_that_was_not_to_be_applied() {
    let mut destination = at_first();
    destination.double_write(3);
    mark(&mut destination, 2);
    destination.double_write(4);
    assert_eq!(take(&mut destination), Ok(()));
    assert_eq!((destination.drops, destination.flushes), (1, 1));
    assert!(!destination.controller.apply_checkpoints(Time(0), 2));
    destination.finish_flush();
    destination.finish_store();
    assert!(destination.controller.serves());
    assert_eq!((destination.applying, destination.drops), (None, 1));
}

#[test]
fn a_taken_disk_waits_for_all_that_was_to_be_applied() {
    let mut destination = at_first();
    (2..=3).for_each(|number| mark(&mut destination, number));
    apply(&mut destination, 2);
    apply(&mut destination, 3);
    assert_eq!(take(&mut destination), Ok(()));
    applied(&mut destination, Ok(()));
    assert_eq!((destination.drops, destination.flushes), (0, 0));
    applied(&mut destination, Ok(()));
    assert_eq!((destination.drops, destination.flushes), (1, 1));
}

#[test]
fn a_disk_without_a_checkpoint_is_not_taken() {
    let mut destination = following(true);
    mark(&mut destination, 1);
    assert_eq!(take(&mut destination), Err(StartError::Busy));
}

#[test]
fn a_checkpoint_that_cannot_be_applied_ends_the_following_or_the_taking() {
    for takes in [false, true] {
        let mut destination = at_first();
        (2..=3).for_each(|number| mark(&mut destination, number));
        destination.said.clear();
        apply(&mut destination, 2);
        apply(&mut destination, 3);
        if takes {
            assert_eq!(take(&mut destination), Ok(()));
        }
        applied(&mut destination, Err(RequestError::Io));
        let reason = AbortReason::DestinationDisk;
        assert_eq!(destination.aborted, Some(reason));
        let migration = MIGRATION;
        let abort = Message::Abort { migration, reason };
        let told: &[_] = if takes { &[] } else { &[abort] };
        assert_eq!(destination.said, told);
        assert_eq!((destination.applying, destination.drops), (None, 1));
        assert_eq!((destination.flushes, destination.storing), (0, None));
    }
}

#[test]
fn a_write_that_cannot_be_kept_or_written_ends_the_following() {
    let mut destination = at_first();
    destination.keeps_nothing = Some(RequestError::NoSpace);
    destination.double_write(3);
    let full = Some(AbortReason::DestinationNoSpace);
    assert_eq!((destination.aborted, destination.drops), (full, 1));
    mark(&mut destination, 2);
    assert_eq!(destination.marked, [1]);

    let mut destination = following(true);
    // Not all of them are acknowledged before they are written.
    (0..=128).for_each(|block| destination.double_write(block));
    mark(&mut destination, 1);
    (0..128).for_each(|_| destination.finish_write(Ok(())));
    destination.finish_write(Err(RequestError::Io));
    assert_eq!(destination.aborted, Some(AbortReason::DestinationDisk));
    assert!(destination.marked.is_empty());
}

#[test]
fn a_lost_source_leaves_every_checkpoint_that_is_here() {
    let mut destination = at_first();
    destination.double_write(3);
    mark(&mut destination, 2);
    for class in [TrafficClass::Sync, TrafficClass::Control] {
        destination
            .controller
            .handle_connection_lost(Time(0), class);
    }
    destination.carry_out();
    assert!(destination.controller.sever(Time(0)));
    apply(&mut destination, 2);
    assert_eq!((destination.applying, destination.drops), (Some(2), 0));
    assert_eq!(take(&mut destination), Ok(()));
    applied(&mut destination, Ok(()));
    assert_eq!(destination.flushes, 1);
}

#[test]
fn marks_that_are_not_the_next_ones_end_the_following() {
    for wrong in [0, 2, 4, u64::MAX] {
        let mut destination = at_first();
        mark(&mut destination, 2);
        mark(&mut destination, wrong);
        assert_eq!(destination.aborted, Some(AbortReason::Protocol), "{wrong}");
        assert_eq!(destination.marked, [1, 2]);
    }
    for mut unready in [Destination::receiving(), following(false)] {
        mark(&mut unready, 1);
        assert_eq!(unready.aborted, Some(AbortReason::Protocol));
    }
    let mut destination = at_first();
    let foreign = Message::CheckpointMark {
        migration: MigrationId([9; 16]),
        number: 2,
    };
    destination.hear(TrafficClass::Sync, foreign, None);
    assert!(destination.controller.sever(Time(0)));
    mark(&mut destination, 2);
    assert_eq!((destination.aborted, destination.marked.len()), (None, 1));
}

#[test]
fn nothing_but_double_writes_comes_behind_a_checkpoint() {
    let slot = ChunkSlot(1);
    let generation = Generation(0);
    let digest = [0; 32];
    let extent = extent(0);
    let zeroes = false;
    let copy = Message::Copy {
        slot,
        generation,
        extent,
        zeroes,
    };
    let delayed = Message::DelayedWrite {
        slot: DelayedSlot(1),
        generation,
        extent,
        zeroes,
    };
    let verify = Message::Verify {
        slot,
        generation,
        extent,
        digest,
    };
    let hole = Message::VerifyHole {
        slot,
        generation,
        extent,
    };
    for (class, frame) in [
        (TrafficClass::Copy, copy),
        (TrafficClass::Sync, delayed),
        (TrafficClass::Copy, verify),
        (TrafficClass::Copy, hole),
    ] {
        let mut destination = at_first();
        destination.hear(class, frame, Some(0));
        let broken = Some(AbortReason::Protocol);
        assert_eq!((destination.aborted, destination.drops), (broken, 1));
        assert!(destination.writing.is_empty(), "{frame:?}");
    }
}

#[test]
fn the_next_copy_waits_for_what_is_being_applied() {
    let mut destination = at_first();
    mark(&mut destination, 2);
    mark(&mut destination, 3);
    apply(&mut destination, 2);
    apply(&mut destination, 3);
    let reason = AbortReason::Cancelled;
    assert!(destination.controller.cancel(Time(0), reason));
    destination.carry_out();
    assert_eq!(destination.drops, 1);
    let again = |destination: &mut Destination| {
        let timeout = Duration::from_secs(1);
        destination
            .controller
            .start_destination(Time(0), MigrationId([8; 16]), timeout)
    };
    assert_eq!(again(&mut destination), Err(StartError::Busy));
    applied(&mut destination, Ok(()));
    assert_eq!(destination.applying, None, "the rest is dropped");
    assert_eq!(again(&mut destination), Ok(()));
}
