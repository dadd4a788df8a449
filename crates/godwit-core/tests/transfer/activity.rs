//! The activity log of a disk that is followed, and the return of a former primary by its log.

use std::time::Duration;

use godwit_core::action::{Action, DiskTag};
use godwit_core::authority::AuthorityRecord;
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::{Epoch, Extent, Lba, MigrationId, Sectors, Time};
use godwit_core::wire::TrafficClass;
use godwit_core::{AREA_SECTORS, ActiveAreas, Controller, MAX_AREAS, MigrationOptions, Switchover};
use godwit_core::{OlderCopy, Written};

use crate::acknowledge::acknowledge;
use crate::support::{LIMITS, Source};

const MIGRATION: MigrationId = MigrationId([1; 16]);
const MOMENT: Duration = Duration::from_millis(1);

/// Returns a source whose destination follows.
fn followed(checkpoints: bool) -> Source {
    let mut source = Source::leaving(MigrationOptions {
        switchover: Switchover::Never { checkpoints },
        peer_timeout: Duration::from_secs(60),
        ..MigrationOptions::new(MIGRATION)
    });
    source.pass(Duration::from_millis(50));
    assert!(source.followed);
    source
}

/// Writes to an area, with the area's number as the tag.
fn write(source: &mut Source, area: u32) {
    let start = Lba(u64::from(area) * u64::from(AREA_SECTORS));
    let extent = Extent::new(start, 8).expect("an extent");
    source.ask(area, Operation::Write { extent, fua: false });
    source.pass(MOMENT);
}

/// Writes to an area, and lets the follower acknowledge the write.
fn write_there(source: &mut Source, area: u32) {
    write(source, area);
    acknowledge(source, area);
    source.pass(MOMENT);
}

/// Returns the areas of the last stored log.
fn stored(source: &Source) -> Option<&[u32]> {
    let log = source.logged.last().expect("a log was stored").as_ref()?;
    assert_eq!(log.of, MIGRATION);
    Some(&log.areas)
}

#[test]
fn a_disk_is_followed_once_its_log_is_stored() {
    let mut source = Source::leaving(MigrationOptions {
        switchover: Switchover::Never { checkpoints: false },
        ..MigrationOptions::new(MIGRATION)
    });
    source.hold_log = true;
    source.pass(Duration::from_millis(50));
    assert_eq!(stored(&source), Some(&[][..]));
    assert!(!source.followed);
    source.core.handle_activity_stored(source.now, true);
    source.pass(MOMENT);
    assert!(source.followed);
}

#[test]
fn a_write_to_another_area_waits_for_the_log() {
    let mut source = followed(false);
    source.hold_log = true;
    write(&mut source, 3);
    assert!(source.doubled.is_empty(), "the write has not begun");
    assert_eq!(stored(&source), Some(&[3][..]));
    source.core.handle_activity_stored(source.now, true);
    source.pass(MOMENT);
    assert_eq!(source.doubled.len(), 1);
    acknowledge(&mut source, 3);
    let stores = source.logged.len();
    write_there(&mut source, 3);
    assert_eq!(source.answered, 2);
    assert_eq!(source.logged.len(), stores, "the area is in the log");
}

#[test]
fn areas_are_forgotten_once_their_writes_are_answered_and_durable() {
    let mut source = followed(false);
    (0..3).for_each(|area| write_there(&mut source, area));
    // The turn comes with the fourth area, whose write is unanswered.
    write(&mut source, 4);
    assert_eq!(stored(&source), Some(&[0, 1, 2, 4][..]));
    write(&mut source, 5);
    assert_eq!(stored(&source), Some(&[4, 5][..]));
}

#[test]
fn areas_of_a_checkpoint_are_forgotten_once_the_follower_has_it() {
    let mut source = followed(true);
    (0..4).for_each(|area| write_there(&mut source, area));
    let mark = |source: &mut Source, number, whole| {
        assert!(source.core.mark_checkpoint(source.now, number, whole));
        source.pass(MOMENT);
    };
    mark(&mut source, 1, 0);
    write_there(&mut source, 5);
    mark(&mut source, 2, 0);
    write_there(&mut source, 6);
    assert_eq!(stored(&source), Some(&[0, 1, 2, 3, 5, 6][..]));
    mark(&mut source, 3, 1);
    write_there(&mut source, 7);
    assert_eq!(stored(&source), Some(&[5, 6, 7][..]));
}

#[test]
fn a_source_that_goes_on_alone_has_no_log_before_it_writes_elsewhere() {
    let mut source = followed(false);
    write(&mut source, 1);
    let now = source.now;
    source.core.handle_connection_lost(now, TrafficClass::Sync);
    source.pass(MOMENT);
    source.hold_log = true;
    source.core.go_alone(now);
    source.pass(MOMENT);
    assert_eq!(stored(&source), None);
    assert_eq!(source.answered, 1);
    write(&mut source, 2);
    assert_eq!(source.answered, 1, "the log is not gone yet");
    source.core.handle_activity_stored(source.now, true);
    source.pass(MOMENT);
    assert_eq!(source.answered, 2);
}

#[test]
fn a_log_that_cannot_be_stored_is_given_up() {
    let mut source = followed(false);
    source.hold_log = true;
    write(&mut source, 1);
    source.core.handle_activity_stored(source.now, false);
    source.pass(MOMENT);
    acknowledge(&mut source, 1);
    write(&mut source, 2);
    acknowledge(&mut source, 2);
    source.pass(MOMENT);
    assert_eq!(source.answered, 2);
    assert_eq!(source.logged.len(), 2, "nothing more is stored");
}

#[test]
fn a_yielded_disk_keeps_its_log() {
    let mut source = followed(false);
    write(&mut source, 1);
    let (now, stores) = (source.now, source.logged.len());
    source.core.handle_connection_lost(now, TrafficClass::Sync);
    assert!(source.core.yield_to(now, Epoch(2)));
    source.core.handle_persisted(now);
    source.pass(MOMENT);
    assert_eq!(source.failed, [RequestError::NotServing]);
    assert_eq!(source.logged.len(), stores);
    assert_eq!(stored(&source), Some(&[1][..]));
}

#[test]
fn a_log_outlasts_its_process_and_grows_in_the_next_one() {
    let mut source = Source::staying();
    source.core.restore_activity(&ActiveAreas {
        of: MIGRATION,
        areas: vec![2, 9],
    });
    write(&mut source, 2);
    assert!(source.logged.is_empty());
    write(&mut source, 5);
    assert_eq!(stored(&source), Some(&[2, 5, 9][..]));
    source.core.go_alone(source.now);
    source.pass(MOMENT);
    assert_eq!(stored(&source), None);
}

#[test]
fn a_log_with_too_many_areas_is_not_stored() {
    let areas = 0..2 * MAX_AREAS as u32;
    let capacity = Sectors(u64::from(AREA_SECTORS) * u64::from(areas.end));
    let mut core = Controller::new(LIMITS, capacity, AuthorityRecord::created());
    core.restore_activity(&ActiveAreas {
        of: MIGRATION,
        areas: (0..MAX_AREAS as u32).collect(),
    });
    let extent = Extent::new(Lba(capacity.0 - 8), 8).expect("an extent");
    core.handle_request(
        Time(1),
        Request {
            tag: RequestTag(0),
            origin: Origin::Client,
            operation: Operation::Write { extent, fua: false },
        },
    );
    assert_eq!(core.poll_action(), Some(Action::StoreActivity));
    assert_eq!(core.activity_to_store(), None);
    core.handle_activity_stored(Time(2), true);
    assert!(matches!(
        core.poll_action(),
        Some(Action::Disk {
            tag: DiskTag::Request(_),
            ..
        })
    ));
}

#[test]
fn the_owner_sends_the_areas_of_the_log_and_its_own_writes() {
    let log = ActiveAreas {
        of: MIGRATION,
        // The last area is behind the end of the disk.
        areas: vec![1, 9999],
    };
    let sent = |since: MigrationId| {
        let mut source = Source::staying();
        let capacity = Sectors(2 << 20);
        let mut words = vec![0; Written::word_length(capacity)];
        words[0] = 1;
        let written = Written::from_words(since, capacity, &words).expect("it fits");
        source.core.restore_written(written);
        source.core.may_differ(&log);
        let options = MigrationOptions {
            older_copy: OlderCopy::Since(log.of),
            ..MigrationOptions::new(MigrationId([2; 16]))
        };
        source
            .core
            .start_source(source.now, options)
            .expect("it starts");
        source.pass(Duration::from_millis(50));
        let copied: u32 = source.copies.iter().sum();
        (copied, source.compared.len())
    };
    assert_eq!(sent(MIGRATION), (AREA_SECTORS + 8, 0));
    let (_, compared) = sent(MigrationId([3; 16]));
    assert!(compared > 0, "another migration brought the disk");
}
