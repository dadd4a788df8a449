//! Clients and nodes that stop in the middle of something, and the others beside them.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use godwit_block::engine::EngineConfig;
use godwit_block::nbd::RequestHeader;
use godwit_core::authority::AuthorityRecord;
use godwit_core::request::{Operation, RequestTag};
use godwit_core::units::{Extent, Lba};
use godwit_core::wire::Message;

use crate::puppet::{begin_forwarding, frame};
use crate::support::*;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 128 * MIB;

/// `NBD_CMD_FLAG_DF`: the answer comes in one chunk.
const ONE_CHUNK: u16 = 4;

/// Longest wait because of others, with room for a busy machine.
const LONGEST: Duration = Duration::from_millis(200);

fn header(kind: u16, cookie: u64, offset: u64, length: u32) -> [u8; 28] {
    let flags = 0;
    RequestHeader {
        flags,
        kind,
        cookie,
        offset,
        length,
    }
    .encode()
}

/// Connects a client that sends requests as long as the engine reads them, and takes no answer.
fn reads_no_answers(engine: &TestEngine) -> UnixStream {
    let (mut ours, theirs) = UnixStream::pair().expect("sockets");
    engine.attach_socket(theirs.into(), true);
    ours.set_write_timeout(Some(Duration::from_millis(100)))
        .expect("a timeout");
    for cookie in 0..2000 {
        if ours.write_all(&header(READ, cookie, 0, 1 << 20)).is_err() {
            break;
        }
    }
    ours
}

/// Connects a client that stops within a write.
fn stops_writing(engine: &TestEngine) -> UnixStream {
    let (mut ours, theirs) = UnixStream::pair().expect("sockets");
    engine.attach_socket(theirs.into(), true);
    ours.write_all(&header(WRITE, 1, 0, 32 << 20))
        .expect("a header");
    ours.write_all(&vec![1; (3 << 20) + 5]).expect("part of it");
    ours
}

/// Returns the longest wait of a good client for one of its requests, short ones and long ones.
fn longest_wait(client: &mut Client) -> Duration {
    let mut longest = Duration::ZERO;
    let mut clock = |act: &mut dyn FnMut()| {
        let started = Instant::now();
        act();
        longest = longest.max(started.elapsed());
    };
    let short = Random(1).bytes(4096);
    let long = Random(2).bytes(2 << 20);
    for round in 0..50 {
        let offset = 64 * MIB + round * 4096;
        clock(&mut || client.write(offset, &short));
        clock(&mut || assert!(client.read(offset, 4096) == short));
    }
    for round in 0..4 {
        let offset = 96 * MIB + round * 2 * MIB;
        clock(&mut || client.write(offset, &long));
        clock(&mut || assert!(client.read(offset, long.len()) == long));
    }
    longest
}

#[test]
fn two_stalled_clients_hold_up_no_other() {
    let engine = TestEngine::new("a", SIZE, AuthorityRecord::created());
    let stalled = [reads_no_answers(&engine), stops_writing(&engine)];
    let mut good = engine.attach(true);
    let longest = longest_wait(&mut good);
    println!("the longest wait: {longest:?}");
    assert!(longest <= LONGEST, "{longest:?}");
    // Nor does an honest client with the longest request.
    let longest = Random(3).bytes(32 << 20);
    good.write(0, &longest);
    assert!(good.read(0, longest.len()) == longest);
    drop(stalled);
}

#[test]
fn as_many_stalled_clients_as_there_may_be_hold_up_no_other() {
    let engine = TestEngine::new("a", SIZE, AuthorityRecord::created());
    let stalled: Vec<_> = (0..62)
        .map(|number| match number % 2 {
            0 => reads_no_answers(&engine),
            _ => stops_writing(&engine),
        })
        .collect();
    let mut good = [engine.attach(true), engine.attach(false)];
    for client in &mut good {
        let longest = longest_wait(client);
        println!("the longest wait: {longest:?}");
        assert!(longest <= LONGEST * 3, "{longest:?}");
    }
    drop(stalled);
    engine.wait_until(|snapshot| snapshot.clients == 2 && snapshot.requests_in_flight == 0);
}

/// Connects a node that forwards reads as long as the engine reads them, and takes no answer.
fn takes_no_answers(engine: &TestEngine, name: &str) -> TcpStream {
    let (mut ours, theirs) = tcp_pair();
    engine
        .handle
        .serve_forwarded(name.to_owned(), plain(theirs));
    begin_forwarding(&mut ours, 1);
    ours.set_write_timeout(Some(Duration::from_millis(100)))
        .expect("a timeout");
    for tag in 0..2000 {
        let extent = Extent::new(Lba(0), 2048).expect("an extent");
        let message = Message::Forward {
            tag: RequestTag(tag),
            number: tag + 1,
            operation: Operation::Read(extent),
        };
        if ours.write_all(&frame(message)).is_err() {
            break;
        }
    }
    ours
}

#[test]
fn a_node_that_takes_no_answers_holds_up_nobody_elses_clients() {
    let engine = TestEngine::new("a", SIZE, AuthorityRecord::created());
    let other = TestEngine::new("b", SIZE, departed());
    let stalled = [
        takes_no_answers(&engine, "c"),
        takes_no_answers(&engine, "d"),
    ];
    let (ours, theirs) = tcp_pair();
    engine.handle.serve_forwarded("b".to_owned(), plain(theirs));
    other.handle.forward(plain(ours));
    for engine in [&engine, &other] {
        let longest = longest_wait(&mut engine.attach(true));
        println!("the longest wait: {longest:?}");
        assert!(longest <= LONGEST, "{longest:?}");
    }
    drop(stalled);
}

#[test]
fn stalled_clients_do_not_keep_an_engine_from_its_end() {
    let engine = TestEngine::new("a", SIZE, AuthorityRecord::created());
    let stalled = [reads_no_answers(&engine), stops_writing(&engine)];
    engine.wait_until(|snapshot| snapshot.clients == 2);
    let started = Instant::now();
    engine.finish();
    assert!(started.elapsed() < Duration::from_secs(8));
    drop(stalled);
}

#[test]
fn long_requests_are_whole_however_they_are_answered() {
    let engine = TestEngine::new("a", SIZE, AuthorityRecord::created());
    let mut model = vec![0; SIZE as usize];
    let mut random = Random(4);
    for structured in [true, false] {
        let mut client = engine.attach(structured);
        for length in [MIB + 512, 2 * MIB, 5 * MIB - 512, 32 * MIB] {
            let offset = random.below((SIZE - length) / 512) * 512;
            let data = random.bytes(length as usize);
            client.write(offset, &data);
            model[offset as usize..][..data.len()].copy_from_slice(&data);
            // Other requests are under way at the same time; their answers must not get between the parts.
            let flags = if structured && length % 1024 == 0 {
                ONE_CHUNK
            } else {
                0
            };
            let asked = [
                (offset, 4096, 0),
                (offset, length, flags),
                (offset + 512, 4096, 0),
                (offset, length, 0),
                (offset, 512, 0),
            ]
            .map(|(offset, length, flags)| {
                let cookie = client.send(READ, flags, offset, length as u32, &[]);
                (cookie, offset as usize, length as usize)
            });
            for _ in asked {
                let of = |cookie| asked.into_iter().find(|(asked, ..)| *asked == cookie);
                let answer = client.receive(|cookie| of(cookie).expect("a cookie").2);
                let (_, offset, length) = of(answer.cookie).expect("a cookie");
                assert_eq!(answer.error, 0);
                assert!(answer.data == model[offset..][..length], "{length} bytes");
            }
        }
    }
    assert!(engine.finish() == model);
}

#[test]
fn a_client_that_leaves_within_a_long_request_leaves_nothing_behind() {
    let mut config = EngineConfig::new("a".to_owned());
    config.limits.requests = 64;
    let engine = TestEngine::with_config(config, SIZE, AuthorityRecord::created());
    for round in 0..40 {
        let stalled = [reads_no_answers(&engine), stops_writing(&engine)];
        if round % 2 == 0 {
            engine.wait_until(|snapshot| snapshot.clients == 2);
        }
        drop(stalled);
    }
    engine.wait_until(|snapshot| snapshot.clients == 0 && snapshot.requests_in_flight == 0);
    let mut good = engine.attach(false);
    let data = Random(5).bytes(32 << 20);
    good.write(0, &data);
    assert!(good.read(0, data.len()) == data);
}
