//! A source without a disk or a network.

use std::time::Duration;

use godwit_core::action::{Action, Content, DiskOperation, DiskTag, Inspect};
use godwit_core::authority::AuthorityRecord;
use godwit_core::event::{AbortReason, Event, Phase};
use godwit_core::request::{Operation, Origin, Request, RequestError, RequestTag};
use godwit_core::units::{Extent, Generation, Lba, Sectors, Time};
use godwit_core::wire::{Message, TrafficClass, double_write_id};
use godwit_core::{AREA_SECTORS, ActiveAreas, Controller, Limits, MigrationOptions};

pub(crate) const LIMITS: Limits = Limits {
    requests: 64,
    window_chunks: 64,
    delayed_chunks: 8,
    delayed_ranges: 64,
    hot_places: 16,
    area_sectors: AREA_SECTORS,
    active_areas: 4,
};
/// 1 GiB.
const CAPACITY: Sectors = Sectors(2 << 20);

/// A source whose disk and destination do everything at once, but acknowledge double writes only on demand.
pub(crate) struct Source {
    pub(crate) core: Controller,
    pub(crate) now: Time,
    pub(crate) converged: bool,
    pub(crate) asked_to_accept: bool,
    pub(crate) answered: u32,
    /// Errors among the answers.
    pub(crate) failed: Vec<RequestError>,
    pub(crate) followed: bool,
    /// True if the destination was asked to follow with checkpoints.
    pub(crate) checkpoints: bool,
    /// Reason for the loss of the follower.
    pub(crate) severed: Option<AbortReason>,
    /// The record to be stored.
    pub(crate) storing: Option<AuthorityRecord>,
    /// The activity logs stored so far; `None` for the absence of one.
    pub(crate) logged: Vec<Option<ActiveAreas>>,
    /// True if the last log does not become durable.
    pub(crate) hold_log: bool,
    pub(crate) paused: bool,
    /// Sectors of each copy since the copies were last taken.
    pub(crate) copies: Vec<u32>,
    /// Frames sent to the destination, in order.
    pub(crate) sent: Vec<Sent>,
    /// Extents missing at the destination: start, sectors, heat.
    pub(crate) lacks: Vec<(u64, u32, u8)>,
    pub(crate) lacks_at_source: Vec<(u64, u32, u8)>,
    /// Extents compared by the destination.
    pub(crate) compared: Vec<Extent>,
    /// True if the disk does not finish the reads of chunks.
    pub(crate) hold_reads: bool,
    /// True if the disk does not finish requests.
    pub(crate) hold_requests: bool,
    /// Operations held back.
    pub(crate) held: Vec<(DiskTag, DiskOperation)>,
    /// Sector in which the destination finds the next compared chunk to differ, once.
    pub(crate) differs_at: Option<Lba>,
    /// Double writes not acknowledged, oldest first.
    pub(crate) doubled: Vec<(RequestTag, u32, Generation)>,
}

/// Frames with the disk's content for the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    Copy,
    DoubleWrite,
    DelayedWrite,
    Mark(u64),
}

impl Source {
    /// Returns a source whose disk leaves with these options.
    pub(crate) fn leaving(options: MigrationOptions) -> Self {
        let mut source = Self::staying();
        source
            .core
            .start_source(source.now, options)
            .expect("it starts");
        source
    }

    /// Returns a source whose disk does not leave yet.
    pub(crate) fn staying() -> Self {
        Self {
            core: Controller::new(LIMITS, CAPACITY, AuthorityRecord::created()),
            now: Time(0),
            converged: false,
            asked_to_accept: false,
            answered: 0,
            failed: Vec::new(),
            followed: false,
            checkpoints: false,
            severed: None,
            storing: None,
            logged: Vec::new(),
            hold_log: false,
            paused: false,
            copies: Vec::new(),
            sent: Vec::new(),
            lacks: Vec::new(),
            lacks_at_source: Vec::new(),
            compared: Vec::new(),
            hold_reads: false,
            hold_requests: false,
            held: Vec::new(),
            differs_at: None,
            doubled: Vec::new(),
        }
    }

    /// Sends a request of the guest with this tag.
    pub(crate) fn ask(&mut self, tag: u32, operation: Operation) {
        let request = Request {
            tag: RequestTag(tag),
            origin: Origin::Client,
            operation,
        };
        self.core.handle_request(self.now, request);
    }

    fn settle(&mut self) {
        let now = self.now;
        if !self.hold_reads && !self.hold_requests {
            for (tag, operation) in std::mem::take(&mut self.held) {
                self.core.handle_disk_done(now, tag, Ok(content(operation)));
            }
        }
        while let Some(action) = self.core.poll_action() {
            match action {
                Action::Disk {
                    tag: tag @ (DiskTag::Chunk(_) | DiskTag::Delayed(_)),
                    operation,
                } if self.hold_reads => self.held.push((tag, operation)),
                Action::Disk {
                    tag: tag @ DiskTag::Request(_),
                    operation,
                } if self.hold_requests => self.held.push((tag, operation)),
                Action::Disk { tag, operation } => {
                    let content = content(operation);
                    self.core.handle_disk_done(now, tag, Ok(content));
                }
                Action::Send { class, message } => self.answer(class, message),
                Action::Complete { result, .. } => {
                    self.answered += 1;
                    self.failed.extend(result.err());
                }
                Action::StoreActivity => {
                    self.logged.push(self.core.activity_to_store());
                    if !self.hold_log {
                        self.core.handle_activity_stored(now, true);
                    }
                }
                Action::Persist { record } => self.storing = Some(record),
                Action::Notify(Event::Followed { .. }) => self.followed = true,
                Action::Notify(Event::Severed { reason, .. }) => self.severed = Some(reason),
                Action::Notify(Event::PhaseEntered { phase, .. }) => {
                    self.converged |= phase == Phase::Converged;
                }
                Action::Notify(Event::Paused { .. }) => self.paused = true,
                _ => {}
            }
        }
    }

    fn answer(&mut self, class: TrafficClass, message: Message) {
        self.sent.extend(match message {
            Message::Copy { .. } => Some(Sent::Copy),
            Message::DoubleWrite { .. } => Some(Sent::DoubleWrite),
            Message::DelayedWrite { .. } => Some(Sent::DelayedWrite),
            Message::CheckpointMark { number, .. } => Some(Sent::Mark(number)),
            _ => None,
        });
        if let Message::DoubleWrite {
            tag,
            turn,
            generation,
            ..
        } = message
        {
            self.doubled
                .push((tag, double_write_id(tag, turn), generation));
        }
        let answer = match message {
            Message::Copy {
                slot,
                generation,
                extent,
                ..
            } => {
                self.copies.push(extent.sectors());
                Message::Ack {
                    tag: u32::from(slot.0),
                    generation,
                    result: Ok(()),
                }
            }
            Message::DelayedWrite {
                slot, generation, ..
            } => Message::DelayedWritten {
                slot,
                generation,
                result: Ok(()),
            },
            Message::Verify {
                slot,
                generation,
                extent,
                ..
            } => {
                self.compared.push(extent);
                let within = |at: &mut Lba| (extent.start()..extent.end()).contains(at);
                let differs = self.differs_at.take_if(within).is_some();
                Message::Verified {
                    slot,
                    generation,
                    result: Ok(!differs),
                }
            }
            Message::NewGeneration { generation } => Message::GenerationReached { generation },
            Message::Follow {
                migration,
                checkpoints,
                ..
            } => {
                self.checkpoints = checkpoints;
                Message::Follows { migration }
            }
            Message::Ping => Message::Pong,
            Message::Lacks {
                at_source,
                start,
                sectors,
                heat,
            } => {
                let told = match at_source {
                    true => &mut self.lacks_at_source,
                    false => &mut self.lacks,
                };
                told.push((start.0, sectors, heat));
                return;
            }
            Message::Prepare { lacks, .. } => {
                let told = self.lacks.len() + self.lacks_at_source.len();
                assert_eq!(lacks, told > 0);
                self.asked_to_accept = true;
                return;
            }
            _ => return,
        };
        self.core.handle_message(self.now, class, answer, None);
    }

    /// Lets time pass.
    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now.after(time);
        self.settle();
        while let Some(at) = self.core.next_deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.core.handle_timer(self.now);
            self.settle();
        }
        self.now = end;
    }
}

/// Returns the disk's result of an operation.
fn content(operation: DiskOperation) -> Content {
    match operation {
        DiskOperation::Read {
            inspect: Inspect::Digest,
            ..
        } => Content::Digest([7; 32]),
        _ => Content::Data,
    }
}
