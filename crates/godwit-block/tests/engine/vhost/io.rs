//! The requests of a well-behaved guest.

use std::collections::HashMap;

use godwit_core::units::MAX_EXTENT_SECTORS;
use godwit_testkit::vhost_client::{Client, Options, Status, readable};

use super::{MOMENT, SIZE, Served};
use crate::support::{PATIENCE, Random};

#[test]
fn a_guest_reads_what_it_wrote() {
    let served = Served::new("plain");
    for (event_index, indirect) in [(true, true), (true, false), (false, true), (false, false)] {
        let options = Options {
            event_index,
            indirect,
            ..Options::default()
        };
        let mut client = served.connect(options);
        let mut random = Random(7 + u64::from(event_index) * 2 + u64::from(indirect));
        for length in [512, 4096, 513 * 512, 1 << 20] {
            let sector = random.below(SIZE / 512 - length as u64 / 512);
            let bytes = random.bytes(length);
            assert_eq!(client.write(0, sector, &bytes), Status::OK);
            assert_eq!(client.read(0, sector, length), Ok(bytes), "{length}");
        }
        assert_eq!(client.flush(0), Status::OK);
    }
    served.engine.wait_until(|snapshot| {
        let counters = snapshot.counters;
        (counters.reads, counters.writes, counters.flushes) == (16, 16, 4) && counters.errors == 0
    });
}

#[test]
fn the_guest_learns_what_the_disk_is() {
    let served = Served::new("config");
    let mut client = served.connect(Options::default());
    let space = client.config().expect("the configuration");
    assert_eq!(space[..8], (SIZE / 512).to_le_bytes());
    assert_eq!(space[36..40], MAX_EXTENT_SECTORS.to_le_bytes());
    let serial = client.identify(0).expect("a serial number");
    assert_eq!(
        serial, *b"config\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        "the disk's name"
    );
}

#[test]
fn discarded_and_zeroed_sectors_read_as_zeroes() {
    let served = Served::new("zeroes");
    let mut client = served.connect(Options::default());
    assert_eq!(client.write(0, 0, &[0x55; 1 << 16]), Status::OK);
    assert_eq!(client.discard(0, 8, 8), Status::OK);
    assert_eq!(client.zero(0, 32, 9, true), Status::OK);
    assert_eq!(client.zero(0, 64, 1, false), Status::OK);
    let mut expected = vec![0x55; 1 << 16];
    expected[8 * 512..16 * 512].fill(0);
    expected[32 * 512..41 * 512].fill(0);
    expected[64 * 512..65 * 512].fill(0);
    assert_eq!(client.read(0, 0, 1 << 16), Ok(expected));
    assert_eq!(client.discard(0, SIZE / 512 - 1, 2), Status::ERROR);
    assert_eq!(client.zero(0, 0, 0, false), Status::ERROR);
}

#[test]
fn memory_that_the_disk_cannot_reach_directly_is_used_all_the_same() {
    let served = Served::new("unaligned");
    let mut client = served.connect(Options::default());
    let mut random = Random(3);
    let data = client.data();
    // Pieces of every alignment, of a request of whole sectors.
    for cuts in [
        vec![1],
        vec![511, 513],
        vec![512, 1536],
        vec![4096],
        vec![7, 8, 4000],
    ] {
        for shift in [0, 1, 512] {
            let total = 8192;
            let bytes = random.bytes(total);
            let mut pieces = Vec::new();
            let (mut at, mut done) = (data + shift, 0);
            let rest = total - cuts.iter().sum::<usize>();
            for length in cuts.iter().copied().chain([rest]) {
                client.memory.write(at, &bytes[done..done + length]);
                pieces.push((at, length));
                done += length;
                at += 16384 + length as u64;
            }
            let parts = |client: &Client, writable| -> Vec<_> {
                let part = |&(at, length): &(u64, usize)| client.part(at, length as u32, writable);
                pieces.iter().map(part).collect()
            };
            let write = client.submit(0, 1, 16, &parts(&client, false));
            client.queues[0].notify();
            assert_eq!(client.wait_for(0, write), Status::OK);
            for &(at, length) in &pieces {
                client.memory.write(at, &vec![0; length]);
            }
            let read = client.submit(0, 0, 16, &parts(&client, true));
            client.queues[0].notify();
            assert_eq!(client.wait_for(0, read), Status::OK);
            let mut found = Vec::new();
            for &(at, length) in &pieces {
                let mut piece = vec![0; length];
                client.memory.read(at, &mut piece);
                found.extend(piece);
            }
            assert!(found == bytes, "{cuts:?} shifted by {shift}");
        }
    }
}

#[test]
fn many_queues_are_served_at_once() {
    let served = Served::new("queues");
    let options = Options {
        queues: 16,
        size: 1024,
        indirect: true,
        data: 16 * 64 * 4096,
        ..Options::default()
    };
    let mut client = served.connect(options);
    let mut random = Random(5);
    let mut model = HashMap::new();
    let data = client.data();
    for round in 0..20 {
        // A write or read of its own block for each of 64 requests of each queue.
        let mut flying = HashMap::new();
        for queue in 0..16 {
            for index in 0..64_u64 {
                let block = queue as u64 * 64 + index;
                let offset = data + block * 4096;
                let reads = round > 0 && random.below(2) == 0;
                let head = if reads {
                    client.memory.write(offset, &[0xee; 4096]);
                    client.submit_read(queue, block * 8, offset, 4096)
                } else {
                    let bytes = random.bytes(4096);
                    client.memory.write(offset, &bytes);
                    model.insert(block, bytes);
                    client.submit_write(queue, block * 8, offset, 4096)
                };
                flying.insert((queue, head), (block, reads));
            }
            client.queues[queue].notify();
        }
        for queue in 0..16 {
            for _ in 0..64 {
                let done = client.queues[queue].wait(PATIENCE).expect("an answer");
                let (block, reads) = flying.remove(&(queue, done.head)).expect("asked for");
                assert_eq!(client.status(queue, done.head), Status::OK);
                assert_eq!(done.written, if reads { 4097 } else { 1 });
                if reads {
                    let mut bytes = vec![0; 4096];
                    client.memory.read(data + block * 4096, &mut bytes);
                    assert!(bytes == model[&block], "block {block}");
                }
            }
        }
        assert!(flying.is_empty());
    }
}

#[test]
fn more_requests_than_slots_are_all_answered() {
    let served = Served::new("slots");
    let options = Options {
        queues: 4,
        size: 1024,
        indirect: true,
        ..Options::default()
    };
    let mut client = served.connect(options);
    let data = client.data();
    for queue in 0..4 {
        for _ in 0..1024 {
            client.submit_write(queue, 0, data, 65536);
        }
        client.queues[queue].notify();
    }
    for queue in 0..4 {
        for _ in 0..1024 {
            let done = client.queues[queue].wait(PATIENCE).expect("an answer");
            assert_eq!(client.status(queue, done.head), Status::OK);
        }
    }
}

#[test]
fn a_guest_that_is_told_late_by_its_own_wish_is_told_once() {
    let served = Served::new("events");
    let mut client = served.connect(Options::default());
    let data = client.data();
    assert!(readable(&client.queues[0].call, PATIENCE), "of its start");
    client.queues[0].call.read().expect("a count");
    // Wants a signal at the eighth answer.
    let place = client.queues[0].places()[1] + 4 + 2 * u64::from(client.queues[0].size());
    client.memory.store(place, 7);
    for block in 0..8 {
        client.submit_read(0, block * 8, data + block * 4096, 4096);
    }
    client.queues[0].notify();
    assert!(readable(&client.queues[0].call, PATIENCE));
    assert_eq!(client.queues[0].call.read().expect("a count"), 1);
    assert_eq!(client.queues[0].used(), 8);
    assert!(!readable(&client.queues[0].call, MOMENT));
}

#[test]
fn exactly_what_the_device_writes_is_logged() {
    let served = Served::new("log");
    for event_index in [true, false] {
        let options = Options {
            queues: 2,
            event_index,
            ..Options::default()
        };
        let mut client = served.connect(options);
        let data = client.data();
        let page = |offset: u64| offset & !4095;
        assert_eq!(client.write(0, 0, &[1; 16384]), Status::OK);
        client.start_log().expect("a log");
        client.take_log();
        let used: Vec<_> = client
            .queues
            .iter()
            .map(|queue| page(queue.places()[2]))
            .collect();
        // A read into the middle of pages, of which the device writes four.
        let head = client.submit_read(1, 0, data + 512, 12288);
        client.queues[1].notify();
        assert_eq!(client.wait_for(1, head), Status::OK);
        client.stop_queue(1).expect("to stop");
        let mut expected: Vec<_> = (0..4).map(|index| data + index * 4096).collect();
        expected.extend([used[1], page(client.queues[1].status(head))]);
        expected.sort_unstable();
        assert_eq!(client.take_log(), expected, "{event_index}");
        // A write: nothing of the guest's data.
        let head = client.submit_write(0, 0, data, 4096);
        client.queues[0].notify();
        assert_eq!(client.wait_for(0, head), Status::OK);
        let mut expected = vec![used[0], page(client.queues[0].status(head))];
        expected.sort_unstable();
        client.stop_queue(0).expect("to stop");
        assert_eq!(client.take_log(), expected, "{event_index}");
    }
}

#[test]
fn nothing_is_logged_while_nobody_asks_for_it() {
    let served = Served::new("quiet");
    let mut client = served.connect(Options::default());
    client.start_log().expect("a log");
    client.read(0, 0, 4096).expect("a read");
    assert!(!client.take_log().is_empty());
    client.stop_log().expect("to stop logging");
    client.read(0, 0, 4096).expect("a read");
    assert!(client.take_log().is_empty());
}
