//! Waiting writes to one block reach the disk as one.

use godwit_core::action::{Action, Content, DiskOperation, DiskTag};
use godwit_core::authority::AuthorityRecord;
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::{Extent, Lba, Sectors, Time};
use godwit_core::{AREA_SECTORS, Controller, Limits};

const LIMITS: Limits = Limits {
    requests: 16,
    window_chunks: 4,
    delayed_chunks: 4,
    delayed_ranges: 16,
    hot_places: 4,
    area_sectors: AREA_SECTORS,
    active_areas: 4,
};

/// A controller whose disk finishes nothing by itself.
struct Disk {
    controller: Controller,
    /// Operations started on the disk, in order.
    started: Vec<(u32, Operation)>,
    answered: Vec<(u32, Result<(), RequestError>)>,
}

impl Disk {
    fn new() -> Self {
        let capacity = Sectors(2048);
        Self {
            controller: Controller::new(LIMITS, capacity, AuthorityRecord::created()),
            started: Vec::new(),
            answered: Vec::new(),
        }
    }

    fn ask(&mut self, tag: u32, operation: Operation) {
        let request = Request {
            tag: RequestTag(tag),
            origin: Origin::Client,
            operation,
        };
        self.controller.handle_request(Time(0), request);
        self.carry_out();
    }

    fn finish(&mut self, tag: u32, result: Result<(), RequestError>) {
        let tag = DiskTag::Request(RequestTag(tag));
        let result = result.map(|()| Content::Data);
        self.controller.handle_disk_done(Time(0), tag, result);
        self.carry_out();
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.controller.poll_action() {
            match action {
                Action::Disk {
                    tag: DiskTag::Request(tag),
                    operation,
                } => {
                    let operation = match operation {
                        DiskOperation::Write { extent, fua } => Operation::Write { extent, fua },
                        DiskOperation::Read { extent, .. } => Operation::Read(extent),
                        other => panic!("{other:?}"),
                    };
                    self.started.push((tag.0, operation));
                }
                Action::Complete { tag, result } => self.answered.push((tag.0, result)),
                _ => {}
            }
        }
    }

    fn take_started(&mut self) -> Vec<(u32, Operation)> {
        std::mem::take(&mut self.started)
    }

    fn take_answered(&mut self) -> Vec<(u32, Result<(), RequestError>)> {
        let mut answered = std::mem::take(&mut self.answered);
        answered.sort_by_key(|&(tag, _)| tag);
        answered
    }
}

fn blocks(start: u64, count: u32) -> Extent {
    Extent::new(Lba(start * 8), count * 8).expect("an extent")
}

fn write(start: u64, count: u32) -> Operation {
    Operation::Write {
        extent: blocks(start, count),
        fua: false,
    }
}

fn durable_write(start: u64, count: u32) -> Operation {
    Operation::Write {
        extent: blocks(start, count),
        fua: true,
    }
}

#[test]
fn of_the_writes_that_wait_the_newest_is_carried_out_and_all_are_answered_then() {
    let mut disk = Disk::new();
    disk.ask(0, write(5, 1));
    for tag in [1, 2, 3] {
        disk.ask(tag, write(5, 1));
    }
    assert_eq!(disk.take_started(), [(0, write(5, 1))]);
    disk.finish(0, Ok(()));
    assert_eq!(disk.take_answered(), [(0, Ok(()))]);
    assert_eq!(disk.take_started(), [(3, write(5, 1))]);
    // A write from after the start of the combined write.
    disk.ask(4, write(5, 1));
    disk.finish(3, Ok(()));
    assert_eq!(disk.take_answered(), [1, 2, 3].map(|tag| (tag, Ok(()))));
    assert_eq!(disk.take_started(), [(4, write(5, 1))]);
    disk.finish(4, Ok(()));
    assert_eq!(disk.take_answered(), [(4, Ok(()))]);
}

#[test]
fn all_are_durable_when_one_has_to_be() {
    let mut disk = Disk::new();
    disk.ask(0, write(5, 1));
    disk.ask(1, write(5, 1));
    disk.ask(2, durable_write(5, 1));
    disk.ask(3, write(5, 1));
    disk.take_started();
    disk.finish(0, Ok(()));
    assert_eq!(disk.take_started(), [(3, durable_write(5, 1))]);
}

#[test]
fn all_fail_when_the_one_that_is_carried_out_does() {
    let mut disk = Disk::new();
    disk.ask(0, write(5, 1));
    disk.ask(1, write(5, 1));
    // The third write waits for the second, and the fourth for the third. The third is neither combined with the others
    // nor answered together with the others.
    disk.ask(2, write(4, 3));
    disk.ask(3, write(5, 1));
    disk.finish(0, Ok(()));
    disk.take_started();
    disk.take_answered();
    disk.finish(3, Err(RequestError::Io));
    let failed = Err(RequestError::Io);
    assert_eq!(disk.take_answered(), [(1, failed), (3, failed)]);
    assert_eq!(disk.take_started(), [(2, write(4, 3))]);
    disk.finish(2, Ok(()));
    assert_eq!(disk.take_answered(), [(2, Ok(()))]);
}

#[test]
fn what_reaches_further_does_not_overtake_what_it_came_after() {
    let mut disk = Disk::new();
    disk.ask(0, write(5, 1));
    disk.ask(1, write(5, 1));
    disk.ask(2, write(6, 1));
    // The fourth write waits for the third; the second waits too.
    disk.ask(3, write(5, 2));
    disk.ask(4, write(5, 1));
    disk.finish(0, Ok(()));
    assert_eq!(
        disk.take_started(),
        [(0, write(5, 1)), (2, write(6, 1)), (4, write(5, 1))]
    );
    disk.finish(2, Ok(()));
    assert_eq!(disk.take_started(), [], "the fifth writes there");
    disk.finish(4, Ok(()));
    assert_eq!(disk.take_started(), [(3, write(5, 2))]);
}

#[test]
fn a_read_that_waits_for_one_of_them_sees_what_was_carried_out() {
    let mut disk = Disk::new();
    disk.ask(0, write(5, 1));
    disk.ask(1, write(5, 1));
    disk.ask(2, Operation::Read(blocks(5, 1)));
    disk.ask(3, write(5, 1));
    disk.finish(0, Ok(()));
    disk.take_started();
    disk.finish(3, Ok(()));
    assert_eq!(disk.take_started(), [(2, Operation::Read(blocks(5, 1)))]);
}

#[test]
fn a_write_does_not_take_the_place_of_one_from_before_a_client_attached() {
    let mut disk = Disk::new();
    for tag in 0..2 {
        disk.ask(tag, write(5, 1));
    }
    disk.controller.handle_client_attached(Time(0));
    for tag in 2..4 {
        disk.ask(tag, write(5, 1));
    }
    let mut carried_out = Vec::new();
    for tag in [0, 1, 3] {
        carried_out.extend(disk.take_started());
        disk.finish(tag, Ok(()));
    }
    assert_eq!(carried_out, [0, 1, 3].map(|tag| (tag, write(5, 1))));
    assert_eq!(disk.take_answered(), [0, 1, 2, 3].map(|tag| (tag, Ok(()))));
}
