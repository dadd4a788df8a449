//! Segments of a file that is a pool.

use std::os::unix::fs::FileExt;
use std::path::Path;

use super::*;
use crate::ownership::{Arrival, Title};
use crate::pool::device::claim::Stage;
use crate::pool::segment::Segment;
use crate::pool::{Pool, proof};

const MIB: u64 = 1 << 20;

/// Makes a pool of this many MiB. The table takes the first two.
fn pool_of(mib: u64) -> (tempfile::NamedTempFile, Pool) {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
    file.as_file().set_len(mib * MIB).expect("grows");
    let pool = Pool::format(file.path(), false).expect("becomes a pool");
    (file, pool)
}

fn device(pool: &Pool) -> Device {
    pool.device().expect("a device").clone()
}

fn allocate(pool: &Pool, name: &str, mib: u64, owner: &str) -> Result<Segment, PoolError> {
    Segment::allocate(pool, name, mib * MIB, owner)
}

/// Brings a claimed record to a stage.
fn set(record: &Record, stage: Stage, tag: u64) {
    let changed = stage == Stage::Claimed || record.change(Stage::Claimed, stage, tag);
    assert!(changed, "it was claimed");
}

#[test]
fn two_nodes_see_one_title_and_it_changes_once_an_epoch() {
    let (file, here) = pool_of(16);
    let there = Pool::open(file.path()).expect("opens");
    let made = allocate(&here, "v", 4, "a").expect("allocates");
    let seen = Segment::open(&there, "v").expect("opens");
    assert_eq!((seen.id(), seen.place()), (made.id(), made.place()));
    assert_eq!(seen.place().extent.offset, 2 * MIB);
    assert_eq!(seen.place().align, Some(2 * MIB));
    made.decide("a", 1, "b").expect("gives");
    let title = seen.title().expect("reads");
    assert_eq!(title.arrival("b", 1), Arrival::Given);
    seen.decide("a", 1, "a").expect_err("is b's");
    // The current owner removes the segment.
    seen.remove(&there).expect("removes");
    assert!(matches!(
        Segment::open(&here, "v"),
        Err(PoolError::NoSegment(_))
    ));
}

#[test]
fn names_room_and_pages_are_refused_with_what_is_wrong() {
    let (_file, pool) = pool_of(16);
    allocate(&pool, "v", 4, "a").expect("allocates");
    let again = allocate(&pool, "v", 2, "b");
    assert!(matches!(again, Err(PoolError::Exists { owner, .. }) if owner == "a"));
    let odd = Segment::allocate(&pool, "w", MIB, "a");
    assert!(matches!(odd, Err(PoolError::PageSize { page, .. }) if page == 2 * MIB));
    let full = allocate(&pool, "w", 12, "a");
    assert!(matches!(full, Err(PoolError::Full { free, .. }) if free == 10 * MIB));
    allocate(&pool, "w", 4, "a").expect("allocates");
    let first = Segment::open(&pool, "v").expect("opens");
    first.remove(&pool).expect("removes");
    let pieces = allocate(&pool, "x", 8, "a");
    assert!(
        matches!(pieces, Err(PoolError::InPieces { largest, .. }) if largest == 6 * MIB),
        "{pieces:?}"
    );
    assert_eq!(pool.segments().expect("lists"), ["w"]);
    assert_eq!(pool.room().expect("is known").free, 10 * MIB);
    assert_eq!(
        device(&pool).entries().len(),
        1,
        "nothing is left of the others"
    );
}

#[test]
fn a_table_that_shrank_has_nothing_free() {
    let (file, pool) = pool_of(16);
    allocate(&pool, "v", 4, "a").expect("allocates");
    file.as_file().set_len(0).expect("shrinks");
    for refused in [
        allocate(&pool, "w", 4, "b").expect_err("nobody knows what is free"),
        Segment::open(&pool, "v").expect_err("nobody knows"),
        pool.room().expect_err("nobody knows"),
    ] {
        assert!(!matches!(refused, PoolError::Full { .. }), "{refused}");
    }
}

/// Memory of one guest never becomes another guest's, whenever nodes die.
#[test]
fn what_a_guest_left_is_overwritten_before_another_has_it() {
    let (file, pool) = pool_of(8);
    let first = allocate(&pool, "v", 4, "a").expect("allocates");
    let extent = first.place().extent;
    let secret = vec![0x5a; extent.bytes as usize];
    file.as_file()
        .write_all_at(&secret, extent.offset)
        .expect("the guest writes");
    first.remove(&pool).expect("removes");
    let next = allocate(&pool, "w", 6, "b").expect("allocates");
    let mut content = vec![1; next.bytes() as usize];
    let at = next.place().extent.offset;
    file.as_file()
        .read_exact_at(&mut content, at)
        .expect("reads");
    assert!(content.iter().all(|byte| *byte == 0));
}

#[test]
fn nodes_that_allocate_at_once_get_memory_apart_and_one_name_once() {
    let (file, pool) = pool_of(64);
    let nodes = ["a", "b", "c", "d"];
    for same_name in [false, true] {
        for _ in 0..20 {
            let made = std::thread::scope(|scope| {
                let begun = nodes.map(|node| {
                    let path = file.path();
                    scope.spawn(move || {
                        // A separate pool, as in another process.
                        let pool = Pool::open(path).expect("opens");
                        let name = if same_name { "v" } else { node };
                        allocate(&pool, name, 4, node)
                    })
                });
                begun.map(|thread| thread.join().expect("ends"))
            });
            let won: Vec<_> = made.iter().flatten().collect();
            assert_eq!(won.len(), if same_name { 1 } else { 4 }, "{made:?}");
            for (number, one) in won.iter().enumerate() {
                let others = won[number + 1..].iter();
                let apart = |other: &&Segment| !other.place().extent.overlaps(one.place().extent);
                assert!(others.copied().all(|other| apart(&other)), "{won:?}");
            }
            for refused in made.iter().filter_map(|made| made.as_ref().err()) {
                assert!(matches!(refused, PoolError::Exists { .. }), "{refused}");
            }
            for name in pool.segments().expect("lists") {
                let segment = Segment::open(&pool, &name).expect("opens");
                segment.remove(&pool).expect("removes");
            }
            assert!(device(&pool).entries().is_empty(), "nothing is left");
        }
    }
}

/// A node dies after each of the steps. Other nodes lose only the dead node's memory and name, and the dead node's
/// claims are free again once the node is back.
#[test]
fn what_a_dead_node_had_begun_is_free_when_it_is_back() {
    let (file, pool) = pool_of(16);
    let own = device(&pool);
    for stage in [Stage::Claimed, Stage::Announced, Stage::Taken] {
        let record = own.table.record(0);
        assert!(record.claim(tag("a", 1)), "{stage:?}");
        let content = Content {
            name: String::from("v"),
            extent: Extent {
                offset: 2 * MIB,
                bytes: 4 * MIB,
            },
            id: [7; 16],
        };
        record.write(0, &content, &Title::new("a"));
        set(&record, stage, tag("a", 1));
        let there = Pool::open(file.path()).expect("opens");
        assert!(there.segments().expect("lists").is_empty(), "{stage:?}");
        assert!(matches!(
            Segment::open(&there, "v"),
            Err(PoolError::NoSegment(_))
        ));
        // Other nodes allocate beside the claim.
        let other = allocate(&there, "w", 4, "b").expect("allocates");
        let begun = stage.has_space();
        assert_eq!(
            other.place().extent.overlaps(content.extent),
            !begun,
            "{stage:?}"
        );
        if begun {
            let name = allocate(&there, "v", 2, "b");
            assert!(matches!(name, Err(PoolError::Exists { owner, .. }) if owner == "a"));
        }
        Segment::clear(&there, "w", "b").expect("looks");
        assert_eq!(own.entries().len(), 2, "only its own");
        Segment::clear(&pool, "x", "a").expect("clears");
        Segment::open(&pool, "w")
            .expect("is whole")
            .remove(&pool)
            .expect("removes");
        assert!(own.entries().is_empty(), "{stage:?}");
    }
}

#[test]
fn what_is_under_way_in_this_process_is_not_taken_for_left() {
    let (_file, pool) = pool_of(16);
    let own = device(&pool);
    let claim = own.claim("a").expect("claims");
    Segment::clear(&pool, "v", "a").expect("looks");
    let (stage, _) = claim.record.stage().expect("reads");
    assert_eq!(stage, Stage::Claimed);
    drop(claim);
    assert!(own.entries().is_empty());
}

/// A process of a node goes on after a successor has freed its claim, and the record has been taken again.
#[test]
fn a_process_that_outlives_its_turn_changes_nothing() {
    let (file, pool) = pool_of(16);
    let old = device(&pool);
    let mut claim = old.claim("a").expect("claims");
    old.announce(&mut claim, "v", 4 * MIB, "a")
        .expect("announces");
    claim.step(Stage::Taken).expect("is its own");
    let extent = old.content(claim.index).expect("is written").extent;
    // The node's next process does not know the allocations under way in this one.
    under_way(|all| all.remove(&(old.identity, claim.index)));
    Segment::clear(&pool, "v", "a").expect("clears");
    let next = allocate(&pool, "w", 4, "a").expect("allocates");
    assert_eq!(next.place().extent, extent, "the same part");
    file.as_file()
        .write_all_at(&[7; 4096], extent.offset)
        .expect("the next guest writes");
    let wiped = old.wipe(extent, &claim, &|| false);
    assert!(matches!(wiped, Err(PoolError::Changed(_))), "{wiped:?}");
    for stage in [Stage::Announced, Stage::Held] {
        let stepped = claim.step(stage);
        assert!(matches!(stepped, Err(PoolError::Changed(_))), "{stepped:?}");
    }
    drop(claim);
    let mut content = [0; 4096];
    file.as_file()
        .read_exact_at(&mut content, extent.offset)
        .expect("reads");
    assert_eq!(content, [7; 4096], "it is as the next guest wrote it");
    Segment::open(&pool, "w").expect("is there");
    // The record is protected between two steps too, since each claim has a number of its own.
    let record = old.table.record(9);
    assert!(record.claim(tag("a", 2)));
    assert!(!record.change(Stage::Claimed, Stage::Free, tag("a", 1)));
    assert!(record.change(Stage::Claimed, Stage::Free, tag("a", 2)));
}

#[test]
fn an_allocation_ends_with_its_process_and_leaves_nothing() {
    let (_file, pool) = pool_of(256);
    let looked = std::cell::Cell::new(0);
    let ends = || {
        assert!(is_allocating());
        looked.set(looked.get() + 1);
        looked.get() > 2
    };
    let ended = Segment::allocate_unless(&pool, "v", 192 * MIB, "a", &ends);
    assert!(matches!(ended, Err(PoolError::Ending)), "{ended:?}");
    assert_eq!(
        looked.get(),
        3,
        "between any two parts that are overwritten"
    );
    assert!(device(&pool).entries().is_empty(), "nothing is left");
}

#[test]
fn a_segment_is_removed_once_and_not_the_next_one_in_its_record() {
    let (_file, pool) = pool_of(16);
    let first = allocate(&pool, "v", 4, "a").expect("allocates");
    let again = Segment::open(&pool, "v").expect("opens");
    let third = Segment::open(&pool, "v").expect("opens");
    first.remove(&pool).expect("removes");
    let gone = again.remove(&pool);
    assert!(matches!(gone, Err(PoolError::Changed(_))), "{gone:?}");
    allocate(&pool, "v", 4, "a").expect("allocates");
    let other = third.remove(&pool);
    assert!(matches!(other, Err(PoolError::Changed(_))), "{other:?}");
    Segment::open(&pool, "v").expect("is there");
}

/// A device has several names: an allocation under way by one name is not a leftover by another name.
#[test]
fn what_is_under_way_is_known_by_any_name_of_the_file() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let (path, link) = (folder.path().join("pool"), folder.path().join("link"));
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(16 * MIB).expect("grows");
    std::os::unix::fs::symlink(&path, &link).expect("links");
    let pool = Pool::format(&path, false).expect("becomes a pool");
    let own = device(&pool);
    let claim = own.claim("a").expect("claims");
    let other = Pool::open(&link).expect("opens");
    Segment::clear(&other, "v", "a").expect("looks");
    assert_eq!(claim.record.stage(), Ok((Stage::Claimed, claim.tag)));
}

#[test]
fn a_device_proves_itself_by_the_segment_that_moves() {
    let (file, here) = pool_of(8);
    let (_other, elsewhere) = pool_of(8);
    for pool in [&here, &elsewhere] {
        allocate(pool, "v", 2, "a").expect("allocates");
    }
    let there = Pool::open(file.path()).expect("opens");
    let question = proof::Question::ask(&here, "v", "m").expect("asks");
    let nonce = question.nonce();
    question.answered_by("b").expect_err("nobody has");
    let refused = proof::answer(&elsewhere, "v", "m", &nonce, "b");
    assert!(matches!(refused, Err(PoolError::OtherMemory)));
    let refused = proof::answer(&there, "w", "m", &nonce, "b");
    assert!(matches!(refused, Err(PoolError::OtherMemory)));
    proof::answer(&there, "v", "m", &nonce, "b").expect("answers");
    question.answered_by("b").expect("is answered");
    question
        .answered_by("c")
        .expect_err("somebody else's answer");
    let next = proof::Question::ask(&here, "v", "n").expect("asks");
    next.answered_by("b")
        .expect_err("that was another question");
    proof::answer(&there, "v", "n", &nonce, "b").expect_err("an old question");
}

/// Changes a word of a file's table, and returns the old value.
fn change(path: &Path, word: u64, value: u64) -> u64 {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("opens");
    let mut before = [0; 8];
    file.read_exact_at(&mut before, word * 8).expect("reads");
    file.write_all_at(&value.to_le_bytes(), word * 8)
        .expect("writes");
    u64::from_le_bytes(before)
}

#[test]
fn hostile_records_are_named_and_nothing_is_allocated_beside_them() {
    let (file, pool) = pool_of(16);
    allocate(&pool, "v", 4, "a").expect("allocates");
    // Words of the first record: the header's, then stage, offset, check and name.
    let first = 512;
    let (offset, check, length, name) = (81, 82, 83, 84);
    for (word, values) in [
        (0, &[0, 1][..]),
        (1, &[2]),
        (2, &[0, 4096, 5 * MIB, u64::MAX]),
        (80, &[1, 9 << 56, u64::MAX]),
        (offset, &[0, MIB, 16 * MIB, u64::MAX]),
        (check, &[0]),
        (length, &[0, 2, 129, u64::MAX]),
        (name, &[u64::from_le_bytes(*b"\x1b[2Jabcd"), 0xff]),
    ] {
        for value in values {
            let before = change(file.path(), first + word, *value);
            let names = pool.segments().expect("lists");
            let shown = names.iter().find(|name| name.starts_with("(record 0"));
            let shown = shown.unwrap_or_else(|| panic!("{word} {value:x}: {names:?}"));
            let opened = Segment::open(&pool, shown);
            assert!(
                matches!(opened, Err(PoolError::Damaged { .. })),
                "{opened:?}"
            );
            Segment::open(&pool, "v").expect_err("makes no sense");
            let beside = allocate(&pool, "w", 2, "a");
            assert!(
                matches!(beside, Err(PoolError::Table { .. })),
                "{word} {value:x}: {beside:?}"
            );
            pool.room().expect_err("nobody can tell");
            change(file.path(), first + word, before);
        }
    }
    Segment::open(&pool, "v").expect("is as it was");
    allocate(&pool, "w", 2, "a").expect("allocates");
    // A forged copy of another record, with a valid check.
    let own = device(&pool);
    let other = Content {
        name: String::from("x"),
        extent: Segment::open(&pool, "v").expect("opens").place().extent,
        id: [1; 16],
    };
    let record = own.table.record(5);
    assert!(record.claim(tag("b", 1)));
    record.write(5, &other, &Title::new("b"));
    set(&record, Stage::Held, tag("b", 1));
    for name in ["v", "x"] {
        let refused = Segment::open(&pool, name);
        assert!(
            matches!(&refused, Err(PoolError::Damaged { why, .. }) if why.contains("part of its memory")),
            "{refused:?}"
        );
    }
    Segment::open(&pool, "w").expect("is as it was");
}

#[test]
fn what_is_no_pool_or_another_s_is_not_overwritten() {
    let (file, pool) = pool_of(8);
    allocate(&pool, "v", 2, "a").expect("allocates");
    for overwrite in [false, true] {
        let refused = Pool::format(file.path(), overwrite);
        assert!(
            matches!(refused, Err(PoolError::IsPool { segments: 1, .. })),
            "{refused:?}"
        );
    }
    // Words of the first page: a table of another version, made for other sizes, or damaged.
    for (word, value) in [(1, 2), (4, 64 * MIB), (5, 4096), (8, 1)] {
        let before = change(file.path(), word, value);
        assert!(matches!(
            Pool::open(file.path()),
            Err(PoolError::Table { .. })
        ));
        let refused = Pool::format(file.path(), true);
        assert!(
            matches!(refused, Err(PoolError::IsPool { segments: 1, .. })),
            "{word}: {refused:?}"
        );
        change(file.path(), word, before);
    }
    Segment::open(&pool, "v")
        .expect("opens")
        .remove(&pool)
        .expect("removes");
    let refused = Pool::format(file.path(), false);
    assert!(matches!(
        refused,
        Err(PoolError::IsPool { segments: 0, .. })
    ));
    Pool::format(file.path(), true).expect("an empty one can be made again");

    let empty = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
    empty.as_file().set_len(3 * MIB).expect("grows");
    let small = Pool::format(empty.path(), true);
    assert!(matches!(small, Err(PoolError::TooSmall { least, .. }) if least == 4 * MIB));
    empty.as_file().set_len(8 * MIB).expect("grows");
    assert!(matches!(
        Pool::open(empty.path()),
        Err(PoolError::NotFormatted(_))
    ));
    empty
        .as_file()
        .write_all_at(b"a file system", 70_000)
        .expect("writes");
    assert!(matches!(
        Pool::open(empty.path()),
        Err(PoolError::NotFormatted(_))
    ));
    assert!(matches!(
        Pool::format(empty.path(), false),
        Err(PoolError::Foreign(_))
    ));
    empty
        .as_file()
        .write_all_at(b"another's", 0)
        .expect("writes");
    assert!(matches!(
        Pool::open(empty.path()),
        Err(PoolError::Foreign(_))
    ));
    Pool::format(empty.path(), true).expect("as it was asked");
    Pool::open(empty.path()).expect("is a pool");
    // The file has become smaller since.
    empty.as_file().set_len(6 * MIB).expect("shrinks");
    let refused = Pool::open(empty.path());
    assert!(matches!(&refused, Err(PoolError::Table { why, .. }) if why.contains("8388608 bytes")));
    let folder = tempfile::tempdir().expect("a folder");
    assert!(matches!(
        Pool::format(folder.path(), true),
        Err(PoolError::IsFolder(_))
    ));
}
