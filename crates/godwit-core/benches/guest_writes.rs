//! Guest 4 KiB writes per second that the core handles on one core during a migration: in the migrated region (every
//! write is doubled), with 256 in flight.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use godwit_core::action::{Action, Content, DiskTag};
use godwit_core::authority::AuthorityRecord;
use godwit_core::request::{Operation, Origin, Request, RequestTag};
use godwit_core::units::{Extent, Generation, Lba, MigrationId, Sectors, Time};
use godwit_core::wire::{Message, TrafficClass, double_write_id};
use godwit_core::{AREA_SECTORS, Controller, Limits, MigrationOptions};

const IN_FLIGHT: u32 = 256;
const CAPACITY: Sectors = Sectors((64 << 30) / 512);
const BATCH: u64 = 1024;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A source whose first half is migrated and whose window waits for acknowledgements.
struct Bench {
    controller: Controller,
    /// By tag: the turn of the last double write.
    turns: Vec<u16>,
    oldest: u32,
    random: u64,
}

impl Bench {
    fn new(migrating: bool) -> Self {
        let limits = Limits {
            requests: IN_FLIGHT,
            window_chunks: 16,
            delayed_chunks: 4,
            delayed_ranges: 1024,
            hot_places: 1024,
            area_sectors: AREA_SECTORS,
            active_areas: 64,
        };
        let mut controller = Controller::new(limits, CAPACITY, AuthorityRecord::created());
        if migrating {
            let options = MigrationOptions {
                chunk_sectors: 32768,
                busy_chunk_sectors: 32768,
                window_chunks: 16,
                busy_window_chunks: 16,
                peer_timeout: Duration::from_secs(1 << 30),
                ..MigrationOptions::new(MigrationId([1; 16]))
            };
            controller
                .start_source(Time(0), options)
                .expect("it serves");
            copy_half(&mut controller);
        }
        let mut bench = Self {
            controller,
            turns: vec![0; IN_FLIGHT as usize],
            oldest: 0,
            random: 1,
        };
        (0..IN_FLIGHT).for_each(|tag| bench.write(RequestTag(tag)));
        bench
    }

    fn write(&mut self, tag: RequestTag) {
        self.random = self
            .random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let block = (self.random >> 33) % (CAPACITY.0 / 2 / 8 - 65536);
        let extent = Extent::new(Lba(block * 8), 8).expect("4 KiB");
        let operation = Operation::Write { extent, fua: false };
        let request = Request {
            tag,
            origin: Origin::Client,
            operation,
        };
        self.controller.handle_request(Time(0), request);
        self.drain();
    }

    /// Carries out the core's actions; returns true if a request was answered.
    fn drain(&mut self) -> bool {
        let mut answered = false;
        while let Some(action) = self.controller.poll_action() {
            match black_box(action) {
                // A write that waited for an overlapping write is sent only now.
                Action::Send {
                    message: Message::DoubleWrite { tag, turn, .. },
                    ..
                } => self.turns[tag.0 as usize] = turn,
                Action::Complete { .. } => answered = true,
                _ => {}
            }
        }
        answered
    }

    /// Finishes the oldest write at both ends and issues another one in its place.
    fn turn(&mut self) {
        let tag = RequestTag(self.oldest);
        self.oldest = (self.oldest + 1) % IN_FLIGHT;
        let controller = &mut self.controller;
        controller.handle_disk_done(Time(0), DiskTag::Request(tag), Ok(Content::Data));
        let ack = Message::Ack {
            tag: double_write_id(tag, self.turns[tag.0 as usize]),
            generation: Generation(0),
            result: Ok(()),
        };
        controller.handle_message(Time(0), TrafficClass::Sync, ack, None);
        assert!(self.drain(), "the write was not answered");
        self.write(tag);
    }
}

/// Answers chunk reads and acknowledges copies until half of the disk is migrated.
fn copy_half(controller: &mut Controller) {
    while controller
        .progress()
        .is_some_and(|progress| progress.bytes_copied < CAPACITY.bytes().0 / 2)
    {
        match controller.poll_action() {
            Some(Action::Disk {
                tag: tag @ DiskTag::Chunk(_),
                ..
            }) => {
                controller.handle_disk_done(Time(0), tag, Ok(Content::Zeroes));
            }
            Some(Action::Send {
                message: Message::Copy {
                    slot, generation, ..
                },
                ..
            }) => {
                let ack = Message::Ack {
                    tag: u32::from(slot.0),
                    generation,
                    result: Ok(()),
                };
                controller.handle_message(Time(0), TrafficClass::Copy, ack, None);
            }
            Some(_) => {}
            None => panic!("the migration stopped"),
        }
    }
    while controller.poll_action().is_some() {}
}

fn guest_writes(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("guest 4 KiB writes, 256 in flight");
    group.throughput(Throughput::Elements(BATCH));
    for (name, migrating) in [("migrated region", true), ("no migration", false)] {
        let mut bench = Bench::new(migrating);
        (0..BATCH * 64).for_each(|_| bench.turn());
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..BATCH * 64).for_each(|_| bench.turn());
        let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(
            allocations, 0,
            "{name}: the core allocated while it served requests"
        );
        group.bench_function(name, |bencher| {
            bencher.iter(|| (0..BATCH).for_each(|_| bench.turn()));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().without_plots();
    targets = guest_writes
}
criterion_main!(benches);
