//! NBD clients and the image.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use godwit_block::engine::{EngineConfig, EngineError, EngineEvent};
use godwit_block::image::Image;
use godwit_core::authority::AuthorityRecord;

use crate::pair::cancel;
use crate::support::*;

const MIB: u64 = 1 << 20;

fn engine(size: u64) -> TestEngine {
    TestEngine::new("serve", size, AuthorityRecord::created())
}

/// Mixed operations of one client, one at a time, against a copy in memory.
fn mixed(structured: bool, seed: u64) {
    mixed_on(engine(16 * MIB), structured, seed);
}

fn mixed_on(engine: TestEngine, structured: bool, seed: u64) {
    let size = 16 * MIB;
    let mut client = engine.attach(structured);
    let mut model = vec![0_u8; size as usize];
    let mut random = Random(seed);
    for _ in 0..400 {
        let longest = if random.below(20) == 0 { 4096 } else { 40 };
        let length = (1 + random.below(longest)) * 512;
        let offset = random.below((size - length) / 512) * 512;
        let range = offset as usize..(offset + length) as usize;
        let fua = if random.below(8) == 0 { FUA } else { 0 };
        match random.below(10) {
            0..=3 => {
                let data = random.bytes(length as usize);
                assert_eq!(
                    client.call(WRITE, fua, offset, length as u32, &data).error,
                    0
                );
                model[range].copy_from_slice(&data);
            }
            4..=6 => assert!(client.read(offset, length as usize) == model[range]),
            7 => {
                assert_eq!(client.call(TRIM, fua, offset, length as u32, &[]).error, 0);
                model[range].fill(0);
            }
            8 => {
                let flags = fua | if random.below(2) == 0 { NO_HOLE } else { 0 };
                assert_eq!(
                    client
                        .call(WRITE_ZEROES, flags, offset, length as u32, &[])
                        .error,
                    0
                );
                model[range].fill(0);
            }
            _ => assert_eq!(client.call(FLUSH, 0, 0, 0, &[]).error, 0),
        }
    }
    engine.wait_until(|snapshot| snapshot.clients == 1);
    assert!(engine.finish() == model, "the image differs from the model");
}

#[test]
fn every_operation_does_what_the_model_does_with_simple_replies() {
    mixed(false, 1);
}

#[test]
fn every_operation_does_what_the_model_does_with_structured_replies() {
    mixed(true, 2);
}

#[test]
fn every_operation_works_where_direct_io_does_not() {
    let config = EngineConfig::new("tmpfs".to_owned());
    let record = AuthorityRecord::created();
    let memory = Path::new("/dev/shm");
    mixed_on(
        TestEngine::with_image(config, memory, 16 * MIB, record, |i| i, |_| true),
        true,
        3,
    );
}

/// Simulates a disk with blocks of 4 KiB: shorter requests go through the page cache.
fn with_large_blocks() -> TestEngine {
    let change = |mut image: Image| {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&image.path);
        image.buffered = Some(file.expect("the image").into());
        image.alignment = 4096;
        image
    };
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let config = EngineConfig::new("blocks".to_owned());
    let record = AuthorityRecord::created();
    TestEngine::with_image(config, directory, 16 * MIB, record, change, |_| true)
}

#[test]
fn every_operation_works_on_a_disk_with_large_blocks() {
    mixed_on(with_large_blocks(), true, 4);
}

#[test]
fn neighbours_in_a_large_block_do_not_undo_each_other() {
    let engine = with_large_blocks();
    let mut client = engine.attach(false);
    let mut model = vec![0; 8 * 4096];
    for round in 1..100_u8 {
        let mut sent = 0;
        // Every sector is written once per round: alone, or with all of its block.
        for block in 0..8_usize {
            let start = block * 4096;
            if (block + usize::from(round)) % 2 == 0 {
                model[start..start + 4096].fill(round);
                client.send(WRITE, 0, start as u64, 4096, &[round; 4096]);
                sent += 1;
            } else {
                for sector in 0..8_usize {
                    let at = start + sector * 512;
                    let value = round ^ (sector as u8) << 5;
                    model[at..at + 512].fill(value);
                    client.send(WRITE, 0, at as u64, 512, &[value; 512]);
                    sent += 1;
                }
            }
        }
        for _ in 0..sent {
            assert_eq!(client.receive(|_| 0).error, 0);
        }
        assert!(client.read(0, model.len()) == model, "round {round}");
    }
}

#[test]
fn a_defect_is_reported_and_does_not_take_the_process_down() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let config = EngineConfig::new("broken".to_owned());
    let record = AuthorityRecord::created();
    let observe = |event: &EngineEvent| {
        assert_ne!(*event, EngineEvent::Clients(2), "on purpose");
        true
    };
    let engine = TestEngine::with_image(config, directory, MIB, record, |i| i, observe);
    let mut first = engine.attach(false);
    first.write(0, &[1; 512]);
    let mut second = engine.attach(false);
    let event = engine.wait_for(|event| matches!(event, EngineEvent::Failed(_)));
    assert!(format!("{event:?}").contains("on purpose"), "{event:?}");
    assert!(first.is_closed() && second.is_closed());
    assert!(matches!(
        engine.handle.clone().join(),
        Err(EngineError::Failed { .. })
    ));
}

#[test]
fn the_longest_requests_work_and_longer_ranges_are_split() {
    let engine = engine(160 * MIB);
    let mut client = engine.attach(true);
    let data = Random(3).bytes(32 << 20);
    client.write(512, &data);
    assert!(client.read(512, 32 << 20) == data);
    let answer = client.call(WRITE_ZEROES, FUA, 1024, (120 << 20) + 512, &[]);
    assert_eq!(answer.error, 0);
    let after = client.read(0, 32 << 20);
    assert!(after[512..1024] == data[..512]);
    assert!(after[1024..].iter().all(|&byte| byte == 0));
    assert!(
        client
            .read((32 << 20) + 512, 512)
            .iter()
            .all(|&byte| byte == 0)
    );
    assert_eq!(client.call(TRIM, 0, 0, 160 << 20, &[]).error, 0);
    assert_eq!(client.call(TRIM, 0, 512, 160 << 20, &[]).error, 22);
    assert!(engine.finish().iter().all(|&byte| byte == 0));
}

#[test]
fn many_requests_in_flight_are_each_answered_once() {
    let engine = engine(64 * MIB);
    let mut client = engine.attach(false);
    let mut expected = HashMap::new();
    let mut random = Random(4);
    let blocks: Vec<Vec<u8>> = (0..64).map(|_| random.bytes(4096)).collect();
    for round in 0..4_u64 {
        for (index, block) in blocks.iter().enumerate() {
            let cookie = client.send(WRITE, 0, (round * 64 + index as u64) * 4096, 4096, block);
            expected.insert(cookie, None);
        }
        for _ in 0..blocks.len() {
            let answer = client.receive(|_| 0);
            assert_eq!(answer.error, 0);
            assert_eq!(expected.remove(&answer.cookie), Some(None::<usize>));
        }
        for index in 0..blocks.len() {
            let cookie = client.send(READ, 0, (round * 64 + index as u64) * 4096, 4096, &[]);
            expected.insert(cookie, Some(index));
        }
        for _ in 0..blocks.len() {
            let answer = client.receive(|_| 4096);
            let index = expected
                .remove(&answer.cookie)
                .flatten()
                .expect("a read of ours");
            assert!(answer.data == blocks[index]);
        }
    }
    assert!(expected.is_empty());
    engine.wait_until(|snapshot| snapshot.counters.writes == 256 && snapshot.counters.reads == 256);
}

#[test]
fn bad_requests_are_answered_and_the_connection_goes_on() {
    let engine = engine(MIB);
    let mut client = engine.attach(true);
    for (kind, flags, offset, length, error) in [
        (READ, 0, 0, 0, 22),
        (READ, 0, 1, 512, 22),
        (READ, 0, 0, 513, 22),
        (READ, 0, MIB, 512, 22),
        (READ, 0, u64::MAX - 511, 512, 22),
        (READ, 0, 0, (32 << 20) + 512, 22),
        (FLUSH, 0x80, 0, 0, 22),
        (99, 0, 0, 512, 22),
        (WRITE_ZEROES, 0, MIB - 512, 1024, 28),
        (TRIM, 0, MIB - 512, 1024, 22),
    ] {
        let answer = client.call(kind, flags, offset, length, &[]);
        assert_eq!(answer.error, error, "kind {kind} at {offset} of {length}");
    }
    // The data of refused writes is skipped.
    let data = vec![0x28; 5000];
    assert_eq!(client.call(WRITE, 0, MIB, 4096, &data[..4096]).error, 28);
    assert_eq!(client.call(WRITE, 0, 7, 5000, &data).error, 22);
    client.write(4096, &data[..512]);
    assert!(client.read(4096, 512) == data[..512]);
    engine.wait_until(|snapshot| snapshot.counters.errors == 12);
}

#[test]
fn a_client_that_disconnects_is_answered_first() {
    let engine = engine(16 * MIB);
    let mut client = engine.attach(false);
    let data = vec![7; 1 << 20];
    let write = client.send(WRITE, FUA, 0, 1 << 20, &data);
    client.send(DISCONNECT, 0, 0, 0, &[]);
    assert_eq!(
        client.receive(|_| 0),
        Answer {
            cookie: write,
            error: 0,
            data: vec![]
        }
    );
    assert!(client.is_closed());
    engine.wait_for(|event| *event == EngineEvent::Clients(1));
    engine.wait_for(|event| *event == EngineEvent::Clients(0));
}

#[test]
fn a_client_that_reads_nothing_does_not_hold_up_others() {
    let mut config = EngineConfig::new("slow".to_owned());
    config.limits.requests = 64;
    let engine = TestEngine::with_config(config, 64 * MIB, AuthorityRecord::created());
    let mut slow = engine.attach(false);
    // Fewer than the tags available, and more data than sockets hold.
    for index in 0..16_u64 {
        slow.send(READ, 0, index << 20, 1 << 20, &[]);
    }
    let mut fast = engine.attach(false);
    let started = Instant::now();
    for index in 0..200_u64 {
        fast.write(index * 4096, &[index as u8; 4096]);
    }
    assert!(started.elapsed() < Duration::from_secs(10));
    for _ in 0..16 {
        assert_eq!(slow.receive(|_| 1 << 20).error, 0);
    }
}

#[test]
fn more_requests_than_tags_and_memory_all_get_through() {
    let mut config = EngineConfig::new("crowd".to_owned());
    config.limits.requests = 64;
    let engine = TestEngine::with_config(config, 128 * MIB, AuthorityRecord::created());
    let workers: Vec<_> = (0..4_u64)
        .map(|worker| {
            let mut client = engine.attach(worker % 2 == 0);
            std::thread::spawn(move || {
                let mut random = Random(worker + 10);
                let base = worker * 32 * MIB;
                for _ in 0..6 {
                    // 40 MiB in flight per client, of 64 MiB for all of them.
                    let blocks: Vec<_> = (0..40).map(|_| random.bytes(4096)).collect();
                    let large = random.bytes(20 << 20);
                    client.send(WRITE, 0, base, 20 << 20, &large);
                    for (index, block) in blocks.iter().enumerate() {
                        client.send(WRITE, 0, base + 24 * MIB + index as u64 * 4096, 4096, block);
                    }
                    for _ in 0..41 {
                        assert_eq!(client.receive(|_| 0).error, 0);
                    }
                    assert!(client.read(base, 20 << 20) == large);
                    for (index, block) in blocks.iter().enumerate() {
                        let offset = base + 24 * MIB + index as u64 * 4096;
                        assert!(client.read(offset, 4096) == *block);
                    }
                }
            })
        })
        .collect();
    for worker in workers {
        worker.join().expect("a worker");
    }
    engine.wait_until(|snapshot| snapshot.requests_in_flight == 0);
}

#[test]
fn too_many_clients_are_refused() {
    let mut config = EngineConfig::new("full".to_owned());
    config.max_clients = 1;
    let engine = TestEngine::with_config(config, MIB, AuthorityRecord::created());
    let mut first = engine.attach(false);
    first.write(0, &[1; 512]);
    assert!(engine.attach(false).is_closed());
    assert!(first.read(0, 512) == [1; 512]);
}

#[test]
fn shutdown_finishes_what_is_in_flight() {
    let engine = engine(64 * MIB);
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    engine.attach_socket(theirs.into(), false);
    let mut client = Client::new(Box::new(ours), false);
    let data = vec![9; 4 << 20];
    for index in 0..8 {
        client.send(WRITE, 0, index << 22, 4 << 20, &data);
    }
    assert_eq!(client.receive(|_| 0).error, 0);
    engine.handle.shutdown();
    engine.handle.clone().join().expect("a clean end");
    // A call on an engine that has ended does nothing.
    engine.handle.attach(godwit_block::engine::ClientStream {
        socket: UnixStream::pair().expect("sockets").0.into(),
        tls: None,
        received: vec![],
        structured_replies: false,
        base_allocation: false,
        address: String::new(),
        place: None,
    });
    assert!(!cancel(&engine));
}

#[test]
fn a_baseline_tells_how_long_clients_waited() {
    let engine = TestEngine::new("a", MIB, AuthorityRecord::created());
    let baseline = || ask(|reply| engine.handle.latency_baseline(reply));
    assert_eq!(baseline().expect("a running engine").requests(), 0);
    let mut client = engine.attach(true);
    for _ in 0..50 {
        client.write(0, &[1; 4096]);
    }
    // Requests of past seconds count like requests of the current second.
    std::thread::sleep(Duration::from_millis(1300));
    for _ in 0..50 {
        client.read(0, 4096);
    }
    let measured = baseline().expect("a running engine");
    assert_eq!(measured.requests(), 100);
    let [median, most, longest] = [
        measured.at_quantile(0.5),
        measured.at_quantile(0.9999),
        measured.longest(),
    ];
    assert!(Duration::ZERO < median && median <= most && most <= longest);
    engine.handle.shutdown();
    engine.handle.clone().join().expect("a clean end");
    assert!(baseline().is_none(), "an engine that has ended");
}

#[test]
fn block_status_tells_holes_and_never_of_what_is_written() {
    const ONE: u16 = 1 << 3;
    let engine = engine(16 * MIB);
    let mut client = engine.attach(true);
    let mut status =
        |flags, offset, length, parts| client.allocation(flags, (offset, length), parts);
    let all = 16 * MIB as u32;
    assert_eq!(status(0, 0, all, 1), [all, 3]);
    let mut writer = engine.attach(false);
    assert_eq!(writer.call(1, 0, 1 << 20, 65536, &[5; 65536]).error, 0);
    let mib = 1 << 20;
    let rest = all - mib - 65536;
    assert_eq!(status(0, 0, all, 3), [mib, 3, 65536, 0, rest, 3]);
    assert_eq!(status(ONE, 0, all, 1), [mib, 3]);
    assert_eq!(status(0, 1 << 20, 512, 1), [512, 0]);
    // Fast zeroes: the file system makes holes.
    assert_eq!(writer.call(6, 1 << 4, 1 << 20, 65536, &[]).error, 0);
    assert_eq!(status(0, 0, all, 1), [all, 3]);
    // Many ranges are reported in several answers.
    for block in 0..100 {
        assert_eq!(
            writer.call(1, 0, block * 131_072, 65536, &[5; 65536]).error,
            0
        );
    }
    assert_eq!(status(0, 0, all, 64).len(), 128);
    let refused = writer.call(BLOCK_STATUS, 0, 0, 512, &[]);
    assert_eq!(refused.error, 22, "it was not negotiated");
}
