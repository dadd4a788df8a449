//! Segments of a folder.

use super::*;
use crate::ownership::{Arrival, Refused};

fn pool() -> (tempfile::TempDir, Pool) {
    let folder = tempfile::tempdir().expect("a folder");
    let pool = Pool::open(folder.path()).expect("a pool");
    (folder, pool)
}

#[test]
fn two_nodes_see_one_title_and_it_changes_once_an_epoch() {
    let (_folder, pool) = pool();
    let here = Segment::allocate(&pool, "v", 1 << 20, "a").expect("allocates");
    let there = Segment::open(&pool, "v").expect("opens");
    assert_eq!(there.id(), here.id());
    assert_eq!(there.bytes(), 1 << 20);
    here.decide("a", 1, "b").expect("gives");
    assert_eq!(
        there.title().expect("reads").arrival("b", 1),
        Arrival::Given
    );
    here.decide("a", 1, "b").expect("again changes nothing");
    for (from, offered, to) in [("a", 1, "a"), ("a", 2, "a"), ("b", 1, "b"), ("b", 3, "a")] {
        // The last decision but one has been made already.
        let decided = there.decide(from, offered, to);
        assert_eq!(decided.is_ok(), to == "b", "{from} {offered} {to}");
    }
    there.decide("b", 2, "a").expect("gives back");
    assert_eq!(here.title().expect("reads").epoch, 3);
}

#[test]
fn names_and_room_are_not_given_twice() {
    let (_folder, pool) = pool();
    Segment::allocate(&pool, "v", 4096, "a").expect("allocates");
    let again = Segment::allocate(&pool, "v", 4096, "b");
    assert!(matches!(again, Err(PoolError::Exists { owner, .. }) if owner == "a"));
    let free = pool.room().expect("is known").free;
    let huge = Segment::allocate(&pool, "w", (free / 4096 + 10) * 4096, "a");
    assert!(matches!(huge, Err(PoolError::Full { .. })));
    assert_eq!(pool.segments().expect("lists").len(), 1);
    let segment = Segment::open(&pool, "v").expect("opens");
    segment.remove(&pool).expect("removes");
    assert!(matches!(
        Segment::open(&pool, "v"),
        Err(PoolError::NoSegment(_))
    ));
    assert_eq!(std::fs::read_dir(pool.path()).expect("lists").count(), 0);
}

#[test]
fn nodes_that_allocate_one_name_at_once_get_one_segment() {
    let (_folder, pool) = pool();
    for _ in 0..50 {
        let nodes = ["a", "b", "c"];
        let made = std::thread::scope(|scope| {
            let pool = &pool;
            let begun =
                nodes.map(|node| scope.spawn(move || Segment::allocate(pool, "v", 1 << 16, node)));
            begun.map(|thread| thread.join().expect("ends"))
        });
        let won: Vec<_> = nodes
            .iter()
            .zip(&made)
            .filter(|(_, made)| made.is_ok())
            .collect();
        let [(node, Ok(segment))] = won[..] else {
            panic!("{made:?}")
        };
        assert_eq!(segment.title().expect("reads"), Title::new(node));
        let files = std::fs::read_dir(pool.path()).expect("lists").count();
        assert_eq!(files, 2, "nothing is left of the others'");
        let segment = Segment::open(&pool, "v").expect("opens");
        segment.remove(&pool).expect("removes");
    }
}

#[test]
fn what_an_allocation_left_between_its_files_is_cleared_by_its_owner() {
    let (_folder, pool) = pool();
    Segment::allocate(&pool, "v", 4096, "a").expect("allocates");
    Segment::clear(&pool, "v", "a").expect("looks");
    Segment::open(&pool, "v").expect("is whole");
    std::fs::remove_file(pool.memory_path("v")).expect("removes");
    Segment::clear(&pool, "v", "b").expect("looks");
    Segment::allocate(&pool, "v", 4096, "b").expect_err("is not b's");
    Segment::clear(&pool, "v", "a").expect("clears");
    Segment::allocate(&pool, "v", 4096, "b").expect("allocates");
}

#[test]
fn a_file_that_somebody_uses_becomes_a_segment_once() {
    let (_folder, pool) = pool();
    let path = pool.memory_path("v");
    let missing = Segment::adopt(&pool, "v", "a");
    assert!(matches!(missing, Err(PoolError::Io { .. })), "{missing:?}");
    for (bytes, fits) in [(0, false), (5000, false), (1 << 20, true)] {
        let mut content = vec![0; bytes];
        content.iter_mut().take(8).for_each(|byte| *byte = 7);
        std::fs::write(&path, &content).expect("writes");
        let file = File::options().write(true).open(&path).expect("opens");
        // Half of the file is a hole.
        file.set_len(bytes as u64 / 2).expect("shrinks");
        file.set_len(bytes as u64).expect("grows");
        assert_eq!(Segment::adopt(&pool, "v", "a").is_ok(), fits, "{bytes}");
    }
    let segment = Segment::open(&pool, "v").expect("opens");
    assert_eq!(segment.title().expect("reads"), Title::new("a"));
    let content = std::fs::read(&path).expect("reads");
    assert_eq!(content[..8], [7; 8], "it is as it was");
    let metadata = std::fs::metadata(&path).expect("is there");
    assert!(metadata.blocks() * 512 >= 1 << 20, "its room is reserved");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    let again = Segment::adopt(&pool, "v", "a").expect("is a's");
    assert_eq!(again.id(), segment.id());
    let other = Segment::adopt(&pool, "v", "b");
    assert!(matches!(other, Err(PoolError::Exists { owner, .. }) if owner == "a"));
}

#[test]
fn a_file_that_was_made_again_below_a_header_gets_its_room_as_well() {
    let (_folder, pool) = pool();
    let path = pool.memory_path("v");
    let make = || {
        let _ = std::fs::remove_file(&path);
        let file = File::create(&path).expect("makes");
        file.set_len(1 << 20).expect("grows");
        file.set_permissions(std::fs::Permissions::from_mode(0o644))
            .expect("is for all to read");
    };
    make();
    let first = Segment::adopt(&pool, "v", "a").expect("is adopted");
    make();
    let again = Segment::adopt(&pool, "v", "a").expect("is a's");
    assert_eq!(again.id(), first.id());
    let metadata = std::fs::metadata(&path).expect("is there");
    assert!(metadata.blocks() * 512 >= 1 << 20, "its room is reserved");
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
}

#[test]
fn hostile_headers_are_refused() {
    let (_folder, pool) = pool();
    Segment::allocate(&pool, "v", 4096, "a").expect("allocates");
    let path = pool.header_path("v");
    let good = std::fs::read(&path).expect("reads");
    let changed = |at: usize, value: u64| {
        let mut bytes = good.clone();
        bytes[at * 8..at * 8 + 8].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    for bad in [
        changed(0, 1),
        changed(1, 9),
        changed(2, 5000),
        changed(2, 0),
        changed(2, 8192),
        good[..100].to_vec(),
    ] {
        std::fs::write(&path, bad).expect("writes");
        Segment::open(&pool, "v").expect_err("makes no sense");
    }
    for slot in [0, 200, u64::MAX] {
        std::fs::write(&path, changed(48, slot)).expect("writes");
        let segment = Segment::open(&pool, "v").expect("opens");
        assert!(segment.title().is_err(), "{slot}");
    }
    let escape = u64::from_le_bytes(*b"\x1b[2Jabcd");
    std::fs::write(&path, changed(49, escape)).expect("writes");
    let segment = Segment::open(&pool, "v").expect("opens");
    assert!(segment.title().is_err(), "what a terminal obeys");
    std::fs::write(pool.header_path("w\n"), &good).expect("writes");
    assert_eq!(pool.segments().expect("lists"), ["v"]);
    for epoch in [0, u64::MAX] {
        std::fs::write(&path, changed(8, epoch)).expect("writes");
        let segment = Segment::open(&pool, "v").expect("opens");
        // The slots of even and odd epochs name no owner.
        assert!(segment.title().is_err(), "{epoch}");
        segment.decide("a", epoch, "b").expect_err("makes no sense");
    }
}

#[test]
fn a_header_that_shrank_is_an_error() {
    let (_folder, pool) = pool();
    let segment = Segment::allocate(&pool, "v", 4096, "a").expect("allocates");
    let file = File::options().write(true).open(pool.header_path("v"));
    file.expect("opens").set_len(0).expect("shrinks");
    for _ in 0..2 {
        let refused = segment.title().expect_err("nobody knows the owner");
        assert!(refused.to_string().contains("made shorter"), "{refused}");
        segment
            .decide("a", 1, "b")
            .expect_err("nobody would see it");
    }
}

#[test]
fn an_offer_that_ended_is_told_by_its_epoch() {
    let (_folder, pool) = pool();
    let segment = Segment::allocate(&pool, "v", 4096, "a").expect("allocates");
    segment.decide("a", 1, "a").expect("keeps");
    let late = segment.decide("a", 1, "b").expect_err("decided");
    let PoolError::Refused { why, .. } = late else {
        panic!("{late}")
    };
    assert_eq!(why, Refused::Changed { now: 2, offered: 1 });
}
