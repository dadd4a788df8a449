//! The effect of a pause on the frames and buffers of a migration. An interface over its budget causes the pause.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use godwit_block::engine::{EngineEvent, InterfaceCounter, PeerStreams};
use godwit_core::MigrationOptions;
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::{Event, PauseReason};
use godwit_core::units::{Generation, Lba};
use godwit_core::wire::Message;

use crate::puppet::{ID, Puppet, frame, receive};
use crate::support::*;

const MIB: u64 = 1 << 20;

/// The counter of an interface, under the control of a test.
struct Interface {
    path: PathBuf,
    bytes: u64,
    _directory: tempfile::TempDir,
}

impl Interface {
    fn new() -> (Self, InterfaceCounter) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("tx_bytes");
        std::fs::write(&path, "0\n").expect("written");
        let counter = File::open(&path).expect("the counter").into();
        let interface = Self {
            path,
            bytes: 0,
            _directory: directory,
        };
        (interface, counter)
    }

    /// Counts bytes as sent until the migration pauses.
    fn crowd(&mut self, engine: &TestEngine) {
        let paused = |event: &EngineEvent| matches!(event, EngineEvent::Core(Event::Paused { .. }));
        let reason = PauseReason::InterfaceBudget;
        for _ in 0..2000 {
            self.bytes += MIB;
            std::fs::write(&self.path, format!("{}\n", self.bytes)).expect("written");
            std::thread::sleep(Duration::from_millis(5));
            if let Some(event) = engine.events.try_iter().find(paused) {
                let migration = ID;
                let expected = Event::Paused { migration, reason };
                assert_eq!(event, EngineEvent::Core(expected));
                return;
            }
        }
        panic!("it never paused: {:?}", engine.handle.snapshot());
    }
}

/// Returns the options of a migration with a window of eight chunks of 1 MiB.
fn options() -> MigrationOptions {
    MigrationOptions {
        migration: ID,
        verify: false,
        busy_window_chunks: 8,
        interface_budget: Some(50 * MIB),
        ..crate::support::options(1)
    }
}

/// Returns an engine with a disk full of 0xaa.
fn source() -> (TestEngine, Client) {
    let engine = TestEngine::new("a", 32 * MIB, AuthorityRecord::created());
    let mut client = engine.attach(true);
    client.write(0, &[0xaa; 32 << 20]);
    (engine, client)
}

fn reach(puppet: &mut Puppet, generation: Generation) {
    let reached = Message::GenerationReached { generation };
    puppet.sync.write_all(&frame(reached)).expect("sent");
}

/// Waits until the engine has filled the window and the kernel takes no more.
fn let_it_fill() {
    std::thread::sleep(Duration::from_millis(500));
}

#[test]
fn a_pause_takes_back_what_waits_and_a_slot_is_read_again_only_when_its_frame_has_left() {
    let (engine, mut client) = source();
    let (mut interface, counter) = Interface::new();
    let mut puppet = Puppet::destination_of(&engine, options(), counter);
    let_it_fill();
    interface.crowd(&engine);
    let (message, _) = receive(&mut puppet.sync);
    let generation = Generation(1);
    assert_eq!(message, Message::NewGeneration { generation });
    // Nothing is locked any more, and the half sent frame carries the older data.
    client.write(0, &[0xbb; 8 << 20]);
    reach(&mut puppet, generation);
    engine.wait_for_core(|event| matches!(event, Event::Resumed { .. }));
    let_it_fill();
    let mut old = 0;
    let mut next = Lba(0);
    while next < Lba(8 * MIB / 512) {
        let (message, data) = receive(&mut puppet.copy);
        let Message::Copy {
            generation, extent, ..
        } = message
        else {
            panic!("{message:?} on a copy connection");
        };
        let byte = if generation == Generation(0) {
            assert_eq!(next, Lba(0), "an older frame after a newer one");
            old += 1;
            0xaa
        } else {
            assert_eq!(extent.start(), next);
            next = extent.end();
            0xbb
        };
        assert!(
            data.iter().all(|&each| each == byte),
            "{extent} of {generation:?} holds something else than {byte:#x}"
        );
    }
    // The kernel had taken a part of the window.
    assert!((1..=4).contains(&old), "{old} of 8 frames were sent");
}

#[test]
fn a_pause_takes_back_double_writes_and_answers_the_guest() {
    let (engine, mut client) = source();
    let (mut interface, counter) = Interface::new();
    let mut puppet = Puppet::destination_of(&engine, options(), counter);
    // More than may be posted, however long this test takes to acknowledge a copy.
    const LENGTH: u64 = 6 * MIB;
    puppet.take_copies(&engine, 24);
    // These go to both sides, and the other side does not even read them.
    for index in 0..4 {
        client.send(
            WRITE,
            0,
            index * LENGTH,
            LENGTH as u32,
            &[0xcc; LENGTH as usize],
        );
    }
    let_it_fill();
    // Each of them in pieces of 1 MiB, of which up to four may be posted if the acknowledgements took long.
    let in_flight = engine.handle.snapshot().requests_in_flight;
    assert!((20..=24).contains(&in_flight), "{in_flight}");
    interface.crowd(&engine);
    for _ in 0..4 {
        assert_eq!(client.receive(|_| 0).error, 0);
    }
    let mut begun = 0;
    loop {
        match receive(&mut puppet.sync) {
            (Message::DoubleWrite { .. }, data) => {
                assert!(data.iter().all(|&byte| byte == 0xcc));
                begun += 1;
            }
            (Message::NewGeneration { .. }, _) => break,
            (message, _) => panic!("{message:?} before the new generation"),
        }
    }
    assert!(begun <= 2, "{begun} of 4 double writes were sent");
    let pending = engine.handle.snapshot().progress.expect("progress").promise;
    assert_eq!(pending.delayed_bytes, 4 * LENGTH);
    // The double writes taken back come as delayed writes, each with the data of its own place.
    reach(&mut puppet, Generation(1));
    let mut delayed = 0;
    while delayed < 4 * LENGTH {
        let (message, data) = receive(&mut puppet.sync);
        let Message::DelayedWrite {
            slot, generation, ..
        } = message
        else {
            panic!("{message:?} where a delayed write should be");
        };
        assert!(data.iter().all(|&byte| byte == 0xcc));
        delayed += data.len() as u64;
        let written = Message::DelayedWritten {
            slot,
            generation,
            result: Ok(()),
        };
        puppet.sync.write_all(&frame(written)).expect("sent");
    }
    engine.wait_for_core(|event| matches!(event, Event::Resumed { .. }));
}

#[test]
fn a_disk_moves_however_often_its_migration_pauses() {
    pause_and_move(links);
}

pub(crate) fn pause_and_move(links: impl Fn(usize) -> (PeerStreams, PeerStreams)) {
    let a = TestEngine::new("a", 64 * MIB, AuthorityRecord::created());
    let b = TestEngine::new("b", 64 * MIB, AuthorityRecord::vacant());
    let mut client = a.attach(true);
    let mut expected = Random(4).bytes(64 << 20);
    for at in (0..64 * MIB).step_by(16 << 20) {
        client.write(at, &expected[at as usize..][..16 << 20]);
    }
    let (mut interface, counter) = Interface::new();
    let options = MigrationOptions {
        verify: true,
        max_bandwidth: Some(40 * MIB),
        ..options()
    };
    crate::pair::start_watched(&a, &b, options, links(2), Some(counter));
    let mut random = Random(9);
    for _ in 0..3 {
        interface.crowd(&a);
        for _ in 0..50 {
            let data = random.bytes(64 << 10);
            let at = random.below((64 * MIB - data.len() as u64) / 512) * 512;
            client.write(at, &data);
            expected[at as usize..][..data.len()].copy_from_slice(&data);
        }
        a.wait_for_core(|event| matches!(event, Event::Resumed { .. }));
    }
    a.wait_for_core(|event| match event {
        Event::MigrationAborted { reason, .. } => panic!("aborted: {reason}"),
        event => matches!(event, Event::MigrationCompleted { .. }),
    });
    let progress = a.handle.snapshot().progress.expect("progress");
    assert!(progress.verified);
    assert!(progress.promise.pauses.iter().sum::<u32>() >= 3);
    assert!(b.finish() == expected, "the images differ");
}
