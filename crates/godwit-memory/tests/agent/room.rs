//! Storage for memory that is about to move.

use super::*;

/// Waits until a file has this many allocated bytes: the agent makes room after its answer.
fn has_room(file: &File, bytes: u64) {
    let until = Instant::now() + Duration::from_secs(5);
    while room(file) != bytes {
        assert!(Instant::now() < until, "{} and not {bytes}", room(file));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn room_for_what_comes_next_is_made_ahead_and_given_back_when_it_does_not_come() {
    const MIB: u64 = 1 << 20;
    let folder = shm();
    let (process, mut agent, home, layout) = started(folder.path());
    let ahead = |offset, ahead_bytes| Run {
        ahead_bytes,
        ..run(offset, MIB)
    };
    let away = memfd();
    begin(&mut agent, layout.address, &home, &away);
    for number in 0..4 {
        moves(&mut agent, ahead(number * MIB, MIB));
        has_room(&away, (number + 2) * MIB);
    }
    // Absent memory needs no room, and neither does a part of a page.
    for (number, nonsense) in [(4, BYTES), (5, 100), (6, u64::MAX - 4095)] {
        moves(&mut agent, ahead(number * MIB, nonsense));
        has_room(&away, (number + 1) * MIB);
    }
    moves(&mut agent, ahead(7 * MIB, MIB));
    has_room(&away, 9 * MIB);
    agent.end().unwrap();
    assert_eq!(room(&away), 8 * MIB, "at the end of a move");
    // The same on the way back, from a node that disconnects without an end of the move.
    begin(&mut agent, layout.address, &away, &home);
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(home.as_fd(), punch, 0, 8 * MIB).unwrap();
    let rest = room(&home);
    let back = Run {
        downwards: true,
        ..ahead(7 * MIB, 2 * MIB)
    };
    moves(&mut agent, back);
    has_room(&home, rest + 3 * MIB);
    drop(agent);
    has_room(&home, rest + MIB);
    lost_nothing(process);
}

/// Returns the time to move memory with a single written page, in a file with this many preallocated bytes.
fn moves_what_was_never_written(set_aside: u64) -> Duration {
    let folder = shm();
    let (path, home) = home(folder.path());
    let mut process = start_waiting(folder.path(), &path);
    let grows = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(home.as_fd(), grows, 0, set_aside).unwrap();
    let written = 3 * 4096;
    home.write_all_at(b"written", written).unwrap();
    let address = layout(&process, &home, None).unwrap().address;
    let mut agent = Agent::connect(&folder.path().join("agent.sock")).unwrap();
    let away = memfd();
    begin(&mut agent, address, &home, &away);
    let (begun, mut done) = (Instant::now(), 0);
    while done < BYTES {
        done += moves(&mut agent, run(done, BYTES - done)).bytes;
    }
    let took = begun.elapsed();
    agent.end().unwrap();
    let mut content = [0; 7];
    away.read_exact_at(&mut content, written).unwrap();
    assert_eq!(&content, b"written");
    process.say("");
    process.end();
    took
}

#[test]
fn what_lies_behind_memory_that_was_never_written_does_not_delay_it() {
    let fastest = |set_aside| {
        let times = (0..2).map(|_| moves_what_was_never_written(set_aside));
        times.min().unwrap()
    };
    let (alone, before_much) = (fastest(BYTES), fastest(1 << 30));
    assert!(
        before_much < 6 * alone,
        "{before_much:?} instead of {alone:?}"
    );
}
