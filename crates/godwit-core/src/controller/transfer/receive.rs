//! The incoming migration: applies copies and double writes, and compares hashes.

use core::time::Duration;

use crate::action::{Action, Content, DiskOperation, DiskTag, Inspect, PULL_SLOTS, PullSlot};
use crate::controller::requests::slots::{Work, WorkStage};
use crate::controller::transfer::double_write::early_acknowledgement::Unwritten;
use crate::controller::transfer::remainder::lacking::Lacking;
use crate::controller::transfer::remainder::missing::Missing;
use crate::controller::{Controller, MAX_PULLED, StartError};
use crate::event::AbortReason;
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Generation, Lba, MigrationId, Time};
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
    in_flight: u32,
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
        if self.is_still_applying() || self.source.is_some() || !self.authority.receive(migration) {
            return Err(StartError::Busy);
        }
        self.now = now;
        self.control_up = true;
        self.spoil_base();
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
        });
        Ok(())
    }

    /// Allows the body to empty this node's image for a disk that comes in part: the image is then no longer a base of
    /// an earlier move. Returns false while data of an earlier move is still being written to the image, because the
    /// write could follow the emptying.
    pub fn give_up_image(&mut self) -> bool {
        let may = !self.is_still_applying();
        if may {
            self.spoil_base();
        }
        may
    }

    /// Returns true if data of an earlier move has not reached the disk: of a move that brought the disk, or data
    /// pulled before the disk left.
    fn is_still_applying(&self) -> bool {
        let receives = self.destination.as_ref().is_some_and(|destination| {
            destination.in_flight > 0 || destination.flushing || destination.storing_missing
        });
        let is_pulled = |slot| {
            self.slots
                .get(self.slots.pull_tag(PullSlot(slot)))
                .is_some()
        };
        receives || (0..PULL_SLOTS).any(is_pulled)
    }

    /// Handles a frame of the source for this node's disk.
    pub(in crate::controller) fn replica(&mut self, message: Message, tag: RequestTag) {
        let (work, extent, generation) = match message {
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
            _ => return,
        };
        self.destination_heard();
        let Some(migration) = self.authority.receiving() else {
            return self.act(Action::ReleaseReplica { tag });
        };
        let ignores_generation = self.has_bug(PlantedBug::IgnoreGeneration);
        let Some(destination) = &mut self.destination else {
            return self.act(Action::ReleaseReplica { tag });
        };
        let stale = generation < destination.generation && !ignores_generation;
        destination.generation = destination.generation.max(generation);
        if stale
            && matches!(
                work,
                Work::Copy { .. } | Work::Verify { .. } | Work::VerifyHole { .. }
            )
        {
            return self.act(Action::ReleaseReplica { tag });
        }
        // A frame after `Prepare` could reach the disk after the flush, and even after a write of this node's own
        // guest.
        let too_late = self.authority.is_accepting();
        if too_late || !extent.within(self.capacity) || !self.slots.occupy(tag, work, Some(extent))
        {
            let reason = AbortReason::Protocol;
            self.act(Action::ReleaseReplica { tag });
            self.send(TrafficClass::Control, Message::Abort { migration, reason });
            let effects = self.authority.stop_receiving(reason);
            return self.apply(effects);
        }
        destination.in_flight += 1;
        self.acknowledge_early(tag);
        self.join(tag);
        self.advance(tag);
    }

    /// Starts a frame's disk operation, with no overlapping work under way.
    pub(in crate::controller) fn issue_replica(&mut self, tag: RequestTag) {
        let slot = &mut self.slots[tag];
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
        self.act(Action::Disk {
            tag: DiskTag::Replica(tag),
            operation,
        });
    }

    pub(in crate::controller) fn replica_disk_done(
        &mut self,
        tag: RequestTag,
        result: Result<Content, RequestError>,
    ) {
        let Some(slot) = self.slots.get_mut(tag).filter(|slot| slot.is_at_disk()) else {
            return;
        };
        let work = slot.work;
        let mut holds_zeroes = Ok(false);
        if let Work::VerifyHole { .. } = work {
            match self.hole_compared(tag, result) {
                Some(result) => holds_zeroes = result,
                None => return,
            }
        }
        let slot = &mut self.slots[tag];
        slot.stage = WorkStage::Done;
        let acknowledged = slot.acknowledged;
        self.leave(tag);
        let done = result.map(|_| ());
        if acknowledged {
            self.early_write_done(tag, done);
            return self.end_replica(tag);
        }
        let answer = match work {
            Work::Copy {
                slot, generation, ..
            } => {
                let tag = u32::from(slot.0);
                (
                    TrafficClass::Copy,
                    Message::Ack {
                        tag,
                        generation,
                        result: done,
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
                    result: done,
                },
            ),
            Work::DelayedWrite {
                slot, generation, ..
            } => (
                TrafficClass::Sync,
                Message::DelayedWritten {
                    slot,
                    generation,
                    result: done,
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
            Work::Free | Work::Request { .. } | Work::Pulled { .. } => return,
        };
        if self.authority.receiving().is_some() {
            self.send(answer.0, answer.1);
        }
        self.end_replica(tag);
    }

    /// Ends a frame that has left the order of writes.
    fn end_replica(&mut self, tag: RequestTag) {
        self.slots.release(tag);
        self.act(Action::ReleaseReplica { tag });
        let Some(destination) = &mut self.destination else {
            return;
        };
        destination.in_flight -= 1;
        if destination.in_flight == 0
            && core::mem::take(&mut destination.flush_wanted)
            && self.authority.receiving().is_some()
        {
            self.issue_barrier();
        }
    }

    /// Begins a new generation, because the source paused: earlier copies and comparisons are void unless they are
    /// already at the disk.
    pub(in crate::controller) fn new_generation(&mut self, generation: Generation) {
        self.destination_heard();
        if self.authority.receiving().is_none() {
            return;
        }
        let Some(destination) = &mut self.destination else {
            return;
        };
        destination.generation = destination.generation.max(generation);
        let stale = self.slots.select(|slot| {
            let sent_in = match slot.work {
                Work::Copy { generation, .. }
                | Work::Verify { generation, .. }
                | Work::VerifyHole { generation, .. } => generation,
                _ => return false,
            };
            sent_in < generation && slot.is_waiting()
        });
        for tag in stale {
            self.slots[tag].stale = !self.has_bug(PlantedBug::IgnoreGeneration);
        }
        self.send(
            TrafficClass::Sync,
            Message::GenerationReached { generation },
        );
    }

    /// Drops a frame that was given up before its turn.
    fn drop_stale(&mut self, tag: RequestTag) {
        self.leave(tag);
        self.end_replica(tag);
    }

    /// Makes all received data durable once everything is written.
    pub(in crate::controller) fn issue_barrier(&mut self) {
        if self.has_bug(PlantedBug::AcceptWithoutFlush) {
            return self.barrier_done(Ok(()));
        }
        let hurries = self.has_bug(PlantedBug::AcceptBeforeWritten);
        if let Some(destination) = &mut self.destination {
            if destination.in_flight > 0 && !hurries {
                destination.flush_wanted = true;
                return;
            }
            destination.flushing = true;
        }
        self.act(Action::Disk {
            tag: DiskTag::Barrier,
            operation: DiskOperation::Flush,
        });
    }

    /// Handles the end of the flush before acceptance.
    pub(in crate::controller) fn barrier_done(&mut self, result: Result<(), RequestError>) {
        if let Some(destination) = &mut self.destination {
            destination.flushing = false;
        }
        let effects = match (result, self.authority.receiving()) {
            (Ok(()), Some(_)) if self.lacking.is_some() => {
                if let Some(destination) = &mut self.destination {
                    destination.storing_missing = true;
                }
                return self.act(Action::StoreMissing);
            }
            (Ok(()), _) => self.authority.flushed(),
            (Err(_), Some(migration)) => {
                let reason = AbortReason::DestinationDisk;
                self.send(TrafficClass::Control, Message::Abort { migration, reason });
                self.authority.stop_receiving(reason)
            }
            (Err(_), None) => return,
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
        let Some(migration) = self.authority.receiving() else {
            return;
        };
        let capacity = self.capacity;
        let told = !self.authority.is_accepting()
            && capacity.bytes() <= MAX_PULLED
            && self.destination.as_mut().is_some_and(|destination| {
                destination
                    .missing
                    .get_or_insert_with(|| Missing::new(capacity))
                    .add(start, sectors, heat, at_source)
            });
        if !told {
            let reason = AbortReason::Protocol;
            self.send(TrafficClass::Control, Message::Abort { migration, reason });
            let effects = self.authority.stop_receiving(reason);
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
        let given_up = self.slots.select(|slot| match slot.work {
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
            destination.deadline = self.now.after(destination.timeout);
        }
    }

    pub(in crate::controller) fn destination_timer(&mut self) {
        let Some(destination) = &mut self.destination else {
            return;
        };
        if destination.deadline > self.now {
            return;
        }
        destination.deadline = self.now.after(destination.timeout);
        let effects = self.authority.stop_receiving(AbortReason::PeerTimeout);
        self.apply(effects);
    }
}
