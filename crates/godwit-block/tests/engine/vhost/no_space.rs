//! An image whose file system is full.

use godwit_block::engine::{EngineConfig, EngineEvent};
use godwit_core::authority::AuthorityRecord;
use godwit_testkit::small_fs::SmallFileSystem;
use godwit_testkit::vhost_client::{Client, Options, Status};

use super::{MOMENT, SIZE, Served};
use crate::support::{PATIENCE, TestEngine};

/// Part of the disk for which there is room.
const ROOM: u64 = SIZE / 2;

/// A disk with data that its guest wrote before the file system became full.
struct Full {
    served: Served,
    client: Client,
    small: SmallFileSystem,
}

impl Full {
    fn new() -> Self {
        let small = SmallFileSystem::new(ROOM).expect("a file system");
        let config = EngineConfig::new(String::from("full"));
        let record = AuthorityRecord::created();
        let engine = TestEngine::with_image(config, &small.path(), SIZE, record, |i| i, |_| true);
        let served = Served::over(engine);
        let mut client = served.connect(tracked());
        assert_eq!(client.write(0, 0, &[1; 4096]), Status::OK);
        small.fill().expect("no room");
        Self {
            served,
            client,
            small,
        }
    }
}

fn make_room(small: &SmallFileSystem) {
    std::fs::remove_file(small.path().join("filler")).expect("room");
}

fn tracked() -> Options {
    Options {
        size: 128,
        inflight: true,
        ..Options::default()
    }
}

/// Submits writes for which there is no room. Returns their number.
fn run_out(Full { served, client, .. }: &mut Full) -> usize {
    let data = client.data();
    let mut waiting = 0;
    for block in 4..20_u64 {
        client.submit_write(0, block * 128, data, 65536);
        waiting += 1;
    }
    client.queues[0].notify();
    served
        .engine
        .wait_for(|event| *event == EngineEvent::OutOfSpace(true));
    assert_eq!(client.queues[0].wait(MOMENT), None, "none is answered");
    assert!(served.engine.handle.snapshot().lacks_room);
    waiting
}

fn all_are_done(Full { served, client, .. }: &mut Full, waiting: usize) {
    for _ in 0..waiting {
        let done = client.queues[0].wait(PATIENCE).expect("an answer");
        assert_eq!(client.status(0, done.head), Status::OK);
    }
    served
        .engine
        .wait_for(|event| *event == EngineEvent::OutOfSpace(false));
    let snapshot = served.engine.handle.snapshot();
    assert!(!snapshot.lacks_room);
    assert_eq!(snapshot.counters.errors, 0);
    assert_eq!(snapshot.counters.writes, 1 + waiting as u64);
}

#[test]
fn writes_wait_until_there_is_room() {
    let mut full = Full::new();
    let waiting = run_out(&mut full);
    assert_eq!(full.client.read(0, 0, 4096), Ok(vec![1; 4096]));
    make_room(&full.small);
    all_are_done(&mut full, waiting);
}

#[test]
fn a_queue_stops_with_waiting_writes_only_when_the_machine_stands_still() {
    let mut full = Full::new();
    let waiting = run_out(&mut full);
    let handle = full.served.engine.handle.clone();
    let base = std::thread::scope(|scope| {
        let stopping = scope.spawn(|| full.client.stop_queue(0).expect("to stop"));
        std::thread::sleep(MOMENT);
        assert!(
            !stopping.is_finished(),
            "the writes may be needed elsewhere"
        );
        handle.machine_stands_still();
        stopping.join().expect("to end")
    });
    assert!(handle.snapshot().lacks_room);
    full.client.start_queue(0, base).expect("to start");
    assert_eq!(
        full.client.queues[0].wait(MOMENT),
        None,
        "there is no room yet"
    );
    make_room(&full.small);
    all_are_done(&mut full, waiting);
}

#[test]
fn a_guest_that_leaves_takes_its_writes_along() {
    let mut full = Full::new();
    run_out(&mut full);
    let Full {
        served,
        client,
        small,
    } = full;
    drop(client);
    served
        .engine
        .wait_until(|snapshot| !snapshot.lacks_room && snapshot.clients == 0);
    make_room(&small);
    let mut client = served.connect(tracked());
    assert_eq!(client.write(0, 512, &[2; 4096]), Status::OK);
}
