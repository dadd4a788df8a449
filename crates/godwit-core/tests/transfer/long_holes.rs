//! A pulled disk leaves without its long holes.

use std::time::{Duration, Instant};

use godwit_core::action::{Action, Content, DiskOperation, DiskTag};
use godwit_core::authority::AuthorityRecord;
use godwit_core::request::{Operation, Origin, Request, RequestTag};
use godwit_core::units::{Extent, Lba, MigrationId, Sectors, Time};
use godwit_core::wire::Message;
use godwit_core::{
    AREA_SECTORS, Controller, Limits, MigrationChange, MigrationOptions, OlderCopy, PolicyOptions,
    PushOptions,
};

const LIMITS: Limits = Limits {
    requests: 64,
    window_chunks: 64,
    delayed_chunks: 8,
    delayed_ranges: 64,
    hot_places: 16,
    area_sectors: AREA_SECTORS,
    active_areas: 4,
};
/// 8 TiB.
const HUGE: Sectors = Sectors(1 << 34);
/// 64 MiB.
const SMALL: Sectors = Sectors(1 << 17);

const POST_COPY: PushOptions = PushOptions {
    threshold: 0,
    longest_push: None,
};

/// A source whose disk and destination do everything at once, except for held searches and writes.
struct Source {
    core: Controller,
    now: Time,
    /// Ranges with data: start and end.
    data: Vec<(u64, u64)>,
    holds_looks: bool,
    held_look: Option<Lba>,
    holds_writes: bool,
    held_write: Option<DiskTag>,
    /// Extents missing at the destination: start and sectors.
    lacks: Vec<(u64, u64)>,
    prepared: bool,
}

impl Source {
    fn leaving(capacity: Sectors, policy: PolicyOptions, data: &[(u64, u64)]) -> Self {
        let mut source = Self {
            core: Controller::new(LIMITS, capacity, AuthorityRecord::created()),
            now: Time(0),
            data: data.to_vec(),
            holds_looks: false,
            held_look: None,
            holds_writes: false,
            held_write: None,
            lacks: Vec::new(),
            prepared: false,
        };
        let options = MigrationOptions {
            policy,
            older_copy: OlderCopy::Zeroes,
            max_bandwidth: Some(1 << 20),
            ..MigrationOptions::new(MigrationId([1; 16]))
        };
        let started = source.core.start_source(source.now, options);
        started.expect("it starts");
        source
    }

    fn write(&mut self, start: u64, sectors: u32) {
        let extent = Extent::new(Lba(start), sectors).expect("an extent");
        let request = Request {
            tag: RequestTag(1),
            origin: Origin::Client,
            operation: Operation::Write { extent, fua: false },
        };
        self.core.handle_request(self.now, request);
        self.settle();
    }

    /// Returns the first hole at or behind a place.
    fn look(&self, from: Lba, capacity: u64) -> Content {
        let mut start = from.0;
        for (first, end) in &self.data {
            if (*first..*end).contains(&start) {
                start = *end;
            }
        }
        let next = self.data.iter().map(|(first, _)| *first);
        let end = next.filter(|first| *first > start).min();
        Content::LongHole {
            start: Lba(start.min(capacity)),
            end: Lba(end.unwrap_or(capacity)),
        }
    }

    fn answer_look(&mut self, capacity: Sectors) {
        let from = self.held_look.take().expect("it looks");
        let found = self.look(from, capacity.0);
        self.core
            .handle_disk_done(self.now, DiskTag::Holes, Ok(found));
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Disk {
                    operation: DiskOperation::FindLongHole { from },
                    ..
                } => {
                    self.held_look = Some(from);
                    if !self.holds_looks {
                        self.answer_look(HUGE);
                    }
                }
                Action::Disk { tag, .. }
                    if self.holds_writes && matches!(tag, DiskTag::Request(_)) =>
                {
                    self.held_write = Some(tag);
                }
                Action::Disk { tag, .. } => {
                    self.core.handle_disk_done(self.now, tag, Ok(Content::Data));
                }
                Action::Send { class, message } => {
                    let answer = match message {
                        Message::Lacks { start, sectors, .. } => {
                            self.lacks.push((start.0, u64::from(sectors)));
                            continue;
                        }
                        Message::Prepare { .. } => {
                            self.prepared = true;
                            continue;
                        }
                        Message::DoubleWrite {
                            tag,
                            turn,
                            generation,
                            ..
                        } => Message::Ack {
                            tag: godwit_core::wire::double_write_id(tag, turn),
                            generation,
                            result: Ok(()),
                        },
                        Message::Copy {
                            slot, generation, ..
                        } => Message::Ack {
                            tag: u32::from(slot.0),
                            generation,
                            result: Ok(()),
                        },
                        Message::NewGeneration { generation } => {
                            Message::GenerationReached { generation }
                        }
                        Message::Ping => Message::Pong,
                        _ => continue,
                    };
                    self.core.handle_message(self.now, class, answer, None);
                }
                _ => {}
            }
        }
    }

    /// Lets time pass until the destination was asked to accept.
    fn leave(&mut self) {
        for _ in 0..10_000 {
            self.settle();
            if self.prepared {
                return;
            }
            let next = self.core.next_deadline().expect("it goes on");
            self.now = self.now.max(next);
            self.core.handle_timer(self.now);
        }
        panic!("it does not leave");
    }
}

#[test]
fn of_8_tib_only_what_is_data_is_told() {
    let middle = HUGE.0 / 2;
    let data = [(0, 4096), (middle, middle + 8192)];
    let begun = Instant::now();
    let mut source = Source::leaving(HUGE, PolicyOptions::PushPull(POST_COPY), &data);
    source.leave();
    assert_eq!(source.lacks, [(0, 4096), (middle, 8192)]);
    // Without the search each 64 KiB would be announced separately.
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[test]
fn what_is_written_while_the_body_looks_is_no_hole() {
    let mut source = Source::leaving(HUGE, PolicyOptions::PushPull(POST_COPY), &[]);
    source.holds_looks = true;
    source.settle();
    source.write(80_000, 8);
    source.answer_look(HUGE);
    source.leave();
    assert_eq!(source.lacks, [(80_000, 8)]);
}

#[test]
fn a_write_that_was_under_way_when_the_body_looked_is_no_hole() {
    let policy = PolicyOptions::PushPull(PushOptions {
        threshold: 1,
        ..POST_COPY
    });
    let mut source = Source::leaving(SMALL, policy, &[]);
    source.holds_looks = true;
    source.settle();
    source.holds_writes = true;
    source.write(80_000, 8);
    // The first search is told of the write. The next search still finds the write at the disk.
    source.data = vec![(8192, 16384)];
    source.answer_look(SMALL);
    source.data.clear();
    source.answer_look(SMALL);
    let tag = source.held_write.take().expect("a write");
    source.holds_looks = false;
    source
        .core
        .handle_disk_done(source.now, tag, Ok(Content::Data));
    source.leave();
    assert!(source.lacks.contains(&(80_000, 8)), "{:?}", source.lacks);
}

#[test]
fn what_is_written_to_a_hole_that_was_found_is_told() {
    let policy = PolicyOptions::PushPull(PushOptions {
        threshold: 1,
        ..POST_COPY
    });
    let mut source = Source::leaving(HUGE, policy, &[(0, 8192)]);
    source.settle();
    source.write(HUGE.0 - 8, 8);
    source.leave();
    assert!(
        source.lacks.contains(&(HUGE.0 - 8, 8)),
        "{:?}",
        source.lacks
    );
}

#[test]
fn what_was_sent_to_a_place_counts_though_it_is_a_hole_now() {
    let mut source = Source::leaving(SMALL, PolicyOptions::Mirror, &[(0, SMALL.0)]);
    source.settle();
    source.write(80_000, 8);
    // The guest discards everything.
    source.data.clear();
    let change = MigrationChange {
        policy: Some(POST_COPY),
        ..MigrationChange::default()
    };
    let changed = source.core.change_migration(source.now, &change);
    changed.expect("it can be changed");
    source.leave();
    assert!(source.lacks.contains(&(80_000, 8)), "{:?}", source.lacks);
}
