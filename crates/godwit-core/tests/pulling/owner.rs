//! An owner that lacks a part of its disk.

use std::num::NonZeroU64;

use godwit_core::action::{Action, Content, DiskOperation, DiskTag, PullSlot};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::Event;
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::{Epoch, Extent, Lba, MigrationId, Sectors, Time};
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{AREA_SECTORS, Controller, Limits, Missing};

pub(crate) const LIMITS: Limits = Limits {
    requests: 16,
    window_chunks: 4,
    delayed_chunks: 1,
    delayed_ranges: 4,
    hot_places: 0,
    area_sectors: AREA_SECTORS,
    active_areas: 4,
};
/// 4 MiB: 64 chunks of 64 KiB, 1024 blocks of 4 KiB.
pub(crate) const CAPACITY: Sectors = Sectors(8192);
pub(crate) const MIGRATION: MigrationId = MigrationId([7; 16]);

/// An owner whose disk and store act at once, unless they are held.
pub(crate) struct Owner {
    pub(crate) core: Controller,
    pub(crate) now: Time,
    /// Unanswered pulls.
    pub(crate) asked: Vec<(PullSlot, Extent)>,
    /// Unanswered pulls from the image, if the missing blocks are in two places.
    pub(crate) asked_of_image: Vec<(PullSlot, Extent)>,
    pub(crate) answers: Vec<(u32, Result<(), RequestError>)>,
    /// Operations started on the disk, in order.
    pub(crate) disk: Vec<(DiskTag, DiskOperation)>,
    pub(crate) hold_disk: bool,
    pub(crate) held: Vec<DiskTag>,
    pub(crate) noted: Vec<Extent>,
    pub(crate) stored: u32,
    pub(crate) hold_store: bool,
    pub(crate) whole: bool,
    pub(crate) told_whole: bool,
}

pub(crate) fn extent(start: u64, sectors: u32) -> Extent {
    Extent::new(Lba(start), sectors).expect("an extent")
}

/// Returns the owner of a disk that lacks these parts, each with its heat.
pub(crate) fn lacking(parts: &[(Extent, u8)]) -> Owner {
    let mut words = vec![0; Missing::word_length(CAPACITY)];
    let mut heat = vec![0; Missing::heat_length(CAPACITY)];
    for (part, hot) in parts {
        for block in part.start().0 / 8..part.end().0.div_ceil(8) {
            words[(block / 64) as usize] |= 1 << (block % 64);
            heat[(block / 16) as usize] = *hot;
        }
    }
    of(CAPACITY, &words, &heat)
}

pub(crate) fn of(capacity: Sectors, words: &[u64], heat: &[u8]) -> Owner {
    let record = AuthorityRecord {
        epoch: Epoch(2),
        ownership: Ownership::Serving,
        remainder: Some(MIGRATION),
    };
    let mut core = Controller::new(LIMITS, capacity, record);
    let missing = Missing::from_parts(capacity, words, heat).expect("it fits");
    core.restore_missing(missing);
    Owner {
        core,
        now: Time(0),
        asked: Vec::new(),
        asked_of_image: Vec::new(),
        answers: Vec::new(),
        disk: Vec::new(),
        hold_disk: false,
        held: Vec::new(),
        noted: Vec::new(),
        stored: 0,
        hold_store: false,
        whole: false,
        told_whole: false,
    }
}

impl Owner {
    pub(crate) fn settle(&mut self) {
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Disk { tag, operation } => {
                    self.disk.push((tag, operation));
                    if self.hold_disk {
                        self.held.push(tag);
                    } else {
                        self.core.handle_disk_done(self.now, tag, Ok(Content::Data));
                    }
                }
                Action::Send {
                    class: TrafficClass::Pull,
                    message: Message::Pull { slot, extent },
                } => self.asked.push((slot, extent)),
                Action::Send {
                    class: TrafficClass::Image,
                    message: Message::Pull { slot, extent },
                } => self.asked_of_image.push((slot, extent)),
                Action::Send {
                    class: TrafficClass::Pull,
                    message: Message::Whole { migration },
                } => self.told_whole |= migration == MIGRATION,
                Action::Complete { tag, result } => self.answers.push((tag.0, result)),
                Action::NoteHere { extent } => self.noted.push(extent),
                Action::StoreMissing => {
                    assert!(self.core.missing_to_store().is_some());
                    self.stored += 1;
                    if !self.hold_store {
                        self.core.handle_missing_stored(self.now);
                    }
                }
                Action::Persist { .. } => self.core.handle_persisted(self.now),
                Action::Notify(Event::Whole { .. }) => self.whole = true,
                _ => {}
            }
        }
    }

    /// Connects the source, which announces its debt.
    pub(crate) fn connect(&mut self) {
        self.connect_within(None);
    }

    /// Like `connect`, with a bound on the bytes per second that may be pulled.
    pub(crate) fn connect_within(&mut self, bytes_per_second: Option<u64>) {
        self.asked.clear();
        self.core.handle_pull_up(self.now, false);
        let owes = Message::Owes {
            migration: MIGRATION,
            max_bandwidth: bytes_per_second.and_then(NonZeroU64::new),
        };
        self.core
            .handle_message(self.now, TrafficClass::Pull, owes, None);
        self.settle();
    }

    pub(crate) fn ask(&mut self, tag: u32, operation: Operation) {
        let request = Request {
            tag: RequestTag(tag),
            origin: Origin::Client,
            operation,
        };
        self.core.handle_request(self.now, request);
        self.settle();
    }

    pub(crate) fn read(&mut self, tag: u32, start: u64, sectors: u32) {
        self.ask(tag, Operation::Read(extent(start, sectors)));
    }

    pub(crate) fn write(&mut self, tag: u32, start: u64, sectors: u32) {
        let extent = extent(start, sectors);
        self.ask(tag, Operation::Write { extent, fua: false });
    }

    /// Answers the oldest pull, as the source.
    pub(crate) fn send(&mut self, result: Result<(), RequestError>) -> Extent {
        let (slot, extent) = self.asked.remove(0);
        self.send_in(slot, extent, result);
        extent
    }

    pub(crate) fn send_in(
        &mut self,
        slot: PullSlot,
        extent: Extent,
        result: Result<(), RequestError>,
    ) {
        self.arrives(slot, extent, false, result);
    }

    /// Answers the oldest pull with zeroes, as the source.
    pub(crate) fn send_zeroes(&mut self) {
        let (slot, extent) = self.asked.remove(0);
        self.arrives(slot, extent, true, Ok(()));
    }

    fn arrives(
        &mut self,
        slot: PullSlot,
        extent: Extent,
        zeroes: bool,
        result: Result<(), RequestError>,
    ) {
        let message = Message::Pulled {
            slot,
            extent,
            zeroes,
            result,
        };
        assert!(
            self.core
                .handle_pulled(self.now, TrafficClass::Pull, message),
            "it was asked for"
        );
        self.settle();
    }

    pub(crate) fn finish_disk(&mut self) {
        self.hold_disk = false;
        for tag in std::mem::take(&mut self.held) {
            self.core.handle_disk_done(self.now, tag, Ok(Content::Data));
        }
        self.settle();
    }

    pub(crate) fn answered(&self, tag: u32) -> bool {
        self.answers.iter().any(|(answered, _)| *answered == tag)
    }

    pub(crate) fn written(&self) -> Vec<Extent> {
        let pulled = |(tag, operation): &(DiskTag, DiskOperation)| match (tag, operation) {
            (DiskTag::Pulled(_), DiskOperation::Write { extent, .. }) => Some(*extent),
            _ => None,
        };
        self.disk.iter().filter_map(pulled).collect()
    }
}
