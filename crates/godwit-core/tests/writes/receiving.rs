//! The destination's handling of received data. Double writes are acknowledged before they are on the disk, without any
//! further answer. Nothing is taken from a source after its request for acceptance. The destination accepts durable
//! data and serves the disk.

use std::time::Duration;

use godwit_core::action::{Action, ChunkSlot, Content, DiskOperation, DiskTag};
use godwit_core::authority::{Authority, AuthorityRecord, Effect, Ownership};
use godwit_core::event::{AbortReason, Event};
use godwit_core::request::{RequestError, RequestTag};
use godwit_core::units::{Epoch, Extent, Generation, Lba, MigrationId, Sectors, Time};
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{AREA_SECTORS, Controller, Limits, MigrationOptions, StartError};

const LIMITS: Limits = Limits {
    requests: 256,
    window_chunks: 4,
    delayed_chunks: 4,
    delayed_ranges: 16,
    hot_places: 4,
    area_sectors: AREA_SECTORS,
    active_areas: 4,
};
pub(crate) const MIGRATION: MigrationId = MigrationId([7; 16]);
/// 4 KiB.
const BLOCK: u32 = 8;
/// Maximum number of blocks acknowledged and not written.
const EARLY: u32 = 128;

/// The destination of a move, whose own disk finishes nothing by itself.
pub(crate) struct Destination {
    pub(crate) controller: Controller,
    /// Messages to the source.
    pub(crate) said: Vec<Message>,
    /// Writes not finished by the disk.
    pub(crate) writing: Vec<RequestTag>,
    /// Writes whose buffers were released.
    pub(crate) released: Vec<RequestTag>,
    pub(crate) flushes: u32,
    /// The record of authority to be stored.
    pub(crate) storing: Option<AuthorityRecord>,
    pub(crate) aborted: Option<AbortReason>,
    /// Operations kept apart from the disk.
    pub(crate) kept: Vec<DiskOperation>,
    /// Error of the next operations to be kept.
    pub(crate) keeps_nothing: Option<RequestError>,
    /// Checkpoints with all their writes here.
    pub(crate) marked: Vec<u64>,
    /// Last epoch of the kept operations to be applied.
    pub(crate) applying: Option<u64>,
    pub(crate) drops: u32,
}

impl Destination {
    pub(crate) fn receiving() -> Self {
        Self::behind(Epoch(0))
    }

    /// Returns the destination of a node that has taken part in this epoch.
    pub(crate) fn behind(epoch: Epoch) -> Self {
        let record = AuthorityRecord {
            epoch,
            ..AuthorityRecord::vacant()
        };
        let mut controller = Controller::new(LIMITS, Sectors(1 << 20), record);
        controller
            .start_destination(Time(0), MIGRATION, Duration::from_secs(10))
            .expect("it receives");
        Self {
            controller,
            said: Vec::new(),
            writing: Vec::new(),
            released: Vec::new(),
            flushes: 0,
            storing: None,
            aborted: None,
            kept: Vec::new(),
            keeps_nothing: None,
            marked: Vec::new(),
            applying: None,
            drops: 0,
        }
    }

    pub(crate) fn hear(&mut self, class: TrafficClass, message: Message, buffer: Option<u32>) {
        let buffer = buffer.map(RequestTag);
        self.controller
            .handle_message(Time(0), class, message, buffer);
        self.carry_out();
    }

    /// Handles the source's copy of this block.
    fn copy(&mut self, block: u32, generation: Generation) {
        let copy = Message::Copy {
            slot: ChunkSlot(2),
            generation,
            extent: extent(block),
            zeroes: false,
        };
        self.hear(TrafficClass::Copy, copy, Some(block));
    }

    /// Handles the source's double write of this block.
    pub(crate) fn double_write(&mut self, block: u32) {
        let message = Message::DoubleWrite {
            tag: RequestTag(block),
            turn: 0,
            generation: Generation(0),
            extent: extent(block),
            zeroes: false,
            unmap: false,
        };
        self.hear(TrafficClass::Sync, message, Some(block));
    }

    pub(crate) fn prepare(&mut self) {
        let message = Message::Prepare {
            migration: MIGRATION,
            shared: false,
            lacks: false,
            epoch: Epoch(2),
        };
        self.hear(TrafficClass::Control, message, None);
    }

    /// Finishes the disk's oldest write.
    pub(crate) fn finish_write(&mut self, result: Result<(), RequestError>) {
        let tag = self.writing.remove(0);
        let result = result.map(|()| Content::Data);
        self.controller
            .handle_disk_done(Time(0), DiskTag::Replica(tag), result);
        self.carry_out();
    }

    /// Finishes the store of the record.
    pub(crate) fn finish_store(&mut self) {
        self.storing.take().expect("something is being stored");
        self.controller.handle_persisted(Time(0));
        self.carry_out();
    }

    fn commit(&mut self) {
        let message = Message::Commit {
            migration: MIGRATION,
            epoch: Epoch(2),
        };
        self.hear(TrafficClass::Control, message, None);
    }

    pub(crate) fn finish_flush(&mut self) {
        self.controller
            .handle_disk_done(Time(0), DiskTag::Barrier, Ok(Content::Data));
        self.carry_out();
    }

    pub(crate) fn carry_out(&mut self) {
        while let Some(action) = self.controller.poll_action() {
            match action {
                Action::Send { message, .. } => self.said.push(message),
                Action::Disk {
                    tag: DiskTag::Replica(tag),
                    operation: DiskOperation::Write { .. },
                } => self.writing.push(tag),
                Action::Disk {
                    tag,
                    operation:
                        operation @ (DiskOperation::Keep { .. } | DiskOperation::KeepZeroes { .. }),
                } => {
                    let result = self.keeps_nothing.map_or(Ok(Content::Data), Err);
                    self.kept.extend(result.is_ok().then_some(operation));
                    self.controller.handle_disk_done(Time(0), tag, result);
                }
                Action::Disk {
                    tag: DiskTag::Barrier,
                    ..
                } => self.flushes += 1,
                Action::ApplyKept { through } => {
                    assert_eq!(self.applying.replace(through), None, "one at a time");
                }
                Action::DropKept => self.drops += 1,
                Action::Notify(Event::CheckpointMarked { number, .. }) => self.marked.push(number),
                Action::ReleaseReplica { tag } => self.released.push(tag),
                Action::Persist { record } => self.storing = Some(record),
                Action::Notify(Event::ReceiveAborted { reason, .. }) => self.aborted = Some(reason),
                _ => {}
            }
        }
    }

    /// Withdraws the stored or pending acceptance: the migration ends here only afterwards.
    fn withdraw(&mut self) {
        assert_eq!(self.aborted, None);
        let before = AuthorityRecord::vacant();
        if self.storing != Some(before) {
            self.finish_store();
        }
        assert_eq!((self.storing, self.aborted), (Some(before), None));
        self.finish_store();
    }

    /// Returns the double writes acknowledged since the last call.
    pub(crate) fn take_acknowledged(&mut self) -> Vec<u32> {
        let acknowledged = |message| match message {
            Message::Ack {
                tag,
                result: Ok(()),
                ..
            } => tag,
            other => panic!("{other:?}"),
        };
        self.said.drain(..).map(acknowledged).collect()
    }
}

pub(crate) fn extent(block: u32) -> Extent {
    Extent::new(Lba(u64::from(block * BLOCK)), BLOCK).expect("an extent")
}

#[test]
fn a_double_write_is_acknowledged_while_the_disk_still_writes_and_only_once() {
    let mut destination = Destination::receiving();
    destination.double_write(3);
    assert_eq!(destination.take_acknowledged(), [3]);
    assert_eq!(destination.writing.len(), 1);
    destination.finish_write(Ok(()));
    assert!(destination.take_acknowledged().is_empty());
}

#[test]
fn a_disk_that_falls_behind_is_waited_for() {
    let mut destination = Destination::receiving();
    (0..EARLY + 2).for_each(|block| destination.double_write(block));
    let early = destination.take_acknowledged();
    assert!(early.into_iter().eq(0..EARLY));
    (0..EARLY).for_each(|_| destination.finish_write(Ok(())));
    assert!(destination.take_acknowledged().is_empty());
    destination.finish_write(Ok(()));
    assert_eq!(destination.take_acknowledged(), [EARLY]);
    destination.double_write(0);
    assert_eq!(destination.take_acknowledged(), [0], "there is room again");
}

#[test]
fn a_copy_is_acknowledged_when_it_is_written() {
    let mut destination = Destination::receiving();
    destination.copy(0, Generation(0));
    assert!(destination.take_acknowledged().is_empty());
    destination.finish_write(Ok(()));
    assert_eq!(destination.take_acknowledged(), [2]);
}

#[test]
fn the_disk_is_accepted_when_all_that_was_acknowledged_is_written() {
    let mut destination = Destination::receiving();
    destination.double_write(0);
    destination.double_write(1);
    destination.prepare();
    destination.finish_write(Ok(()));
    assert_eq!((destination.flushes, destination.aborted), (0, None));
    destination.finish_write(Ok(()));
    assert_eq!((destination.flushes, destination.aborted), (1, None));
}

#[test]
fn a_source_that_waits_for_an_answer_cannot_ask_for_acceptance() {
    let mut destination = Destination::receiving();
    (0..=EARLY).for_each(|block| destination.double_write(block));
    destination.prepare();
    assert_eq!(destination.aborted, Some(AbortReason::Protocol));
}

#[test]
fn a_comparison_that_a_pause_gave_up_keeps_no_source_from_asking() {
    let verify = |generation| Message::Verify {
        slot: ChunkSlot(1),
        generation: Generation(generation),
        extent: extent(0),
        digest: [0; 32],
    };
    let hole = |generation| Message::VerifyHole {
        slot: ChunkSlot(1),
        generation: Generation(generation),
        extent: extent(0),
    };
    let generation = Generation(1);
    for (question, pauses) in [
        (verify(0), true),
        (hole(0), true),
        (verify(1), false),
        (hole(1), false),
    ] {
        let mut destination = Destination::receiving();
        destination.hear(TrafficClass::Copy, question, Some(0));
        let paused = Message::NewGeneration { generation };
        destination.hear(TrafficClass::Sync, paused, None);
        destination.prepare();
        let refused = (!pauses).then_some(AbortReason::Protocol);
        assert_eq!(destination.aborted, refused, "{question:?}");
        assert_eq!(destination.flushes, 0, "the disk still reads");
        let tag = DiskTag::Replica(RequestTag(0));
        let read = Ok(Content::Data);
        destination.controller.handle_disk_done(Time(0), tag, read);
        destination.carry_out();
        assert_eq!(destination.flushes, u32::from(pauses), "{question:?}");
    }
}

#[test]
fn an_acknowledged_write_that_fails_ends_the_migration() {
    for asked in [false, true] {
        let mut destination = Destination::receiving();
        destination.double_write(0);
        destination.double_write(1);
        assert_eq!(destination.take_acknowledged(), [0, 1]);
        if asked {
            destination.prepare();
        }
        destination.finish_write(Err(RequestError::NoSpace));
        let reason = AbortReason::DestinationNoSpace;
        let migration = MIGRATION;
        if asked {
            destination.withdraw();
        }
        assert_eq!(destination.aborted, Some(reason));
        assert_eq!(destination.said, [Message::Abort { migration, reason }]);
        destination.finish_write(Ok(()));
        assert_eq!(destination.flushes, 0, "nothing is left to accept");
    }
}

/// Steps left for a destination after the request for acceptance.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Asked {
    /// Acknowledged data is being written, and the acceptance is being stored.
    Writing,
    /// The data is being made durable, and the acceptance is being stored.
    Flushing,
    /// The acceptance is being stored: the disk is durable.
    Storing,
    /// Acknowledged data is being made durable: the acceptance is stored.
    Stored,
}

impl Asked {
    const ALL: [Self; 4] = [Self::Writing, Self::Flushing, Self::Storing, Self::Stored];

    /// Returns a destination at this step, in generation 1.
    fn destination(self) -> Destination {
        let mut destination = Destination::receiving();
        destination.copy(0, Generation(1));
        destination.finish_write(Ok(()));
        if self == Self::Writing {
            destination.double_write(1);
        }
        destination.prepare();
        match self {
            Self::Writing | Self::Flushing => {}
            Self::Storing => destination.finish_flush(),
            Self::Stored => destination.finish_store(),
        }
        assert_eq!(destination.flushes, u32::from(self != Self::Writing));
        assert_eq!(destination.storing.is_some(), self != Self::Stored);
        let prepared = |message: &Message| matches!(message, Message::Prepared { .. });
        assert!(!destination.said.iter().any(prepared), "{self:?}");
        destination.said.clear();
        destination.released.clear();
        destination
    }
}

#[test]
fn nothing_is_written_that_is_sent_after_acceptance_was_asked_for() {
    for asked in Asked::ALL {
        let mut destination = asked.destination();
        let writing = destination.writing.clone();
        destination.double_write(5);
        assert_eq!(destination.writing, writing, "{asked:?}");
        assert_eq!(destination.released, [RequestTag(5)], "{asked:?}");
        let (migration, reason) = (MIGRATION, AbortReason::Protocol);
        assert_eq!(destination.said, [Message::Abort { migration, reason }]);
        destination.withdraw();
        assert_eq!(destination.aborted, Some(reason), "{asked:?}");
    }
}

#[test]
fn an_acceptance_that_nobody_was_told_of_is_taken_back() {
    for asked in Asked::ALL {
        let mut destination = asked.destination();
        let reason = AbortReason::Cancelled;
        assert!(destination.controller.cancel(Time(0), reason), "{asked:?}");
        destination.carry_out();
        let migration = MIGRATION;
        assert_eq!(destination.said, [Message::Abort { migration, reason }]);
        if asked == Asked::Flushing {
            destination.finish_flush();
        }
        destination.withdraw();
        assert_eq!(destination.aborted, Some(reason), "{asked:?}");
        assert_eq!(destination.said.len(), 1, "nothing was accepted");
    }
}

#[test]
fn a_disk_that_was_about_to_come_back_has_still_left() {
    let left = AuthorityRecord {
        epoch: Epoch(2),
        ownership: Ownership::Departed {
            migration: MigrationId([6; 16]),
        },
        remainder: None,
    };
    let migration = MIGRATION;
    let mut authority = Authority::new(left);
    assert!(authority.receive(migration));
    let epoch = Epoch(3);
    assert!(
        !authority
            .handle(&Message::Prepare {
                migration,
                epoch,
                shared: false,
                lacks: false,
            })
            .is_empty()
    );
    authority.persisted();
    let reason = AbortReason::PeerLost;
    assert_eq!(authority.stop_receiving(reason), [Effect::Persist(left)]);
    let aborted = [Effect::ReceiveAborted(migration, reason)];
    assert_eq!(authority.persisted(), aborted);
    assert_eq!(authority.record(), left);
}

#[test]
fn an_acceptance_that_the_source_was_told_of_is_the_source_s_to_decide() {
    let mut destination = Asked::Storing.destination();
    destination.finish_store();
    let reason = AbortReason::Cancelled;
    assert!(!destination.controller.cancel(Time(0), reason));
    let migration = MIGRATION;
    assert_eq!(destination.said, [Message::Prepared { migration }]);
}

#[test]
fn it_is_accepted_when_both_the_disk_and_the_acceptance_are_durable() {
    let migration = MIGRATION;
    for asked in [Asked::Storing, Asked::Stored] {
        let mut destination = asked.destination();
        match asked {
            Asked::Stored => destination.finish_flush(),
            _ => destination.finish_store(),
        }
        assert_eq!(destination.said, [Message::Prepared { migration }]);
    }
}

#[test]
fn it_is_served_as_soon_as_the_source_gave_it_away_and_confirmed_when_that_is_stored() {
    let mut destination = Asked::Storing.destination();
    destination.finish_store();
    destination.said.clear();
    assert!(!destination.controller.serves());
    destination.commit();
    assert!(destination.controller.serves());
    assert_eq!(destination.said, []);
    let serving = AuthorityRecord {
        epoch: Epoch(2),
        ownership: Ownership::Serving,
        remainder: None,
    };
    assert_eq!(destination.storing, Some(serving));
    let again = MigrationOptions {
        window_chunks: 1,
        idle_window_chunks: 1,
        busy_window_chunks: 1,
        ..MigrationOptions::new(MigrationId([8; 16]))
    };
    let leaves = destination.controller.start_source(Time(0), again);
    assert_eq!(leaves, Err(StartError::NotServing), "it cannot leave yet");
    destination.finish_store();
    let migration = MIGRATION;
    assert_eq!(destination.said, [Message::Committed { migration }]);
    assert!(destination.controller.serves());
}

#[test]
fn a_source_cannot_give_away_what_was_not_accepted() {
    for asked in Asked::ALL {
        let mut destination = asked.destination();
        destination.commit();
        assert!(!destination.controller.serves(), "{asked:?}");
        assert_eq!(destination.said, [], "{asked:?}");
    }
}

#[test]
fn a_copy_that_was_given_up_may_arrive_after_acceptance_was_asked_for() {
    for asked in Asked::ALL {
        let mut destination = asked.destination();
        destination.copy(5, Generation(0));
        assert_eq!(destination.released, [RequestTag(5)], "{asked:?}");
        assert_eq!((destination.said.len(), destination.aborted), (0, None));
    }
}

#[test]
fn an_image_is_emptied_only_when_nothing_of_an_earlier_move_is_on_its_way_to_it() {
    let mut node = Destination::receiving();
    node.copy(1, Generation(0));
    let gives_up = Message::Abort {
        migration: MIGRATION,
        reason: AbortReason::Cancelled,
    };
    node.hear(TrafficClass::Control, gives_up, None);
    assert!(node.aborted.is_some());
    assert!(!node.controller.give_up_image(), "it would be written over");
    node.finish_write(Ok(()));
    assert!(node.controller.give_up_image());
}
