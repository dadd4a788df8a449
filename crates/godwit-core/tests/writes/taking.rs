//! A destination that follows keeps what it has received, and takes the disk without its source's word.

use std::time::Duration;

use crate::receiving::{Destination, MIGRATION};
use godwit_core::StartError;
use godwit_core::action::DiskTag;
use godwit_core::authority::Ownership;
use godwit_core::event::AbortReason;
use godwit_core::request::RequestError;
use godwit_core::units::{Epoch, Time};
use godwit_core::wire::{Message, TrafficClass};

const LATER: Time = Time(3_600_000_000_000);

/// Returns a destination that follows a source in epoch 1.
fn following() -> Destination {
    let mut destination = Destination::receiving();
    follow(&mut destination, Epoch(1));
    let follows = Message::Follows {
        migration: MIGRATION,
    };
    assert_eq!(destination.said, [follows]);
    destination.said.clear();
    destination
}

fn follow(destination: &mut Destination, epoch: Epoch) {
    let message = Message::Follow {
        migration: MIGRATION,
        epoch,
        checkpoints: false,
    };
    destination.hear(TrafficClass::Control, message, None);
}

/// Takes the disk, up to the end of the flush.
fn take(destination: &mut Destination) {
    assert!(destination.controller.sever(Time(0)));
    assert_eq!(destination.controller.take(Time(0)), Ok(()));
    destination.carry_out();
}

#[test]
fn the_disk_is_taken_once_all_that_was_acknowledged_is_durable_and_served_once_that_is_stored() {
    let mut destination = following();
    destination.double_write(3);
    assert_eq!(destination.take_acknowledged(), [3]);
    take(&mut destination);
    assert_eq!(destination.flushes, 0, "a write is under way");
    destination.finish_write(Ok(()));
    assert_eq!((destination.flushes, destination.storing), (1, None));
    destination.finish_flush();
    let record = destination.storing.expect("it is to be stored");
    assert_eq!(
        (record.epoch, record.ownership),
        (Epoch(2), Ownership::Serving)
    );
    assert!(!destination.controller.serves());
    destination.finish_store();
    assert!(destination.controller.serves());
}

#[test]
fn a_follower_outlives_its_source_s_connections_and_silence() {
    let mut destination = following();
    for class in [TrafficClass::Sync, TrafficClass::Control] {
        destination
            .controller
            .handle_connection_lost(Time(0), class);
    }
    destination.controller.handle_timer(LATER);
    destination.carry_out();
    assert_eq!(destination.aborted, None);
    take(&mut destination);
    destination.finish_flush();
    assert!(destination.storing.is_some());
}

#[test]
fn a_destination_that_does_not_follow_cannot_take_the_disk() {
    let mut destination = Destination::receiving();
    assert!(!destination.controller.sever(Time(0)));
    assert_eq!(destination.controller.take(Time(0)), Err(StartError::Busy));
    follow(&mut destination, Epoch(1));
    let unsevered = destination.controller.take(Time(0));
    assert_eq!(unsevered, Err(StartError::Busy));
}

#[test]
fn nothing_is_taken_from_a_source_that_is_severed() {
    let mut destination = following();
    assert!(destination.controller.sever(Time(0)));
    destination.double_write(3);
    assert!(destination.said.is_empty() && destination.writing.is_empty());
    assert_eq!(destination.released.len(), 1);
}

#[test]
fn a_disk_that_cannot_be_made_durable_is_not_taken() {
    let mut destination = following();
    take(&mut destination);
    let failed = Err(RequestError::Io);
    destination
        .controller
        .handle_disk_done(Time(0), DiskTag::Barrier, failed);
    destination.carry_out();
    assert_eq!(destination.aborted, Some(AbortReason::DestinationDisk));
    assert_eq!(destination.storing, None);
    let timeout = Duration::from_secs(1);
    let again = destination
        .controller
        .start_destination(Time(0), MIGRATION, timeout);
    assert_eq!(again, Ok(()), "a later migration may bring the disk");
}

#[test]
fn a_taking_ends_by_an_order_while_nothing_is_being_stored_and_with_a_record_that_is_not_stored() {
    let mut destination = following();
    take(&mut destination);
    let reason = AbortReason::Cancelled;
    assert!(destination.controller.cancel(Time(0), reason));
    destination.finish_flush();
    assert_eq!(
        (destination.aborted, destination.storing),
        (Some(reason), None)
    );
    let mut destination = following();
    take(&mut destination);
    destination.finish_flush();
    assert!(!destination.controller.cancel(Time(0), reason));
    assert!(destination.controller.handle_not_persisted(Time(0), reason));
    destination.carry_out();
    assert_eq!(destination.aborted, Some(reason));
    assert!(!destination.controller.serves());
}

#[test]
fn an_acknowledged_write_that_fails_ends_the_following() {
    let mut destination = following();
    destination.double_write(3);
    destination.finish_write(Err(RequestError::Io));
    assert_eq!(destination.aborted, Some(AbortReason::DestinationDisk));
    assert_eq!(destination.controller.take(Time(0)), Err(StartError::Busy));
}

#[test]
fn a_follower_neither_accepts_the_disk_nor_follows_an_earlier_epoch() {
    let mut destination = following();
    destination.prepare();
    assert_eq!(destination.aborted, Some(AbortReason::Protocol));
    let mut destination = Destination::behind(Epoch(5));
    follow(&mut destination, Epoch(4));
    assert_eq!(destination.aborted, Some(AbortReason::Protocol));
}

#[test]
fn an_order_to_end_ends_a_following() {
    let mut destination = following();
    let cancelled = destination
        .controller
        .cancel(Time(0), AbortReason::Cancelled);
    destination.carry_out();
    assert!(cancelled);
    assert_eq!(destination.aborted, Some(AbortReason::Cancelled));
}
