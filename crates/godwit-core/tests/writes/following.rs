//! A disk that stays while its destination follows: every acknowledged write is at both nodes, and a lost destination
//! holds all answers.

use std::time::Duration;

use crate::acknowledge::acknowledge;
use crate::support::{Sent, Source};
use godwit_core::authority::Ownership;
use godwit_core::event::AbortReason;
use godwit_core::request::{Operation, RequestError};
use godwit_core::units::{Epoch, Extent, Lba, MigrationId};
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{MigrationOptions, StartError, Switchover};

const MIGRATION: MigrationId = MigrationId([1; 16]);
const MOMENT: Duration = Duration::from_millis(1);

fn options() -> MigrationOptions {
    MigrationOptions {
        switchover: Switchover::Never { checkpoints: false },
        peer_timeout: Duration::from_secs(60),
        ..MigrationOptions::new(MIGRATION)
    }
}

fn block(number: u64) -> Extent {
    Extent::new(Lba(number * 8), 8).expect("an extent")
}

fn write(source: &mut Source, tag: u32) {
    let extent = block(u64::from(tag));
    source.ask(tag, Operation::Write { extent, fua: false });
    source.pass(MOMENT);
}

fn read(source: &mut Source, tag: u32) {
    source.ask(tag, Operation::Read(block(1000)));
    source.pass(MOMENT);
}

/// Returns a source whose destination follows.
fn followed() -> Source {
    followed_with(options())
}

fn followed_with(options: MigrationOptions) -> Source {
    let mut source = Source::leaving(options);
    source.pass(Duration::from_millis(50));
    assert!(source.followed);
    source
}

/// Returns a source that has lost its follower, while the write of tag 0 waits for the destination.
fn severed() -> Source {
    let mut source = followed();
    write(&mut source, 0);
    let now = source.now;
    source.core.handle_connection_lost(now, TrafficClass::Sync);
    source.pass(MOMENT);
    assert_eq!(source.severed, Some(AbortReason::PeerLost));
    source
}

#[test]
fn a_followed_write_is_answered_once_the_destination_has_it() {
    let mut source = followed();
    write(&mut source, 0);
    assert_eq!(source.answered, 0);
    acknowledge(&mut source, 0);
    source.pass(MOMENT);
    assert_eq!(source.answered, 1);
    read(&mut source, 1);
    assert_eq!(source.answered, 2, "a read waits for nobody");
}

#[test]
fn the_destination_is_asked_to_follow_once_it_has_acknowledged_every_write() {
    let mut source = Source::leaving(MigrationOptions {
        // The guest has time to write while everything is copied.
        max_bandwidth: Some(1 << 30),
        ..options()
    });
    source.pass(Duration::from_millis(100));
    write(&mut source, 0);
    assert_eq!(source.answered, 1, "the write is posted");
    source.pass(Duration::from_secs(3));
    assert!(source.converged && !source.followed);
    acknowledge(&mut source, 0);
    source.pass(MOMENT);
    assert!(source.followed);
}

#[test]
fn a_source_that_lost_its_follower_answers_nothing_until_it_may_go_on_alone() {
    let mut source = severed();
    read(&mut source, 1);
    write(&mut source, 2);
    source.pass(Duration::from_secs(300));
    assert_eq!(source.answered, 0);
    let now = source.now;
    source.core.go_alone(now);
    source.pass(MOMENT);
    assert_eq!((source.answered, source.failed.len()), (3, 0));
    assert!(!source.core.is_leaving());
    write(&mut source, 3);
    assert_eq!(source.answered, 4, "nobody is waited for");
}

#[test]
fn a_read_that_the_disk_finishes_after_the_loss_is_not_answered() {
    let mut source = followed();
    source.hold_requests = true;
    read(&mut source, 1);
    let now = source.now;
    source
        .core
        .handle_connection_lost(now, TrafficClass::Control);
    source.hold_requests = false;
    source.pass(MOMENT);
    assert_eq!(source.answered, 0);
}

#[test]
fn a_read_that_may_have_seen_a_write_waits_for_the_write_s_acknowledgement() {
    let mut source = followed();
    source.hold_requests = true;
    source.ask(1, Operation::Read(block(0)));
    source.pass(MOMENT);
    write(&mut source, 0);
    source.hold_requests = false;
    source.pass(MOMENT);
    assert_eq!(source.answered, 0);
    acknowledge(&mut source, 0);
    source.pass(MOMENT);
    assert_eq!((source.answered, source.failed.len()), (2, 0));
}

#[test]
fn a_silent_follower_is_a_lost_one() {
    let mut source = Source::leaving(MigrationOptions {
        peer_timeout: Duration::from_secs(1),
        ..options()
    });
    source.pass(Duration::from_millis(50));
    write(&mut source, 0);
    source.pass(Duration::from_secs(3));
    assert_eq!(source.severed, Some(AbortReason::PeerTimeout));
    assert_eq!(source.answered, 0);
}

#[test]
fn a_destination_that_gives_up_is_a_lost_one() {
    let mut source = followed();
    let message = Message::Abort {
        migration: MIGRATION,
        reason: AbortReason::DestinationDisk,
    };
    let now = source.now;
    let class = TrafficClass::Control;
    source.core.handle_message(now, class, message, None);
    source.pass(MOMENT);
    assert_eq!(source.severed, Some(AbortReason::DestinationDisk));
}

#[test]
fn a_source_that_yields_fails_what_it_held_once_that_is_stored() {
    let mut source = severed();
    read(&mut source, 1);
    let now = source.now;
    assert!(!source.core.yield_to(now, Epoch(1)), "no later epoch");
    assert!(source.core.yield_to(now, Epoch(2)));
    source.pass(MOMENT);
    let stored = source.storing.expect("it is to be stored");
    assert_eq!(
        (stored.epoch, stored.ownership),
        (Epoch(2), Ownership::Vacant)
    );
    assert_eq!(source.answered, 0, "nothing is answered before");
    source.core.handle_persisted(now);
    source.pass(MOMENT);
    assert_eq!(source.failed, [RequestError::NotServing; 2]);
    source.core.go_alone(source.now);
    write(&mut source, 2);
    assert_eq!(source.failed.len(), 3, "the disk is elsewhere");
}

#[test]
fn what_the_disk_of_a_source_that_yielded_finishes_late_fails() {
    let mut source = followed();
    source.hold_requests = true;
    write(&mut source, 0);
    let now = source.now;
    source.core.handle_connection_lost(now, TrafficClass::Sync);
    assert!(source.core.yield_to(now, Epoch(2)));
    source.core.handle_persisted(now);
    let again = |source: &mut Source| {
        let timeout = Duration::from_secs(10);
        source
            .core
            .start_destination(now, MigrationId([2; 16]), timeout)
    };
    assert_eq!(again(&mut source), Err(StartError::Busy));
    source.hold_requests = false;
    source.pass(MOMENT);
    assert_eq!(source.failed, [RequestError::NotServing]);
    assert_eq!(again(&mut source), Ok(()));
}

#[test]
fn a_process_that_starts_again_can_hold_its_answers() {
    let mut source = Source::staying();
    let now = source.now;
    source.core.hold(now);
    write(&mut source, 0);
    read(&mut source, 1);
    assert_eq!(source.answered, 0);
    source.core.go_alone(source.now);
    source.pass(MOMENT);
    assert_eq!((source.answered, source.failed.len()), (2, 0));
}

#[test]
fn a_disk_that_stays_is_not_handed_over() {
    let mut source = followed();
    let now = source.now;
    assert!(!source.core.switch_over(now));
    let class = TrafficClass::Control;
    let arrived = Message::GuestArrived {
        migration: MIGRATION,
    };
    source.core.handle_message(now, class, arrived, None);
    source.pass(MOMENT);
    assert!(!source.asked_to_accept);
}

#[test]
fn a_mark_divides_the_writes_of_a_source_with_checkpoints() {
    let mut source = followed_with(MigrationOptions {
        switchover: Switchover::Never { checkpoints: true },
        ..options()
    });
    assert!(source.checkpoints);
    source.sent.clear();
    let now = source.now;
    write(&mut source, 0);
    assert!(source.core.mark_checkpoint(now, 1, 0));
    write(&mut source, 1);
    assert!(source.core.mark_checkpoint(now, 2, 1));
    source.pass(MOMENT);
    let sent = [
        Sent::DoubleWrite,
        Sent::Mark(1),
        Sent::DoubleWrite,
        Sent::Mark(2),
    ];
    assert_eq!(source.sent, sent);
    for wrong in [0, 1, 2, 4, u64::MAX] {
        assert!(!source.core.mark_checkpoint(now, wrong, 1), "{wrong}");
    }
    source.core.handle_connection_lost(now, TrafficClass::Sync);
    assert!(!source.core.mark_checkpoint(now, 3, 1), "nobody follows");
}

#[test]
fn only_a_source_that_is_followed_with_checkpoints_marks_them() {
    let mut source = Source::leaving(MigrationOptions {
        switchover: Switchover::Never { checkpoints: true },
        ..options()
    });
    assert!(!source.core.mark_checkpoint(source.now, 1, 0));
    let mut source = followed();
    assert!(!source.checkpoints);
    assert!(!source.core.mark_checkpoint(source.now, 1, 0));
}
