//! Passes of the locking window over the disk (Alg. 1 of the SmartNIC storage-migration paper): copying, then
//! comparing, then the freeze that leads to switchover.

use core::time::Duration;

use crate::action::{Action, ChunkSlot, Content, DiskOperation, DiskTag, Inspect};
use crate::controller::Controller;
use crate::controller::block_set::BlockSet;
use crate::controller::cx::Cx;
use crate::controller::policy::Policy;
use crate::controller::requests::slots::TagList;
use crate::controller::transfer::outgoing::freeze::FREEZE_DELAYED_BYTES;
use crate::controller::transfer::outgoing::layout::Next;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::transfer::outgoing::{Outgoing, Source};
use crate::controller::transfer::pass::Pass;
use crate::controller::transfer::window::{ChunkContent, ChunkKind, ChunkState};
use crate::event::AbortReason;
use crate::planted::PlantedBug;
use crate::request::RequestError;
use crate::units::{Extent, Generation, SECTOR_SIZE, Time};
use crate::wire::{HEADER_SIZE, Message, TrafficClass};

impl Source {
    /// Returns the current maximum number of chunks in flight, and their maximum length.
    fn most_in_flight(&mut self, guest_is_idle: bool) -> (u16, u32) {
        if guest_is_idle {
            return (self.idle_window.chunks(), self.options.chunk_sectors);
        }
        self.idle_window.forget();
        match &self.governor {
            Some(governor) => governor.in_flight(),
            None => (
                self.options.busy_window_chunks,
                self.options.busy_chunk_sectors,
            ),
        }
    }

    /// Returns true if another chunk may be locked, within `most` chunks of `chunk_sectors`.
    fn has_room(&self, most: u16, chunk_sectors: u32) -> bool {
        // Randomly written blocks are compared, or copied again, block by block. With only as many blocks in flight as
        // chunks, a pass would wait for the round trip, and the guest would keep writing meanwhile.
        let by_blocks = self.pass.is_scattered()
            || self.pass == Pass::Compare
            || self.wanted_blocks().is_some();
        let room = if by_blocks {
            self.window.sectors() < u64::from(most) * u64::from(chunk_sectors)
        } else {
            self.window.len() < usize::from(most)
        };
        room && self.window.has_free_slot() && !self.window.ends_uncertain()
    }

    pub(super) fn start_pass(&mut self, pass: Pass, now: Time) {
        debug_assert!(self.window.is_empty(), "a pass begins behind the last one");
        self.obstacles.restart(now);
        if let Some(governor) = &mut self.governor {
            governor.pass_begins();
        }
        self.pass = pass;
        self.counters.pass_done = 0;
        let wanted = self.wanted_blocks().map(BlockSet::bytes);
        self.counters.pass_total = match (pass, &self.dirty) {
            (Pass::VerifyDirty { .. }, Some(dirty)) => dirty.sectors() * SECTOR_SIZE,
            (Pass::Copy | Pass::Resend { .. }, _) => match wanted {
                Some(wanted) => wanted,
                None => self.policy.begin_round(pass, self.capacity),
            },
            _ => self.capacity.bytes().0,
        };
        if self.policy.sends_again(pass) {
            self.obstacles.begin_round(self.counters.pass_total);
        } else {
            self.obstacles.forget_rounds();
        }
        self.window.restart();
    }

    /// Returns the number of the current copying round, or of the last one.
    pub(super) fn round(&self) -> u32 {
        match self.pass {
            Pass::Resend { round } => round,
            Pass::Copy | Pass::Compare | Pass::VerifyAll | Pass::VerifyDirty { .. } => 1,
        }
    }

    /// Returns the round that follows the round just finished, if any.
    fn next_round(&mut self) -> Option<u32> {
        let (round, compares) = (self.round(), self.options.verify);
        let again = self.policy.goes_on(self.pass, round, compares);
        again.then_some(round + 1)
    }

    /// Returns true if nothing more is copied, because the disk is to be handed over as is.
    fn leaves(&self) -> bool {
        self.policy.leaves(self.is_ordered())
    }

    /// Succeeds if another chunk may be locked; otherwise returns the time of the next attempt. The promise holds
    /// nothing back while the guest is idle.
    pub(super) fn may_start_chunk(&mut self, now: Time, guest_is_idle: bool) -> Result<(), Time> {
        if self.pass.copies()
            && let Some(token_bucket) = &mut self.rate.bucket
        {
            token_bucket.ready(now)?;
        }
        match &mut self.governor {
            Some(governor) if !guest_is_idle => governor.ready(now, false),
            _ => Ok(()),
        }
    }

    /// Counts a chunk of `bytes` against the rates. While the guest is idle the promise's rate is left out: the chunk
    /// was not held back by this rate, and later frames would have to wait for a debt without a limit.
    pub(super) fn chunk_started(&mut self, bytes: u64, guest_is_idle: bool) {
        if self.pass.copies()
            && let Some(token_bucket) = &mut self.rate.bucket
        {
            token_bucket.spend(bytes);
        }
        if let Some(governor) = &mut self.governor
            && !guest_is_idle
        {
            governor.spend(bytes, false);
        }
    }

    /// Gives up the window, so that the pass continues from the end of the migrated region. Returns the waiters of the
    /// window's chunks.
    pub(in crate::controller) fn retreat(&mut self) -> Vec<TagList> {
        let reach = self.window.end();
        self.delayed.release();
        let given_up = self.window.retreat();
        if self.pass == Pass::Copy {
            let tail = self.window.pointers.write_tail;
            self.delayed.leave_to_copies(tail, reach);
        }
        let extents = given_up.iter().map(|chunk| chunk.extent);
        self.policy.give_up(self.pass, extents, reach);
        if let (Pass::VerifyAll | Pass::VerifyDirty { .. }, Some(dirty)) =
            (self.pass, &mut self.dirty)
        {
            // These chunks were about to be compared.
            for chunk in &given_up {
                dirty.set(chunk.extent);
            }
        }
        for chunk in &given_up {
            if chunk.state == ChunkState::Done {
                let bytes = chunk.extent.bytes();
                self.counters.pass_done -= bytes;
                match self.pass {
                    Pass::Copy | Pass::Resend { .. } => self.counters.copied -= bytes,
                    Pass::Compare => {}
                    Pass::VerifyAll | Pass::VerifyDirty { .. } => self.counters.verified -= bytes,
                }
            }
        }
        given_up.into_iter().map(|chunk| chunk.waiters).collect()
    }

    /// Returns true if chunks are in flight.
    pub(in crate::controller) fn has_window(&self) -> bool {
        !self.window.is_empty()
    }

    /// Returns true if the pass has something left to lock.
    pub(in crate::controller) fn is_copying(&self) -> bool {
        self.next_chunk(1) != Next::End
    }

    /// Succeeds if a copy (or a delayed write) may be sent; otherwise returns the time of the next attempt. Nothing is
    /// held back for a guest that has stopped: the guest stands still until the destination has the rest.
    pub(in crate::controller) fn may_send(&mut self, now: Time, delayed: bool) -> Result<(), Time> {
        if self.is_ordered() {
            return Ok(());
        }
        if let Some(token_bucket) = &mut self.rate.bucket {
            token_bucket.ready(now)?;
        }
        match &mut self.governor {
            Some(governor) => governor.ready(now, delayed),
            None => Ok(()),
        }
    }

    pub(in crate::controller) fn spend(&mut self, bytes: u64, delayed: bool) {
        if let Some(token_bucket) = &mut self.rate.bucket {
            token_bucket.spend(bytes);
        }
        if let Some(governor) = &mut self.governor {
            governor.spend(bytes, delayed);
        }
    }
}

impl Outgoing {
    /// Locks chunks, up to `most` of at most `chunk_sectors`.
    fn fill_window(&mut self, cx: &mut Cx, guest_is_idle: bool, most: u16, chunk_sectors: u32) {
        let Some(source) = &mut self.source else {
            return;
        };
        while source.has_room(most, chunk_sectors) {
            let (extent, kind) = match source.next_chunk(chunk_sectors) {
                Next::End => {
                    source.end_delta();
                    break;
                }
                Next::Look(extent) => {
                    self.look_ahead(cx, extent);
                    break;
                }
                Next::Lock(extent, kind) => (extent, kind),
            };
            let frozen = source.stage.is_freezing();
            if !frozen && let Err(next) = source.may_start_chunk(cx.now, guest_is_idle) {
                source.rate.copies_wait = Some(next);
                break;
            }
            let Some(slot) = source.window.lock(extent, kind, cx.now) else {
                break;
            };
            // A hole costs its frame.
            let bytes = match kind {
                ChunkKind::Data => extent.bytes(),
                ChunkKind::Hole => HEADER_SIZE as u64,
            };
            source.chunk_started(bytes, guest_is_idle);
            source.holes.sends(extent);
            source.policy.locked(source.pass, extent);
            read_when_quiet(source, cx, slot, extent);
        }
    }

    /// Reads the chunks that waited for a guest write to these addresses, which has ended.
    #[inline]
    pub(in crate::controller) fn writes_left(&mut self, cx: &mut Cx, extent: Extent) {
        let Some(source) = &mut self.source else {
            return;
        };
        if !source.window.has_quiescing() {
            return;
        }
        for at in 0..source.window.len() {
            let Some((slot, extent)) = source.window.quiescing_at(at, extent) else {
                continue;
            };
            let reads = read_when_quiet(source, cx, slot, extent);
            if reads
                && source.passes_chunks()
                && let Some(waiters) = source.unlock(extent)
            {
                cx.wake(waiters);
            }
        }
    }

    pub(super) fn send_read_chunks(&mut self, cx: &mut Cx) {
        let Some(source) = &mut self.source else {
            return;
        };
        let generation = source.generation;
        while let Some((slot, extent, content)) = source.window.next_to_send() {
            let message = match content {
                ChunkContent::Digest(digest) => Message::Verify {
                    slot,
                    generation,
                    extent,
                    digest,
                },
                ChunkContent::Zeroes if !source.pass.copies() => Message::VerifyHole {
                    slot,
                    generation,
                    extent,
                },
                content => {
                    let zeroes = content == ChunkContent::Zeroes;
                    if !zeroes {
                        source.counters.copy_sent += extent.bytes();
                    }
                    Message::Copy {
                        slot,
                        generation,
                        extent,
                        zeroes,
                    }
                }
            };
            cx.actions.push_back(Action::Send {
                class: TrafficClass::Copy,
                message,
            });
        }
    }
}

impl Controller {
    /// Fills the locking window and sends the chunks that have been read.
    pub(in crate::controller) fn pump(&mut self) {
        self.outgoing.search_holes(&mut self.cx);
        let guest_is_idle = self.guest_is_idle();
        loop {
            let Some(source) = &mut self.outgoing.source else {
                return;
            };
            source.rate.copies_wait = None;
            if source.switches_now() {
                self.switch_policy();
                continue;
            }
            let comparing = !source.pass.copies();
            if source.pauses.current.is_some()
                || source.change.awaits_generation
                || (comparing && !source.delayed.is_settled())
            {
                return;
            }
            let (most, chunk_sectors) = source.most_in_flight(guest_is_idle);
            // Blocks written while the switchover waits belong to the next pass.
            let rests = source.stage == Stage::Converged
                || source.stage.has_asked()
                || source.leaves()
                || source.is_switching();
            if !rests {
                self.outgoing
                    .fill_window(&mut self.cx, guest_is_idle, most, chunk_sectors);
            }
            self.outgoing.flush_hot(&mut self.cx);
            let Some(source) = &mut self.outgoing.source else {
                return;
            };
            if source.window.is_empty() && (rests || !source.is_copying()) {
                debug_assert!(
                    rests || source.wanted_blocks().is_none() || source.nears_end(),
                    "the guest's writes reach the destination behind a pass"
                );
                if self.finish_pass() {
                    continue;
                }
                return;
            }
            return;
        }
    }

    /// Handles the local read of a chunk.
    pub(in crate::controller) fn chunk_read(
        &mut self,
        slot: ChunkSlot,
        result: Result<Content, RequestError>,
    ) {
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        if source.window.orphan_read(slot) {
            return self.pump();
        }
        let pass = source.pass;
        let Some(chunk) = source.window.get(slot) else {
            return;
        };
        match chunk.state {
            ChunkState::Reading => {}
            ChunkState::Looking => return self.hole_looked_at(slot, result),
            _ => return,
        }
        chunk.state = ChunkState::Read(match result {
            Ok(Content::Digest(digest)) if !pass.copies() => ChunkContent::Digest(digest),
            Ok(Content::Data) if pass.copies() => ChunkContent::Data,
            Ok(Content::Zeroes) if pass.copies() => ChunkContent::Zeroes,
            _ => {
                // The slot is idle again and must not count as a read under way.
                chunk.state = ChunkState::Sent;
                self.abort_source(AbortReason::SourceDisk);
                return;
            }
        });
        self.outgoing.send_read_chunks(&mut self.cx);
    }

    /// Handles the destination's acknowledgement of a copy or a double write.
    pub(in crate::controller) fn acknowledged(
        &mut self,
        class: TrafficClass,
        tag: u32,
        generation: Generation,
        result: Result<(), RequestError>,
    ) {
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        source.peer.last_heard = self.cx.now;
        if class == TrafficClass::Sync
            && let Some(extent) = source.posted.acknowledged(self.cx.now, tag, generation)
        {
            self.outgoing.writes_left(&mut self.cx, extent);
            self.compare_again();
        } else if class == TrafficClass::Sync {
            self.double_write_acknowledged(tag, generation);
            self.compare_again();
        } else if source.generation == generation
            && source.pass.copies()
            && result.is_ok()
            && let Ok(slot) = u16::try_from(tag)
        {
            self.chunk_done(ChunkSlot(slot));
        }
        if let Err(error) = result {
            self.abort_source(AbortReason::of_destination(error));
        }
    }

    pub(super) fn chunk_done(&mut self, slot: ChunkSlot) {
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let Some(chunk) = source.window.acknowledge(slot) else {
            return;
        };
        let bytes = chunk.extent.bytes();
        source.counters.pass_done += bytes;
        match source.pass {
            Pass::Copy | Pass::Resend { .. } => source.counters.copied += bytes,
            Pass::Compare => {}
            Pass::VerifyAll | Pass::VerifyDirty { .. } => source.counters.verified += bytes,
        }
        let took = self.cx.now.since(chunk.locked);
        source.posted.answered(self.cx.now, took);
        let idle = self
            .requests
            .last
            .map_or(Duration::MAX, |last| self.cx.now.since(last));
        match chunk.kind {
            ChunkKind::Data => source.idle_window.chunk_done(took, idle),
            ChunkKind::Hole => source.layout.hole_done(took),
        }
        if let Some(governor) = &mut source.governor {
            governor.chunk_done(took);
        }
        self.cx.wake(chunk.waiters);
        self.pump();
    }

    /// Ends the pass. Returns true if the next pass has started; otherwise the switchover approaches.
    fn finish_pass(&mut self) -> bool {
        let forgets_delayed = self.cx.has_bug(PlantedBug::SwitchoverWithDelayed);
        let Some(source) = &mut self.outgoing.source else {
            return false;
        };
        if !source.runs() {
            if let Stage::Freezing { last_pass, .. } = &mut source.stage
                && core::mem::take(last_pass)
            {
                if source.pass.copies() {
                    // With verification, blocks copied again are compared as well.
                    self.check_drained();
                } else {
                    source.counters.all_verified = true;
                    self.prepare();
                }
            }
            return false;
        }
        if source.holes.is_searching() {
            // Holes found by the search need not be pulled.
            return false;
        }
        if !forgets_delayed && source.delayed.pending_bytes() > FREEZE_DELAYED_BYTES {
            // Delayed writes are being sent; the pass continues afterwards.
            return false;
        }
        if source.pass == Pass::Compare {
            source.count_skipped();
            source.start_pass(Pass::Copy, self.cx.now);
            return true;
        }
        let converged = source.stage == Stage::Converged;
        if converged && !source.handover.may_switch_over {
            return false;
        }
        let leaves = source.leaves();
        if !converged
            && !leaves
            && let Some(round) = source.next_round()
        {
            source.start_pass(Pass::Resend { round }, self.cx.now);
            return true;
        }
        let next = match converged {
            true => None,
            false => source.next_comparison(),
        };
        match next {
            Some(pass) => {
                // All copies have arrived, so no copy can overtake the delayed writes.
                let delayed = &mut source.delayed;
                source.policy.take_rest(|extent| delayed.remember(extent));
                self.outgoing.begin_pass(&mut self.cx, pass);
                true
            }
            _ => {
                let stage = match source.handover.may_switch_over {
                    true => Stage::Freezing {
                        since: self.cx.now,
                        last_pass: false,
                    },
                    false => Stage::Converged,
                };
                self.outgoing.enter_stage(&mut self.cx, stage);
                self.outgoing.let_catch_up();
                false
            }
        }
    }

    /// Copies blocks again before the running guest's remembered writes exceed the rest allowed for a freeze.
    pub(in crate::controller) fn copy_again(&mut self) {
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let due = source.policy.is_due_again(source.pass) && !source.leaves();
        if source.stage == Stage::Converged && source.pauses.current.is_none() && due {
            let round = source.round() + 1;
            self.outgoing
                .begin_pass(&mut self.cx, Pass::Resend { round });
            self.pump();
        }
    }
}

/// Reads a locked chunk unless guest writes to the chunk are under way, here or to the destination. The lock prevents
/// new writes. A hole is examined instead of being read. Returns true if the chunk is being read now.
fn read_when_quiet(source: &mut Source, cx: &mut Cx, slot: ChunkSlot, extent: Extent) -> bool {
    let slots = &cx.slots;
    let busy = cx.table.find(extent, |entry| {
        slots.get(entry.tag).is_some_and(|slot| slot.is_in_flight())
    });
    if busy.is_some() || source.posted.overlaps(extent) {
        return false;
    }
    let kind = source.window.start_reading(slot);
    let inspect = match source.pass {
        Pass::Copy | Pass::Resend { .. } => Inspect::Zeroes,
        Pass::Compare | Pass::VerifyAll | Pass::VerifyDirty { .. } => Inspect::Digest,
    };
    if let (true, Some(dirty)) = (source.pass.verifies(), &mut source.dirty) {
        dirty.clear(extent);
    }
    let reads = kind != Some(ChunkKind::Hole);
    cx.act(Action::Disk {
        tag: DiskTag::Chunk(slot),
        operation: if reads {
            DiskOperation::Read { extent, inspect }
        } else {
            DiskOperation::FindHole { extent }
        },
    });
    reads
}
