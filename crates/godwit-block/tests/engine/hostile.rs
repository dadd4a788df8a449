//! Bytes that no honest client or node sends.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use godwit_block::engine::{EngineConfig, EngineEvent};
use godwit_core::action::ChunkSlot;
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::{AbortReason, Event};
use godwit_core::request::{Operation, RequestTag};
use godwit_core::units::{Extent, Generation, Lba};
use godwit_core::wire::{Header, Kind, Message};

use crate::puppet::{ID, Puppet, frame, heard, open_forwarding};
use crate::support::*;

const MIB: u64 = 1 << 20;
fn destination() -> TestEngine {
    TestEngine::new("b", 8 * MIB, AuthorityRecord::vacant())
}

fn extent(start: u64, sectors: u32) -> Extent {
    Extent::new(Lba(start), sectors).expect("an extent")
}

/// Asserts that the connection is closed, the migration aborted, and the engine still works.
fn assert_refused(engine: &TestEngine) {
    engine.wait_for_core(|event| matches!(event, Event::ReceiveAborted { .. }));
    let again = Puppet::source_of(engine);
    drop(again);
    engine.wait_for_core(|event| {
        *event
            == Event::ReceiveAborted {
                migration: ID,
                reason: AbortReason::PeerLost,
            }
    });
}

#[test]
fn a_client_that_sends_garbage_is_disconnected() {
    let engine = TestEngine::new("a", MIB, AuthorityRecord::created());
    let mut honest = engine.attach(true);
    for seed in 0..20 {
        let mut client = engine.attach(seed % 2 == 0);
        let mut garbage = Random(seed).bytes(4096);
        garbage[0] = 0;
        // The client may be disconnected while it still sends.
        let _ = client.send_raw(&garbage);
        assert!(client.is_closed());
    }
    // A write longer than the limit.
    let mut client = engine.attach(true);
    client.send(WRITE, 0, 0, (32 << 20) + 512, &[]);
    assert!(client.is_closed());
    honest.write(0, &[1; 512]);
    engine.wait_until(|snapshot| snapshot.clients == 1);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_anything_frees_what_it_held() {
    // Clients leave faster than the engine notices.
    let mut config = EngineConfig::new(String::from("a"));
    config.max_clients = 400;
    let engine = TestEngine::with_config(config, 64 * MIB, AuthorityRecord::created());
    let mut random = Random(5);
    for _ in 0..300 {
        let (mut ours, theirs) = UnixStream::pair().expect("sockets");
        engine.attach_socket(theirs.into(), true);
        let mut client = Client::new(Box::new(ours.try_clone().expect("a clone")), true);
        for _ in 0..random.below(4) {
            client.send(READ, 0, random.below(32) << 20, 1 << 20, &[]);
            client.send(WRITE, 0, random.below(32) << 20, 4096, &[1; 4096]);
        }
        client.send(WRITE, 0, 0, 8 << 20, &[]);
        ours.write_all(&random.bytes(random.0 as usize % 100_000))
            .expect("part of a write");
    }
    engine.wait_until(|snapshot| snapshot.clients == 0 && snapshot.requests_in_flight == 0);
    // The longest request needs all of the memory to be free.
    let mut client = engine.attach(false);
    let data = random.bytes(32 << 20);
    client.write(0, &data);
    assert!(client.read(0, 32 << 20) == data);
}

#[test]
fn frames_that_are_none_end_the_migration() {
    for class in 0..3 {
        let engine = destination();
        let mut puppet = Puppet::source_of(&engine);
        let socket = [&mut puppet.control, &mut puppet.sync, &mut puppet.copy]
            .into_iter()
            .nth(class);
        let _ = socket
            .expect("a socket")
            .write_all(&Random(class as u64).bytes(1000));
        assert_refused(&engine);
    }
}

#[test]
fn frames_on_the_wrong_connection_end_the_migration() {
    let copy = Message::Copy {
        slot: ChunkSlot(0),
        generation: Generation(0),
        extent: extent(0, 8),
        zeroes: true,
    };
    let forward = Message::Forward {
        tag: RequestTag(0),
        number: 1,
        operation: Operation::Flush,
    };
    let reply = Message::ForwardReply {
        tag: RequestTag(0),
        number: 1,
        length: 0,
        result: Ok(()),
    };
    for (class, message) in [
        (0, copy),
        (1, copy),
        (0, forward),
        (1, forward),
        (1, reply),
        (2, Message::Ping),
    ] {
        let engine = destination();
        let mut puppet = Puppet::source_of(&engine);
        let socket = [&mut puppet.control, &mut puppet.sync, &mut puppet.copy]
            .into_iter()
            .nth(class);
        socket
            .expect("a socket")
            .write_all(&frame(message))
            .expect("sent");
        assert_refused(&engine);
    }
}

#[test]
fn lengths_that_do_not_fit_end_the_migration() {
    let long = |kind, payload_length, sectors| {
        Header {
            payload_length,
            sectors,
            ..Header::new(kind)
        }
        .encode()
    };
    for bytes in [
        long(Kind::Copy, 4096, 16),
        long(Kind::Copy, 4096, 0),
        long(Kind::Copy, 32 << 20, u32::MAX),
        long(Kind::Verify, 4096, 8),
        long(Kind::Verify, 31, 8),
        long(Kind::VerifyHole, 4096, 8),
    ] {
        let engine = destination();
        let mut puppet = Puppet::source_of(&engine);
        puppet.copy.write_all(&bytes).expect("sent");
        assert_refused(&engine);
    }
}

/// Returns a frame whose data, of 8 KiB, is sent as these blocks.
fn compressed(kind: Kind, blocks: &[u8]) -> Vec<u8> {
    let header = Header {
        sectors: 16,
        ..Header::new(kind)
    };
    let header = header.compressed(blocks.len() as u32).encode();
    [&header, blocks].concat()
}

/// Returns a block of uncompressed data.
fn stored(data: &[u8]) -> Vec<u8> {
    let length = data.len() as u32 | 1 << 31;
    [&length.to_le_bytes(), data].concat()
}

#[test]
fn compressed_data_that_is_none_ends_the_migration() {
    let garbage = [&4096_u32.to_le_bytes()[..], &Random(4).bytes(4096)].concat();
    for bytes in [
        compressed(Kind::Copy, &garbage),
        compressed(Kind::Copy, &[0; 8]),
        compressed(Kind::Copy, &stored(&[1; 4096])),
        compressed(Kind::Copy, &stored(&[1; 8192])),
        compressed(Kind::Copy, &[1, 0, 0]),
        compressed(Kind::Copy, &(u32::MAX >> 1).to_le_bytes()),
        compressed(Kind::Copy, &[]),
    ] {
        let engine = destination();
        let mut puppet = Puppet::source_of(&engine);
        puppet.copy.write_all(&bytes).expect("sent");
        assert_refused(&engine);
    }
    for kind in [Kind::DoubleWrite, Kind::DelayedWrite] {
        let engine = destination();
        let mut puppet = Puppet::source_of(&engine);
        let bytes = compressed(kind, &stored(&[1; 4096]));
        puppet.sync.write_all(&bytes).expect("sent");
        assert_refused(&engine);
    }
}

#[test]
fn a_peer_that_leaves_in_the_middle_of_compressed_data_frees_what_it_held() {
    for cut in [33, 40, 2000] {
        let engine = destination();
        for _ in 0..3 {
            let mut puppet = Puppet::source_of(&engine);
            let bytes = compressed(Kind::Copy, &stored(&[1; 4096]));
            puppet.copy.write_all(&bytes[..cut]).expect("sent");
            drop(puppet);
            engine.wait_for_core(|event| matches!(event, Event::ReceiveAborted { .. }));
        }
        engine.wait_until(|snapshot| snapshot.requests_in_flight == 0);
    }
}

#[test]
fn a_copy_past_the_end_of_the_disk_ends_the_migration() {
    let engine = destination();
    let mut puppet = Puppet::source_of(&engine);
    let message = Message::Copy {
        slot: ChunkSlot(0),
        generation: Generation(0),
        extent: extent(8 * MIB / 512 - 1, 2),
        zeroes: false,
    };
    puppet.copy.write_all(&frame(message)).expect("sent");
    puppet.copy.write_all(&[7; 1024]).expect("sent");
    engine.wait_for_core(|event| {
        *event
            == Event::ReceiveAborted {
                migration: ID,
                reason: AbortReason::Protocol,
            }
    });
    assert_eq!(
        std::fs::metadata(engine.image_path())
            .expect("the image")
            .len(),
        8 * MIB
    );
}

#[test]
fn a_peer_that_floods_and_reads_nothing_does_not_stop_the_engine() {
    let engine = destination();
    let mut puppet = Puppet::source_of(&engine);
    let copy = Message::Copy {
        slot: ChunkSlot(0),
        generation: Generation(0),
        extent: extent(0, 8),
        zeroes: false,
    };
    let mut bytes = frame(copy);
    bytes.extend_from_slice(&[3; 4096]);
    let ping = frame(Message::Ping);
    puppet
        .copy
        .set_write_timeout(Some(Duration::from_millis(300)))
        .expect("a timeout");
    for _ in 0..30_000 {
        if puppet.copy.write_all(&bytes).is_err() || puppet.control.write_all(&ping).is_err() {
            break;
        }
    }
    drop(puppet);
    engine.wait_for_core(|event| matches!(event, Event::ReceiveAborted { .. }));
    engine.wait_until(|snapshot| snapshot.requests_in_flight == 0);
}

#[test]
fn an_answer_that_was_not_asked_for_ends_the_forwarding() {
    for (length, asked) in [(0, false), (512, false), (1024, true), (0, true)] {
        let engine = TestEngine::new("a", MIB, departed());
        let (mut owner, theirs) = tcp_pair();
        engine.handle.forward(plain(theirs));
        let mut client = engine.attach(true);
        let (mut tag, mut number) = (RequestTag(3), 1);
        if asked {
            client.send(READ, 0, 0, 512, &[]);
            open_forwarding(&mut owner);
            let message = heard(&mut owner);
            let Message::Forward {
                tag: its,
                number: at,
                ..
            } = message
            else {
                panic!("{message:?} is not the forwarded read");
            };
            (tag, number) = (its, at);
        }
        let reply = Message::ForwardReply {
            tag,
            number,
            length,
            result: Ok(()),
        };
        owner.write_all(&frame(reply)).expect("sent");
        // The connection is dropped, not the client.
        engine.wait_for(|event| *event == EngineEvent::ForwardDown);
        engine.handle.fail_forwarded();
        if asked {
            assert_eq!(client.receive(|_| 512).error, 108);
        }
    }
}
