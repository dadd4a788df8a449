//! The incoming migration: applies copies and double writes, and compares hashes.

use core::time::Duration;

use crate::action::{Action, Content, DiskOperation, DiskTag, Inspect, PULL_SLOTS, PullSlot};
use crate::controller::requests::slots::{Work, WorkStage};
use crate::controller::transfer::double_write::early_acknowledgement::Unwritten;
use crate::controller::transfer::follow::destination::Following;
use crate::controller::transfer::remainder::lacking::Lacking;
use crate::controller::transfer::remainder::missing::Missing;
use crate::controller::{Controller, MAX_PULLED, StartError};
use crate::event::AbortReason;
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Generation, Lba, MigrationId, Time};
use crate::wire::{Message, TrafficClass, double_write_id};

/// The destination's state of a migration beside its authority.
#[derive(Debug)]
pub(in crate::controller) struct Destination {
    /// Highest generation seen: copies of an older generation must not reach the disk.
    generation: Generation,
    timeout: Duration,
    /// Time at which a silent source counts as gone.
    pub(in crate::controller) deadline: Time,
    /// Frames whose disk operation has not finished.
    pub(in crate::controller) in_flight: u32,
    /// Double writes acknowledged but not written.
    pub(in crate::controller) unwritten: Unwritten,
    /// True if received data is to be made durable once everything is written.
    flush_wanted: bool,
    /// True while the flush before acceptance is at the disk. The flush outlives its migration, and could be taken for
    /// the flush of the next one.
    flushing: bool,
    /// Blocks that the disk will lack, as announced by the source.
    missing: Option<Missing>,
    /// True while `missing` is being stored. The store outlives the migration, too.
    pub(in crate::controller) storing_missing: bool,
    /// Present once the source has asked this node to follow.
    pub(in crate::controller) following: Option<Following>,
}

impl Controller {
    /// Starts to take the disk in. The offer was accepted.
    ///
    /// # Errors
    /// [`StartError::Busy`] if this node serves the disk, is in doubt, or is taking the disk in already.
    pub fn start_destination(
        &mut self,
        now: Time,
        migration: MigrationId,
        peer_timeout: Duration,
    ) -> Result<(), StartError> {
        if peer_timeout.is_zero() {
            return Err(StartError::Option("peer timeout"));
        }
        if self.is_still_applying()
            || self.outgoing.source.is_some()
            || self.is_failing_requests()
            || !self.cx.authority.receive(migration)
        {
            return Err(StartError::Busy);
        }
        self.cx.now = now;
        self.doubt.control_up = true;
        self.differences.base.spoil_base();
        self.destination = Some(Destination {
            generation: Generation(0),
            timeout: peer_timeout,
            deadline: now.after(peer_timeout),
            in_flight: 0,
            unwritten: Unwritten::default(),
            flush_wanted: false,
            flushing: false,
            missing: None,
            storing_missing: false,
            following: None,
        });
        Ok(())
    }

    /// Allows the body to empty this node's image for a disk that comes in part: the image is then no longer a base of
    /// an earlier move. Returns false while data of an earlier move is still being written to the image, because the
    /// write could follow the emptying.
    pub fn give_up_image(&mut self) -> bool {
        let may = !self.is_still_applying();
        if may {
            self.differences.base.spoil_base();
        }
        may
    }

    /// Returns true if data of an earlier move has not reached the disk: of a move that brought the disk, or data
    /// pulled before the disk left.
    fn is_still_applying(&self) -> bool {
        let receives = self.destination.as_ref().is_some_and(|destination| {
            destination.in_flight > 0
                || destination.flushing
                || destination.storing_missing
                || destination.is_applying()
        });
        let is_pulled = |slot| {
            self.cx
                .slots
                .get(self.cx.slots.pull_tag(PullSlot(slot)))
                .is_some()
        };
        receives || (0..PULL_SLOTS).any(is_pulled)
    }

    /// Handles a frame of the source for this node's disk.
    pub(in crate::controller) fn replica(&mut self, message: Message, buffer: Option<RequestTag>) {
        let (Some(tag), Some((work, extent, generation))) = (buffer, work_of(message)) else {
            return;
        };
        self.destination_heard();
        let severed = |it: &Destination| it.following.is_some_and(|it| it.severed);
        let hears = self.destination.as_mut().filter(|it| !severed(it));
        let (Some(destination), Some(migration)) = (hears, self.cx.authority.receiving()) else {
            return self.cx.act(Action::ReleaseReplica { tag });
        };
        let ignores_generation = self.cx.has_bug(PlantedBug::IgnoreGeneration);
        let stale = generation < destination.generation && !ignores_generation;
        destination.generation = destination.generation.max(generation);
        if stale
            && matches!(
                work,
                Work::Copy { .. } | Work::Verify { .. } | Work::VerifyHole { .. }
            )
        {
            return self.cx.act(Action::ReleaseReplica { tag });
        }
        let keeps = !self.cx.has_bug(PlantedBug::DiskAhead);
        let epoch = destination.kept_epoch().filter(|_| keeps);
        // A frame after `Prepare` could reach the disk after the flush, and even after a write of this node's own
        // guest. With a checkpoint, the disk had everything but later double writes.
        let too_late = self.cx.authority.is_accepting()
            || epoch.is_some() && !matches!(work, Work::DoubleWrite { .. });
        if too_late
            || !extent.within(self.cx.capacity)
            || !self.cx.slots.occupy(tag, work, Some(extent))
        {
            let reason = AbortReason::Protocol;
            self.cx.act(Action::ReleaseReplica { tag });
            self.cx
                .send(TrafficClass::Control, Message::Abort { migration, reason });
            let effects = self.cx.authority.stop_receiving(reason);
            return self.apply(effects);
        }
        destination.in_flight += 1;
        if let Some(epoch) = epoch {
            return self.keep(tag, epoch);
        }
        self.acknowledge_early(tag);
        self.cx.join(tag);
        self.advance(tag);
    }

    /// Starts a frame's disk operation, with no overlapping work under way.
    pub(in crate::controller) fn issue_replica(&mut self, tag: RequestTag) {
        let slot = &mut self.cx.slots[tag];
        let Some(extent) = slot.extent else { return };
        if let Work::Pulled { slot, zeroes } = slot.work {
            return self.issue_pulled(tag, slot, zeroes);
        }
        if slot.stale {
            return self.drop_stale(tag);
        }
        slot.stage = WorkStage::Here {
            at_disk: true,
            at_destination: false,
        };
        let zero = |unmap| DiskOperation::WriteZeroes {
            extent,
            fua: false,
            unmap,
        };
        let operation = match slot.work {
            Work::Copy { zeroes: true, .. } | Work::DelayedWrite { zeroes: true, .. } => zero(true),
            Work::DoubleWrite {
                zeroes: true,
                unmap,
                ..
            } => zero(unmap),
            Work::Verify { .. } => DiskOperation::Read {
                extent,
                inspect: Inspect::Digest,
            },
            // The hole has not been examined at all.
            Work::VerifyHole { .. } => DiskOperation::FindHole { extent },
            _ => DiskOperation::Write { extent, fua: false },
        };
        self.cx.act(Action::Disk {
            tag: DiskTag::Replica(tag),
            operation,
        });
    }

    pub(in crate::controller) fn replica_disk_done(
        &mut self,
        tag: RequestTag,
        result: Result<Content, RequestError>,
    ) {
        let Some(slot) = self.cx.slots.get_mut(tag).filter(|slot| slot.is_at_disk()) else {
            return;
        };
        let work = slot.work;
        let mut holds_zeroes = Ok(false);
        if let Work::VerifyHole { .. } = work {
            match self.cx.hole_compared(tag, result) {
                Some(result) => holds_zeroes = result,
                None => return,
            }
        }
        let slot = &mut self.cx.slots[tag];
        slot.stage = WorkStage::Done;
        let acknowledged = slot.acknowledged;
        self.outgoing.leave(&mut self.cx, tag);
        if acknowledged {
            self.early_write_done(tag, result.map(|_| ()));
            return self.end_replica(tag);
        }
        if let Err(error) = result
            && self
                .destination
                .as_mut()
                .is_some_and(|it| it.kept().is_some())
        {
            // The mark of the write's checkpoint may be on its way.
            self.lose_write(error);
        }
        if !self.withhold(tag) {
            self.answer_replica(tag, result, holds_zeroes);
        }
    }

    /// Answers a frame that has left the order of writes, and ends it.
    pub(in crate::controller) fn answer_replica(
        &mut self,
        tag: RequestTag,
        result: Result<Content, RequestError>,
        holds_zeroes: Result<bool, RequestError>,
    ) {
        if let Some((class, message)) = answer_to(self.cx.slots[tag].work, result, holds_zeroes)
            && self.cx.authority.receiving().is_some()
        {
            self.cx.send(class, message);
        }
        self.end_replica(tag);
    }

    /// Ends a frame that has left the order of writes.
    fn end_replica(&mut self, tag: RequestTag) {
        self.cx.slots.release(tag);
        self.cx.act(Action::ReleaseReplica { tag });
        let Some(destination) = &mut self.destination else {
            return;
        };
        destination.in_flight -= 1;
        if destination.in_flight == 0 {
            self.tell_marked();
            self.flush_when_written();
        }
    }

    /// Issues a flush that has waited, once everything is written.
    pub(in crate::controller) fn flush_when_written(&mut self) {
        let written = |it: &&mut Destination| it.in_flight == 0 && !it.is_applying();
        let written = self.destination.as_mut().filter(written);
        if written.is_some_and(|it| core::mem::take(&mut it.flush_wanted))
            && (self.cx.authority.receiving().is_some() || self.cx.authority.is_taking())
        {
            self.issue_barrier();
        }
    }

    /// Begins a new generation, because the source paused: earlier copies and comparisons are void unless they are
    /// already at the disk.
    pub(in crate::controller) fn new_generation(&mut self, generation: Generation) {
        self.destination_heard();
        if self.cx.authority.receiving().is_none() {
            return;
        }
        let Some(destination) = &mut self.destination else {
            return;
        };
        destination.generation = destination.generation.max(generation);
        let stale = self.cx.slots.select(|slot| {
            let sent_in = match slot.work {
                Work::Copy { generation, .. }
                | Work::Verify { generation, .. }
                | Work::VerifyHole { generation, .. } => generation,
                _ => return false,
            };
            sent_in < generation && slot.is_waiting()
        });
        for tag in stale {
            self.cx.slots[tag].stale = !self.cx.has_bug(PlantedBug::IgnoreGeneration);
        }
        self.cx.send(
            TrafficClass::Sync,
            Message::GenerationReached { generation },
        );
    }

    /// Drops a frame that was given up before its turn.
    fn drop_stale(&mut self, tag: RequestTag) {
        self.outgoing.leave(&mut self.cx, tag);
        self.end_replica(tag);
    }

    /// Makes all received data durable once everything is written.
    pub(in crate::controller) fn issue_barrier(&mut self) {
        if self.cx.has_bug(PlantedBug::AcceptWithoutFlush) {
            return self.barrier_done(Ok(()));
        }
        let hurries = self.cx.has_bug(PlantedBug::AcceptBeforeWritten);
        if let Some(destination) = &mut self.destination {
            if (destination.in_flight > 0 || destination.is_applying()) && !hurries {
                destination.flush_wanted = true;
                return;
            }
            destination.flushing = true;
        }
        self.drop_kept();
        self.cx.act(Action::Disk {
            tag: DiskTag::Barrier,
            operation: DiskOperation::Flush,
        });
    }

    /// Handles the end of the flush before acceptance.
    pub(in crate::controller) fn barrier_done(&mut self, result: Result<(), RequestError>) {
        if let Some(destination) = &mut self.destination {
            destination.flushing = false;
        }
        let effects = match (result, self.cx.authority.receiving()) {
            (Ok(()), Some(_)) if self.lacking.is_some() => {
                if let Some(destination) = &mut self.destination {
                    destination.storing_missing = true;
                }
                return self.cx.act(Action::StoreMissing);
            }
            (Ok(()), _) => self.cx.authority.flushed(),
            (Err(_), Some(migration)) => {
                let reason = AbortReason::DestinationDisk;
                self.cx
                    .send(TrafficClass::Control, Message::Abort { migration, reason });
                self.cx.authority.stop_receiving(reason)
            }
            (Err(_), None) => self.cx.authority.fail_taking(AbortReason::DestinationDisk),
        };
        self.apply(effects);
    }

    /// Handles the source's announcement of a part that stays at the source.
    pub(in crate::controller) fn will_lack(
        &mut self,
        start: Lba,
        sectors: u32,
        heat: u8,
        at_source: bool,
    ) {
        self.destination_heard();
        let Some(migration) = self.cx.authority.receiving() else {
            return;
        };
        let capacity = self.cx.capacity;
        let told = !self.cx.authority.is_accepting()
            && capacity.bytes() <= MAX_PULLED
            && self.destination.as_mut().is_some_and(|destination| {
                destination
                    .missing
                    .get_or_insert_with(|| Missing::new(capacity))
                    .add(start, sectors, heat, at_source)
            });
        if !told {
            let reason = AbortReason::Protocol;
            self.cx
                .send(TrafficClass::Control, Message::Abort { migration, reason });
            let effects = self.cx.authority.stop_receiving(reason);
            self.apply(effects);
        }
    }

    /// Prepares for acceptance of a disk that `lacks` the announced blocks, or none. Returns false if the announcements
    /// disagree.
    pub(in crate::controller) fn comes_without(
        &mut self,
        migration: MigrationId,
        lacks: bool,
    ) -> bool {
        let told = self
            .destination
            .as_mut()
            .and_then(|destination| destination.missing.take());
        let agrees = told.is_some() == lacks;
        if let Some(mut missing) = told.filter(|_| agrees) {
            missing.complete();
            self.lacking = Some(Box::new(Lacking::new(migration, missing)));
        }
        agrees
    }

    /// Returns true if a frame is unanswered. The source drains before it asks for acceptance, so an unanswered frame
    /// breaks the protocol. Frames given up by the source at a new generation are the exception: comparisons have been
    /// repeated since, and written data was sent again or is announced as lacking. Such data is on the disk before this
    /// node accepts.
    pub(in crate::controller) fn owes_answers(&self) -> bool {
        let Some(destination) = &self.destination else {
            return false;
        };
        let of_before = |generation| generation < destination.generation;
        let given_up = self.cx.slots.select(|slot| match slot.work {
            Work::Verify { generation, .. }
            | Work::VerifyHole { generation, .. }
            | Work::Copy { generation, .. }
            | Work::DelayedWrite { generation, .. } => of_before(generation),
            Work::DoubleWrite { generation, .. } => !slot.acknowledged && of_before(generation),
            _ => false,
        });
        destination.in_flight > destination.unwritten.frames + given_up.len() as u32
    }

    pub(in crate::controller) fn destination_heard(&mut self) {
        if let Some(destination) = &mut self.destination {
            destination.deadline = self.cx.now.after(destination.timeout);
        }
    }

    pub(in crate::controller) fn destination_timer(&mut self) {
        let Some(destination) = &mut self.destination else {
            return;
        };
        if destination.deadline > self.cx.now {
            return;
        }
        destination.deadline = self.cx.now.after(destination.timeout);
        if destination.following.is_some() {
            return;
        }
        let effects = self.cx.authority.stop_receiving(AbortReason::PeerTimeout);
        self.apply(effects);
    }
}

/// Returns the work of a frame for this node's disk, its extent, and its generation.
fn work_of(message: Message) -> Option<(Work, Extent, Generation)> {
    Some(match message {
        Message::Copy {
            slot,
            generation,
            extent,
            zeroes,
        } => (
            Work::Copy {
                slot,
                generation,
                zeroes,
            },
            extent,
            generation,
        ),
        Message::DoubleWrite {
            tag,
            turn,
            generation,
            extent,
            zeroes,
            unmap,
        } => (
            Work::DoubleWrite {
                tag: double_write_id(tag, turn),
                generation,
                zeroes,
                unmap,
            },
            extent,
            generation,
        ),
        Message::DelayedWrite {
            slot,
            generation,
            extent,
            zeroes,
        } => (
            Work::DelayedWrite {
                slot,
                generation,
                zeroes,
            },
            extent,
            generation,
        ),
        comparison => return work_of_comparison(comparison),
    })
}

fn work_of_comparison(message: Message) -> Option<(Work, Extent, Generation)> {
    Some(match message {
        Message::Verify {
            slot,
            generation,
            extent,
            digest,
        } => (
            Work::Verify {
                slot,
                generation,
                digest,
            },
            extent,
            generation,
        ),
        Message::VerifyHole {
            slot,
            generation,
            extent,
        } => (
            Work::VerifyHole {
                slot,
                generation,
                from: extent.start(),
            },
            extent,
            generation,
        ),
        _ => return None,
    })
}

/// Returns the answer to a frame whose disk operation ended with `result`. `holds_zeroes` is the result of a comparison
/// of a hole.
fn answer_to(
    work: Work,
    result: Result<Content, RequestError>,
    holds_zeroes: Result<bool, RequestError>,
) -> Option<(TrafficClass, Message)> {
    Some(match work {
        Work::Copy {
            slot, generation, ..
        } => {
            let tag = u32::from(slot.0);
            (
                TrafficClass::Copy,
                Message::Ack {
                    tag,
                    generation,
                    result: result.map(|_| ()),
                },
            )
        }
        Work::DoubleWrite {
            tag, generation, ..
        } => (
            TrafficClass::Sync,
            Message::Ack {
                tag,
                generation,
                result: result.map(|_| ()),
            },
        ),
        Work::DelayedWrite {
            slot, generation, ..
        } => (
            TrafficClass::Sync,
            Message::DelayedWritten {
                slot,
                generation,
                result: result.map(|_| ()),
            },
        ),
        Work::Verify {
            slot,
            generation,
            digest,
        } => {
            let result = result.map(|content| content == Content::Digest(digest));
            (
                TrafficClass::Copy,
                Message::Verified {
                    slot,
                    generation,
                    result,
                },
            )
        }
        Work::VerifyHole {
            slot, generation, ..
        } => (
            TrafficClass::Copy,
            Message::Verified {
                slot,
                generation,
                result: holds_zeroes,
            },
        ),
        Work::Free | Work::Request { .. } | Work::Pulled { .. } => return None,
    })
}
