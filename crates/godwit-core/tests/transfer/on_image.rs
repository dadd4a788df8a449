//! The source's part in a move of a disk without its image.

use std::time::Duration;

use crate::support::Source;
use godwit_core::action::Action;
use godwit_core::authority::AuthorityRecord;
use godwit_core::request::{Operation, RequestError};
use godwit_core::units::{Extent, Lba, MigrationId};
use godwit_core::{
    Controller, DOUBLE_WRITE, ImageOffer, MigrationChange, MigrationOptions, Missing, POST_COPY,
    PRE_COPY, PUSH_PULL, PolicyOptions, PushOptions, StartError, Switchover,
};

/// Sectors of the disk: 1 GiB.
const CAPACITY: u64 = 2 << 20;
const MOMENT: Duration = Duration::from_secs(5);

fn options(policy: PolicyOptions) -> MigrationOptions {
    MigrationOptions {
        policy,
        image: ImageOffer::OnePlace,
        switchover: Switchover::WhenTold,
        peer_timeout: Duration::from_secs(600),
        ..MigrationOptions::new(MigrationId([1; 16]))
    }
}

fn pre_copy() -> PolicyOptions {
    PRE_COPY.usual.without_image()
}

/// Returns blocks of 4 KiB as bits.
fn words(blocks: &[u64]) -> Vec<u64> {
    let mut words = vec![0; Missing::word_length(godwit_core::units::Sectors(CAPACITY))];
    for block in blocks {
        words[(block / 64) as usize] |= 1 << (block % 64);
    }
    words
}

fn write(source: &mut Source, tag: u32, start: u64, sectors: u32) {
    let extent = Extent::new(Lba(start), sectors).expect("an extent");
    source.ask(tag, Operation::Write { extent, fua: false });
    source.pass(Duration::ZERO);
}

/// Returns a source whose block 1 differs, and whose blocks 4 to 7 are the same.
fn compared() -> Source {
    let mut source = Source::staying();
    let missing = source.core.begin_comparison().expect("it begins");
    assert_eq!(missing, words(&[]), "all of it is here");
    source
}

fn starts(source: &mut Source) {
    source
        .core
        .start_source(source.now, options(pre_copy()))
        .expect("it starts");
    source.pass(MOMENT);
}

#[test]
fn what_differs_is_copied_and_what_is_the_same_is_told_of() {
    let mut source = compared();
    assert!(
        source
            .core
            .end_comparison(&words(&[1]), &words(&[4, 5, 6, 7]))
    );
    starts(&mut source);
    assert_eq!(source.copies, [8]);
    assert!(source.core.switch_over(source.now));
    source.pass(MOMENT);
    assert!(source.asked_to_accept);
    assert_eq!(source.lacks, [(32, 32, 2)], "beside what differs");
}

#[test]
fn what_is_written_while_it_is_compared_or_leaves_is_copied_and_not_told_of() {
    let mut source = compared();
    // Found to be the same before the write.
    write(&mut source, 1, 33, 1);
    assert!(
        source
            .core
            .end_comparison(&words(&[1]), &words(&[4, 5, 6, 7]))
    );
    write(&mut source, 2, 56, 8);
    starts(&mut source);
    assert_eq!(source.copies.iter().sum::<u32>(), 3 * 8);
    source.copies.clear();
    write(&mut source, 3, 43, 1);
    write(&mut source, 4, 800, 8);
    assert!(source.core.switch_over(source.now));
    source.pass(MOMENT);
    assert!(source.asked_to_accept);
    assert_eq!(source.copies.iter().sum::<u32>(), 2 * 8, "whole blocks");
    assert_eq!(source.lacks, [(48, 8, 2)]);
    assert!(source.doubled.is_empty());
}

#[test]
fn writes_never_go_to_both_nodes_however_much_is_written() {
    let mut source = compared();
    // The first round takes five seconds.
    let different: Vec<u64> = (250_000..260_000).collect();
    assert!(source.core.end_comparison(&words(&different), &words(&[4])));
    let slow = MigrationOptions {
        max_bandwidth: Some(8 << 20),
        ..options(pre_copy())
    };
    source
        .core
        .start_source(source.now, slow)
        .expect("it starts");
    for round in 0..200 {
        write(&mut source, round % 32, u64::from(round % 8) * 4096, 4096);
        source.pass(Duration::from_millis(50));
        assert!(source.doubled.is_empty());
    }
    assert!(source.core.switch_over(source.now));
    source.pass(100 * MOMENT);
    assert!(source.asked_to_accept && source.doubled.is_empty());
}

#[test]
fn a_disk_of_which_nothing_differs_leaves_with_nothing() {
    let mut source = compared();
    assert!(source.core.end_comparison(&words(&[]), &words(&[4])));
    starts(&mut source);
    assert!(source.core.switch_over(source.now));
    source.pass(MOMENT);
    assert!(source.asked_to_accept);
    assert_eq!((source.copies.len(), source.lacks.len()), (0, 1));
}

#[test]
fn it_goes_by_what_is_copied_block_by_block_only() {
    let mut source = compared();
    assert!(source.core.end_comparison(&words(&[1]), &words(&[4])));
    for policy in [DOUBLE_WRITE, PUSH_PULL, PRE_COPY] {
        let refused = source.core.start_source(source.now, options(policy.usual));
        assert!(matches!(refused, Err(StartError::Option(_))), "{refused:?}");
    }
    let as_a_whole = |policy| MigrationOptions {
        image: ImageOffer::None,
        ..options(policy)
    };
    let refused = source
        .core
        .start_source(source.now, as_a_whole(PolicyOptions::DoubleWrite));
    assert!(matches!(refused, Err(StartError::Option(_))), "{refused:?}");
    starts(&mut source);
    // As a whole the disk moves like any other.
    let mut source = compared();
    assert!(source.core.end_comparison(&words(&[1]), &words(&[4])));
    source.core.forget_comparison();
    let refused = source.core.start_source(source.now, options(pre_copy()));
    assert!(matches!(refused, Err(StartError::Option(_))), "{refused:?}");
    let started = source
        .core
        .start_source(source.now, as_a_whole(PolicyOptions::DoubleWrite));
    assert_eq!(started, Ok(()));
    let mut leaves = Source::leaving(as_a_whole(PolicyOptions::DoubleWrite));
    let begun = leaves.core.begin_comparison();
    assert!(matches!(begun, Err(StartError::Busy)), "{begun:?}");
}

fn leave_now() -> MigrationChange {
    MigrationChange {
        policy: Some(PushOptions {
            longest_push: Some(Duration::ZERO),
            ..PushOptions::USUAL
        }),
        ..MigrationChange::default()
    }
}

#[test]
fn it_leaves_now_without_what_differs_if_the_destination_knows_two_places() {
    let different: Vec<u64> = (250_000..260_000).collect();
    let begun = |image| {
        let mut source = compared();
        assert!(source.core.end_comparison(&words(&different), &words(&[4])));
        let slow = MigrationOptions {
            max_bandwidth: Some(8 << 20),
            image,
            ..options(pre_copy())
        };
        source
            .core
            .start_source(source.now, slow)
            .expect("it starts");
        source.pass(Duration::from_secs(2));
        source
    };
    let mut source = begun(ImageOffer::OnePlace);
    let refused = source.core.change_migration(source.now, &leave_now());
    assert!(refused.is_err(), "it would be looked for in the image");
    let mut source = begun(ImageOffer::TwoPlaces);
    write(&mut source, 1, 35, 1);
    let changed = source.core.change_migration(source.now, &leave_now());
    assert_eq!(changed, Ok(()));
    assert!(source.core.switch_over(source.now));
    source.pass(MOMENT);
    assert!(source.asked_to_accept);
    // All written blocks are here, with all differing blocks not yet sent.
    assert_eq!(source.lacks, [], "block 4 was written");
    let here: u64 = source
        .lacks_at_source
        .iter()
        .map(|(_, sectors, _)| u64::from(*sectors))
        .sum();
    let sent: u64 = source
        .copies
        .iter()
        .map(|sectors| u64::from(*sectors))
        .sum();
    assert_eq!(here + sent, 8 * (10_000 + 1));
    assert!(here > 8 * 4_000, "{here}");
    assert_eq!(source.lacks_at_source[0], (32, 8, 0));
}

#[test]
fn it_is_pushed_from_the_start_if_that_is_asked_for() {
    let mut source = compared();
    assert!(source.core.end_comparison(&words(&[1]), &words(&[4])));
    let pushes = MigrationOptions {
        image: ImageOffer::TwoPlaces,
        ..options(POST_COPY.usual)
    };
    source
        .core
        .start_source(source.now, pushes)
        .expect("it starts");
    assert!(source.core.switch_over(source.now));
    source.pass(MOMENT);
    assert!(source.asked_to_accept && source.copies.is_empty());
    assert_eq!(source.lacks, [(32, 8, 2)]);
    assert_eq!(source.lacks_at_source, [(8, 8, 0)]);
}

/// Returns a source that lacks these blocks of its image.
fn lacking(lacks: &[u64]) -> Source {
    let capacity = godwit_core::units::Sectors(CAPACITY);
    let heat = vec![0; Missing::heat_length(capacity)];
    let missing = Missing::from_parts(capacity, &words(lacks), &heat).expect("as long as the disk");
    let record = AuthorityRecord {
        remainder: Some(MigrationId([9; 16])),
        ..AuthorityRecord::created()
    };
    let mut source = Source::staying();
    source.core = Controller::new(crate::support::LIMITS, capacity, record);
    source.core.restore_missing(missing);
    source
}

/// A write to a missing block counts as different. If the write fails, the block can be neither copied nor announced,
/// by this move or by the next.
#[test]
fn what_is_known_is_forgotten_when_a_write_fails_where_the_disk_lacks_something() {
    for moves in [true, false] {
        let lacks: Vec<u64> = (48..64).collect();
        let mut source = lacking(&lacks);
        source.core.begin_comparison().expect("it begins");
        assert!(source.core.end_comparison(&words(&[1]), &words(&lacks)));
        if moves {
            starts(&mut source);
        }
        let extent = Extent::new(Lba(48 * 8), 8).expect("an extent");
        source.ask(1, Operation::Write { extent, fua: false });
        while let Some(action) = source.core.poll_action() {
            if let Action::Disk { tag, .. } = action {
                let failed = Err(RequestError::Io);
                source.core.handle_disk_done(source.now, tag, failed);
            }
        }
        assert_eq!(source.core.compared(), None, "while it moves: {moves}");
    }
}

#[test]
fn what_the_guest_works_beside_is_to_be_fetched_first_and_what_nobody_asked_for_last() {
    // Of the blocks of two chunks of 64 KiB, 32 to 63, this node has fetched the first chunk's.
    let lacks: Vec<u64> = (48..64).collect();
    let mut source = lacking(&lacks);
    let missing = source.core.begin_comparison().expect("it begins");
    assert_eq!(missing, words(&lacks));
    let same: Vec<u64> = (8..16).chain(32..64).collect();
    assert!(source.core.end_comparison(&words(&[1]), &words(&same)));
    starts(&mut source);
    assert!(source.core.switch_over(source.now));
    source.pass(MOMENT);
    assert!(source.asked_to_accept);
    let chunk = |first: u64| Lba(first * 8).0;
    assert_eq!(
        source.lacks,
        [(chunk(8), 64, 2), (chunk(32), 128, 1), (chunk(48), 128, 0)]
    );
}
