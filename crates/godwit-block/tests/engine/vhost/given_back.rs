//! Reads of a missing part of the disk, given back to a machine that is about to stand still.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use godwit_block::engine::{EngineConfig, EngineEvent, Restored, spawn_restored};
use godwit_block::image::Image;
use godwit_block::image::notes::missing;
use godwit_core::Missing;
use godwit_core::action::PullSlot;
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{Bytes, Epoch, Extent, MigrationId, Sectors};
use godwit_core::wire::Message;
use godwit_testkit::vhost_client::{Client, Options, Status};

use super::{MOMENT, SIZE, Served};
use crate::puppet::{frame, receive};
use crate::support::{PATIENCE, TestEngine, plain, tcp_pair};

const MIGRATION: MigrationId = MigrationId([3; 16]);

/// A disk that is entirely at another node, and a machine that waits for the first 4 KiB.
struct Waiting {
    served: Served,
    client: Client,
    head: u16,
}

impl Waiting {
    fn new() -> Self {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let directory = tempfile::tempdir_in(directory).expect("a directory");
        let capacity = Sectors(SIZE / 512);
        let words = vec![u64::MAX; Missing::word_length(capacity)];
        let heat = vec![0; Missing::heat_length(capacity)];
        let path = directory.path().join("missing");
        let all = Missing::from_parts(capacity, &words, &heat).expect("it fits");
        let pieces: Vec<_> = all.pieces().collect();
        missing::create(&path, capacity, MIGRATION, &pieces, &[], None).expect("it is stored");
        let missing = missing::load(&path, capacity, MIGRATION).expect("it is stored");
        let restored = Restored {
            missing,
            ..Restored::default()
        };
        let config = EngineConfig {
            missing_pauses_after: Some(Duration::from_millis(200)),
            ..EngineConfig::new(String::from("given back"))
        };
        let image = Image::create(&directory.path().join("disk"), Bytes(SIZE)).expect("an image");
        let record = AuthorityRecord {
            epoch: Epoch(2),
            ownership: Ownership::Serving,
            remainder: Some(MIGRATION),
        };
        let (sender, events) = mpsc::channel();
        let callback = move |event| {
            let _ = sender.send(event);
        };
        let handle = spawn_restored(config, image, record, restored, Box::new(callback));
        let engine = TestEngine::of(handle.expect("an engine"), events, directory);
        let served = Served::over(engine);
        let mut client = served.connect(Options {
            inflight: true,
            ..Options::default()
        });
        let data = client.data();
        let head = client.submit_read(0, 0, data, 4096);
        client.queues[0].notify();
        served
            .engine
            .wait_for(|event| *event == EngineEvent::WaitsLong);
        Self {
            served,
            client,
            head,
        }
    }

    /// Connects the other node, and receives the pull of the part that the machine waits for.
    fn source(&self) -> (TcpStream, PullSlot, Extent) {
        let (mut socket, theirs) = tcp_pair();
        let patience = Some(Duration::from_secs(10));
        socket.set_read_timeout(patience).expect("a timeout");
        self.served.engine.handle.pull(plain(theirs), false);
        let migration = MIGRATION;
        socket
            .write_all(&frame(Message::Owes {
                migration,
                max_bandwidth: None,
            }))
            .expect("sent");
        let (Message::Pull { slot, extent }, _) = receive(&mut socket) else {
            panic!("nothing is asked for");
        };
        assert_eq!(extent.start().0, 0);
        (socket, slot, extent)
    }

    fn give_back(&self) {
        self.served.engine.handle.machine_stands_still();
        let snapshot = || self.served.engine.handle.snapshot();
        self.served
            .engine
            .wait_until(|snapshot| snapshot.requests_in_flight == 0);
        assert!(snapshot().waits_long);
        assert!(!snapshot().lacks_room, "there is room");
    }
}

fn sends(socket: &mut TcpStream, slot: PullSlot, extent: Extent) {
    let pulled = Message::Pulled {
        slot,
        extent,
        zeroes: true,
        result: Ok(()),
    };
    socket.write_all(&frame(pulled)).expect("sent");
}

#[test]
fn a_machine_that_could_not_be_stopped_goes_on_when_the_part_is_here() {
    let mut waiting = Waiting::new();
    waiting.give_back();
    let (mut socket, slot, extent) = waiting.source();
    waiting.served.engine.handle.machine_goes_on();
    sends(&mut socket, slot, extent);
    let done = waiting.client.queues[0].wait(PATIENCE).expect("an answer");
    assert_eq!(done.head, waiting.head);
    assert_eq!(waiting.client.status(0, done.head), Status::OK);
}

#[test]
fn a_queue_that_stopped_has_what_was_given_back_in_its_next_life() {
    let mut waiting = Waiting::new();
    waiting.give_back();
    let base = waiting.client.stop_queue(0).expect("to stop");
    assert!(!waiting.served.engine.handle.snapshot().lacks_room);
    let (mut socket, slot, extent) = waiting.source();
    sends(&mut socket, slot, extent);
    let engine = &waiting.served.engine;
    engine.wait_until(|snapshot| !snapshot.waits_long);
    assert_eq!(
        waiting.client.queues[0].wait(MOMENT),
        None,
        "it stands still"
    );
    waiting.client.start_queue(0, base).expect("to start");
    let done = waiting.client.queues[0].wait(PATIENCE).expect("an answer");
    assert_eq!(waiting.client.status(0, done.head), Status::OK);
}

#[test]
fn nobody_waits_long_for_what_a_machine_wanted_that_has_left() {
    let waiting = Waiting::new();
    waiting.give_back();
    let Waiting { served, client, .. } = waiting;
    drop(client);
    served
        .engine
        .wait_until(|snapshot| snapshot.clients == 0 && !snapshot.waits_long);
}
