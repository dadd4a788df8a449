//! Blocks known to be written since a disk came, and their use when the disk goes back.

use std::time::Duration;

use godwit_core::action::{Action, Content, DiskOperation, DiskTag, Inspect};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::Event;
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::sla::LatencyTarget;
use godwit_core::units::{Epoch, Extent, Lba, MigrationId, Sectors, Time};
use godwit_core::wire::{Message, Taken, TrafficClass};
use godwit_core::{
    AREA_SECTORS, Controller, DOUBLE_WRITE, DeltaBy, ImageOffer, Limits, MIRROR, MigrationOptions,
    Missing, OlderCopy, PRE_COPY, PUSH_PULL, PolicyOptions, Switchover, Written,
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
/// 8 MiB, and a block that the end cuts short.
const CAPACITY: Sectors = Sectors((8 << 11) + 3);
const CAME: MigrationId = MigrationId([1; 16]);
const GOES: MigrationId = MigrationId([2; 16]);

fn extent(start: u64, sectors: u32) -> Extent {
    Extent::new(Lba(start), sectors).expect("an extent")
}

/// A node whose disk does everything at once.
struct Node {
    core: Controller,
    now: Time,
    /// Reads of the window, in order.
    read: Vec<(Extent, Inspect)>,
    sent: Vec<Message>,
    events: Vec<Event>,
    /// A sector whose chunk differs.
    differs_at: u64,
    /// True if the disk fails the guest's writes.
    fails_writes: bool,
    /// True if the destination does not answer copies.
    holds_copies: bool,
}

impl Node {
    fn new(record: AuthorityRecord) -> Self {
        Self {
            core: Controller::new(LIMITS, CAPACITY, record),
            now: Time(1),
            read: Vec::new(),
            sent: Vec::new(),
            events: Vec::new(),
            differs_at: u64::MAX,
            fails_writes: false,
            holds_copies: false,
        }
    }

    fn settle(&mut self) {
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Disk { tag, operation } => {
                    let fails = self.fails_writes && matches!(tag, DiskTag::Request(_));
                    let result = match fails {
                        true => Err(RequestError::Io),
                        false => Ok(self.content(tag, operation)),
                    };
                    self.core.handle_disk_done(self.now, tag, result);
                }
                Action::Persist { .. } => self.core.handle_persisted(self.now),
                Action::Send { class, message } => {
                    self.sent.push(message);
                    self.answer(class, message);
                }
                Action::Notify(event) => self.events.push(event),
                _ => {}
            }
        }
    }

    fn content(&mut self, tag: DiskTag, operation: DiskOperation) -> Content {
        let DiskOperation::Read { extent, inspect } = operation else {
            return Content::Data;
        };
        if let DiskTag::Chunk(_) = tag {
            self.read.push((extent, inspect));
        }
        match inspect {
            Inspect::Digest => Content::Digest([0; 32]),
            Inspect::Zeroes | Inspect::Nothing => Content::Data,
        }
    }

    fn answer(&mut self, class: TrafficClass, message: Message) {
        let answer = match message {
            Message::Copy { .. } if self.holds_copies => return,
            Message::Copy {
                slot, generation, ..
            } => Message::Ack {
                tag: u32::from(slot.0),
                generation,
                result: Ok(()),
            },
            Message::Verify {
                slot,
                generation,
                extent,
                ..
            } => Message::Verified {
                slot,
                generation,
                result: Ok(!(extent.start().0..extent.end().0).contains(&self.differs_at)),
            },
            _ => return,
        };
        self.core.handle_message(self.now, class, answer, None);
    }

    fn hears(&mut self, message: Message) {
        let class = TrafficClass::Control;
        self.core.handle_message(self.now, class, message, None);
        self.settle();
    }

    fn write(&mut self, start: u64, sectors: u32) {
        let operation = Operation::Write {
            extent: extent(start, sectors),
            fua: false,
        };
        self.core.handle_request(
            self.now,
            Request {
                tag: RequestTag(0),
                origin: Origin::Client,
                operation,
            },
        );
        self.settle();
    }

    /// Receives the disk.
    fn receive(&mut self) {
        let timeout = Duration::from_secs(10);
        self.core
            .start_destination(self.now, CAME, timeout)
            .expect("it starts");
        self.hears(Message::Prepare {
            migration: CAME,
            epoch: Epoch(2),
            shared: false,
            lacks: false,
        });
        self.hears(Message::Commit {
            migration: CAME,
            epoch: Epoch(2),
        });
        assert!(self.core.serves());
    }

    fn leave(&mut self, older_copy: OlderCopy, policy: PolicyOptions) {
        self.leave_by(MigrationOptions {
            older_copy,
            policy,
            switchover: Switchover::WhenTold,
            ..MigrationOptions::new(GOES)
        });
    }

    fn leave_image(&mut self) {
        self.leave_by(MigrationOptions {
            image: ImageOffer::OnePlace,
            policy: PRE_COPY.usual.without_image(),
            switchover: Switchover::WhenTold,
            ..MigrationOptions::new(GOES)
        });
    }

    fn leave_by(&mut self, options: MigrationOptions) {
        self.core
            .start_source(self.now, options)
            .expect("it starts");
        self.settle();
    }

    /// Lets time pass.
    fn pass(&mut self, time: Duration) {
        let end = self.now.after(time);
        while let Some(at) = self.core.next_deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.core.handle_timer(self.now);
            self.settle();
        }
        self.now = end;
    }

    /// Returns true if the guest's write to this extent went to both nodes.
    fn doubled(&self, written: Extent) -> bool {
        let is_it = |message: &Message| matches!(message, Message::DoubleWrite { extent, .. } if *extent == written);
        self.sent.iter().any(is_it)
    }

    fn copied(&self) -> Vec<Extent> {
        let copies = self.sent.iter().filter_map(|message| match message {
            Message::Copy { extent, .. } => Some(*extent),
            _ => None,
        });
        copies.collect()
    }
}

/// Returns the owner of a disk received by this process.
fn received() -> Node {
    let mut node = Node::new(AuthorityRecord::vacant());
    node.receive();
    node
}

#[test]
fn what_is_written_since_the_disk_came_is_known_to_the_process_that_received_it_only() {
    let mut node = received();
    node.write(16, 1);
    let written = node.core.written().expect("it is known");
    assert_eq!((written.since(), written.bytes().0), (CAME, 4096));
    // An earlier process may have served before storing its ownership. Its writes are unknown.
    let accepted = AuthorityRecord {
        epoch: Epoch(2),
        ownership: Ownership::Accepted { migration: CAME },
        remainder: None,
    };
    let mut later = Node::new(accepted);
    later.hears(Message::Commit {
        migration: CAME,
        epoch: Epoch(2),
    });
    assert!(later.core.serves() && later.core.written().is_none());
}

#[test]
fn a_disk_goes_back_with_what_was_written_and_what_is_written_meanwhile() {
    for policy in [DOUBLE_WRITE, MIRROR, PRE_COPY, PUSH_PULL] {
        let policy = policy.usual;
        let mut node = received();
        node.write(17, 1);
        node.write(8 << 11, 3);
        node.leave(OlderCopy::Since(CAME), policy);
        assert_eq!(
            node.copied(),
            [extent(16, 8), extent(8 << 11, 3)],
            "{policy:?}"
        );
        let delta = node.core.progress().and_then(|progress| progress.delta);
        let delta = delta.expect("it is one");
        let size = CAPACITY.bytes().0;
        assert_eq!(
            (delta.by, delta.bytes_skipped),
            (DeltaBy::Written, size - 4096 - 3 * 512)
        );
        // In places without a copy the guest's writes reach the destination like any other writes.
        node.write(4096, 8);
        let doubles = matches!(policy, PolicyOptions::DoubleWrite | PolicyOptions::Mirror);
        assert_eq!(node.doubled(extent(4096, 8)), doubles, "{policy:?}");
        // A cancelled move forgets none of these blocks.
        assert!(
            node.core
                .cancel(node.now, godwit_core::event::AbortReason::Cancelled)
        );
        let written = node.core.written().expect("it is still known");
        assert_eq!(written.bytes().0, 3 * 4096);
    }
}

#[test]
fn what_follows_the_last_difference_counts_as_copied_while_that_is_on_its_way() {
    let mut node = received();
    node.write(16, 8);
    node.holds_copies = true;
    node.leave(OlderCopy::Since(CAME), PolicyOptions::DoubleWrite);
    assert_eq!(node.copied(), [extent(16, 8)]);
    node.write(4096, 8);
    assert!(node.doubled(extent(4096, 8)));
}

#[test]
fn what_was_forwarded_and_is_done_here_while_the_guest_is_held_stays() {
    let mut node = Node::new(AuthorityRecord::vacant());
    node.core.handle_forward_up(node.now);
    node.hears(Message::Fence {
        number: 0,
        taken: Taken::Nothing,
        shared: false,
        failed: false,
    });
    // The owner answers this write neither before the disk comes here nor before the disk leaves again.
    node.write(16, 8);
    node.receive();
    node.leave_by(MigrationOptions {
        older_copy: OlderCopy::Since(CAME),
        policy: PUSH_PULL.usual,
        sla: Some(LatencyTarget {
            limit: Duration::from_millis(5),
            allowed_per_million: 100,
        }),
        ..MigrationOptions::new(GOES)
    });
    assert!(node.copied().is_empty(), "there is nothing to push");
    node.core.handle_forward_lost(node.now);
    node.settle();
    let lacks = Message::Lacks {
        at_source: false,
        start: Lba(16),
        sectors: 8,
        heat: 1,
    };
    assert!(node.sent.contains(&lacks), "{:?}", node.sent);
    let asks = |message: &Message| matches!(message, Message::Prepare { lacks: true, .. });
    assert!(node.sent.iter().any(asks), "{:?}", node.sent);
    // The destination takes a late copy for a breach of the protocol.
    node.pass(Duration::from_millis(100));
    assert_eq!(node.copied(), []);
}

#[test]
fn an_image_of_another_time_is_compared_and_only_what_differs_is_copied() {
    for older in [OlderCopy::Unknown, OlderCopy::Since(MigrationId([9; 16]))] {
        let mut node = received();
        node.write(0, 8);
        node.differs_at = 4000;
        node.leave(older, PolicyOptions::DoubleWrite);
        let compared: u32 = (node.read.iter())
            .filter(|(_, inspect)| *inspect == Inspect::Digest)
            .map(|(extent, _)| extent.sectors())
            .sum();
        assert_eq!(u64::from(compared), CAPACITY.0);
        assert_eq!(node.copied(), [extent(3968, 128)]);
        assert_eq!(node.core.written().expect("kept").bytes().0, 4096);
    }
}

#[test]
fn what_a_guest_writes_while_images_are_compared_is_copied() {
    let mut node = received();
    let options = MigrationOptions {
        older_copy: OlderCopy::Unknown,
        switchover: Switchover::WhenTold,
        ..MigrationOptions::new(GOES)
    };
    node.core.start_source(node.now, options).expect("starts");
    // Nothing has been compared.
    let operation = Operation::Write {
        extent: extent(8000, 8),
        fua: false,
    };
    node.core.handle_request(
        node.now,
        Request {
            tag: RequestTag(0),
            origin: Origin::Client,
            operation,
        },
    );
    node.settle();
    assert_eq!(node.copied(), [extent(8000, 8)]);
}

/// Returns a node after a disk's departure, while the node's image is being made durable.
fn making_durable() -> Node {
    let mut node = Node::new(AuthorityRecord::created());
    node.leave(OlderCopy::None, PolicyOptions::DoubleWrite);
    node.core.switch_over(node.now);
    node.settle();
    node.hears(Message::Prepared { migration: GOES });
    node.core.handle_message(
        node.now,
        TrafficClass::Control,
        Message::Committed { migration: GOES },
        None,
    );
    let mut flushes = 0;
    let mut told = 0;
    while let Some(action) = node.core.poll_action() {
        match action {
            Action::Persist { .. } => node.core.handle_persisted(node.now),
            Action::Disk {
                tag: DiskTag::BaseFlush,
                ..
            } => flushes += 1,
            Action::Notify(Event::BecameBase { .. }) => told += 1,
            _ => {}
        }
    }
    assert_eq!((flushes, told), (1, 0));
    node
}

fn becomes_base(mut node: Node) -> bool {
    node.core
        .handle_disk_done(node.now, DiskTag::BaseFlush, Ok(Content::Data));
    node.settle();
    let of = Event::BecameBase { migration: GOES };
    node.events.contains(&of)
}

#[test]
fn the_image_of_a_disk_that_left_counts_once_it_is_durable() {
    assert!(becomes_base(making_durable()));
}

#[test]
fn an_image_that_is_emptied_while_it_is_made_durable_never_counts() {
    let mut node = making_durable();
    assert!(node.core.give_up_image());
    assert!(!becomes_base(node));
}

/// Returns the owner of a disk whose first block is only in its image, during the comparison with this image.
fn being_compared() -> Node {
    let mut node = Node::new(AuthorityRecord {
        remainder: Some(CAME),
        ..AuthorityRecord::created()
    });
    let mut lacks = vec![0; Missing::word_length(CAPACITY)];
    lacks[0] = 1;
    let heat = vec![0; Missing::heat_length(CAPACITY)];
    let missing = Missing::from_parts(CAPACITY, &lacks, &heat).expect("it fits");
    node.core.restore_missing(missing);
    node.core.pull_on_demand_only();
    let missing = node.core.begin_comparison().expect("it begins");
    assert_eq!(missing, lacks);
    node
}

/// Ends the comparison without any difference from the image.
fn compare(node: &mut Node) -> bool {
    let mut same = vec![0; Missing::word_length(CAPACITY)];
    same[0] = 1;
    let nothing = vec![0; same.len()];
    node.core.end_comparison(&nothing, &same)
}

#[test]
fn what_is_in_the_image_only_is_never_copied_from_where_a_write_to_it_failed() {
    let mut node = being_compared();
    node.fails_writes = true;
    node.write(0, 8);
    assert!(!compare(&mut node), "the comparison is of no use");

    let mut node = being_compared();
    assert!(compare(&mut node));
    node.leave_image();
    node.fails_writes = true;
    node.write(0, 8);
    assert_eq!(node.copied(), []);
    assert!(!node.core.switch_over(node.now), "the disk stays");

    // Present blocks are copied as usual.
    let mut node = being_compared();
    assert!(compare(&mut node));
    node.leave_image();
    node.fails_writes = true;
    node.write(64, 8);
    assert!(node.core.switch_over(node.now));
    node.settle();
    assert_eq!(node.copied(), [extent(64, 8)]);
}

#[test]
fn the_image_of_a_disk_that_left_without_a_part_of_its_own_image_never_counts() {
    let mut node = being_compared();
    assert!(compare(&mut node));
    node.leave_image();
    assert!(node.core.switch_over(node.now));
    node.settle();
    node.hears(Message::Prepared { migration: GOES });
    node.hears(Message::Committed { migration: GOES });
    let gone = Event::MigrationCompleted { migration: GOES };
    assert!(node.events.contains(&gone), "{:?}", node.events);
    let base = Event::BecameBase { migration: GOES };
    assert!(!node.events.contains(&base), "{:?}", node.events);
}

#[test]
fn a_process_that_ends_in_order_leaves_what_was_written_to_the_next() {
    let mut first = received();
    first.write(64, 8);
    let words: Vec<u64> = first.core.written().expect("known").words().collect();
    let record = first.core.record();
    let mut next = Node::new(record);
    let written = Written::from_words(CAME, CAPACITY, &words).expect("it fits");
    next.core.restore_written(written);
    next.write(128, 8);
    next.leave(OlderCopy::Since(CAME), PolicyOptions::Mirror);
    assert_eq!(next.copied(), [extent(64, 8), extent(128, 8)]);
}
