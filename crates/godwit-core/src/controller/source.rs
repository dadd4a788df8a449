//! The outgoing migration: passes over the disk behind the locking window (Alg. 1 of the SmartNIC
//! storage-migration paper), then verification, then the freeze that leads to switchover.

use super::dirty::DirtyBitmap;
use super::pacer::Pacer;
use super::slots::{REMOTE, TagList};
use super::window::{ChunkContent, ChunkState, Window};
use super::{Controller, MigrationOptions, Progress, StartError};
use crate::action::{Action, ChunkSlot, Content, DiskOperation, DiskTag, Inspect};
use crate::event::{AbortReason, Event, Phase};
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Generation, SECTOR_SIZE, Sectors, Time};
use crate::wire::{Message, TrafficClass};

/// Longest chunk: 16 MiB.
const MAX_CHUNK_SECTORS: u32 = (16 << 20) / SECTOR_SIZE as u32;

/// Verification passes are repeated over what was written meanwhile until no more than this many
/// 4 KiB blocks are left; those are compared while the guest is held.
const FREEZE_BLOCKS: u64 = 64;

/// A guest that has asked for nothing this long is idle.
const GUEST_IDLE_AFTER: core::time::Duration = core::time::Duration::from_millis(100);

/// After this many passes the guest is held however many blocks are left.
const MAX_VERIFY_PASSES: u32 = 10;

/// The pass that the window makes over the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    /// Every chunk goes to the destination.
    Copy,
    /// Both sides read every chunk and compare hashes.
    VerifyAll,
    /// As before, but only blocks that were written since they were compared.
    VerifyDirty { number: u32 },
}

#[derive(Debug)]
pub(super) struct Source {
    pub(super) options: MigrationOptions,
    pub(super) generation: Generation,
    pub(super) window: Window,
    phase: Phase,
    pass: Pass,
    capacity: Sectors,
    /// Blocks written since they were compared; only with verification.
    dirty: Option<DirtyBitmap>,
    pacer: Option<Pacer>,
    paced_until: Option<Time>,
    pass_done: u64,
    pass_total: u64,
    counters: Counters,
    mismatch: Option<Extent>,
    /// Whether the connection that will carry forwarded I/O is still there.
    pub(super) sync_up: bool,
    next_tick: Time,
    last_heard: Time,
    phase_since: Time,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    copied: u64,
    copy_sent: u64,
    double_write_sent: u64,
    verified: u64,
    all_verified: bool,
}

impl Source {
    /// Whether new guest I/O has to wait.
    #[inline]
    pub(super) fn is_frozen(&self) -> bool {
        !matches!(self.phase, Phase::Copying | Phase::Verifying)
    }

    /// Whether a write to the extent, which no chunk locks, has to reach the destination too. One
    /// that begins in the migrated region goes there whole: what it writes past the read head is
    /// copied again later.
    #[inline]
    pub(super) fn has_copied(&self, extent: Extent) -> bool {
        self.pass != Pass::Copy || extent.start() < self.window.pointers.read_head
    }

    #[inline]
    pub(super) fn double_written(&mut self, extent: Extent, zeroes: bool) {
        if let Some(dirty) = &mut self.dirty {
            dirty.set(extent);
        }
        if !zeroes {
            self.counters.double_write_sent += extent.bytes();
            if let Some(pacer) = &mut self.pacer {
                pacer.spend(extent.bytes());
            }
        }
    }

    pub(super) fn next_deadline(&self) -> Time {
        self.paced_until
            .map_or(self.next_tick, |paced| paced.min(self.next_tick))
    }

    pub(super) fn progress(&self) -> Progress {
        Progress {
            migration: self.options.migration,
            phase: self.phase,
            bytes_done: self.pass_done,
            bytes_total: self.pass_total,
            bytes_copied: self.counters.copied,
            copy_bytes_sent: self.counters.copy_sent,
            double_write_bytes_sent: self.counters.double_write_sent,
            bytes_verified: self.counters.verified,
            verified: self.counters.all_verified,
            promise: super::PromiseProgress::default(),
        }
    }

    /// What the pass locks next, if it has not come to its end.
    fn next_extent(&self) -> Option<Extent> {
        let head = self.window.pointers.read_head;
        match (self.pass, &self.dirty) {
            (Pass::VerifyDirty { .. }, Some(dirty)) => {
                dirty.next_run(head, self.options.chunk_sectors)
            }
            _ => {
                let left = self.capacity.0.saturating_sub(head.0);
                let sectors = left.min(u64::from(self.options.chunk_sectors)) as u32;
                Extent::new(head, sectors)
            }
        }
    }

    fn start_pass(&mut self, pass: Pass) {
        self.pass = pass;
        self.pass_done = 0;
        self.pass_total = match (pass, &self.dirty) {
            (Pass::VerifyDirty { .. }, Some(dirty)) => dirty.count() * 4096,
            _ => self.capacity.bytes().0,
        };
        self.window.restart();
    }

    fn dirty_blocks(&self) -> u64 {
        self.dirty.as_ref().map_or(0, DirtyBitmap::count)
    }

    /// How often the source looks at the time: heartbeats and timeouts.
    fn tick(&self) -> core::time::Duration {
        self.options.peer_timeout / 4
    }
}

impl Controller {
    /// Starts to move the disk away. The connections are up and the destination accepted the offer.
    ///
    /// # Errors
    /// [`StartError`]; nothing has changed then.
    pub fn start_source(&mut self, now: Time, options: MigrationOptions) -> Result<(), StartError> {
        let chunk = options.chunk_sectors;
        if chunk == 0 || !chunk.is_multiple_of(8) || chunk > MAX_CHUNK_SECTORS {
            return Err(StartError::Option("chunk size"));
        }
        if options.window_chunks == 0 || options.window_chunks > self.limits.window_chunks {
            return Err(StartError::Option("window"));
        }
        if options.busy_window_chunks == 0 || options.busy_window_chunks > options.window_chunks {
            return Err(StartError::Option("window for a busy guest"));
        }
        if options.peer_timeout.is_zero() {
            return Err(StartError::Option("peer timeout"));
        }
        if !self.authority.may_serve() {
            return Err(StartError::NotServing);
        }
        if self.source.is_some() || self.orphaned_reads > 0 {
            return Err(StartError::Busy);
        }
        self.now = now;
        self.control_up = true;
        self.forward_link = super::ForwardLink::Absent;
        let mut source = Source {
            generation: Generation(0),
            window: Window::new(options.window_chunks),
            phase: Phase::Copying,
            pass: Pass::Copy,
            capacity: self.capacity,
            dirty: options.verify.then(|| DirtyBitmap::new(self.capacity)),
            pacer: options.max_bandwidth.map(|limit| Pacer::new(limit, now)),
            paced_until: None,
            pass_done: 0,
            pass_total: 0,
            counters: Counters::default(),
            mismatch: None,
            sync_up: true,
            next_tick: now,
            last_heard: now,
            phase_since: now,
            options,
        };
        source.start_pass(Pass::Copy);
        self.source = Some(Box::new(source));
        self.enter_phase(Phase::Copying);
        self.pump();
        Ok(())
    }

    /// Fills the locking window and sends what has been read.
    pub(super) fn pump(&mut self) {
        let long_ago = |last: Time| self.now.since(last) > GUEST_IDLE_AFTER;
        let guest_is_idle = self.requests == 0 && self.last_request.is_none_or(long_ago);
        loop {
            let Some(source) = &mut self.source else {
                return;
            };
            let most = if guest_is_idle {
                source.options.window_chunks
            } else {
                source.options.busy_window_chunks
            };
            while source.window.len() < usize::from(most) && source.window.has_free_slot() {
                let Some(extent) = source.next_extent() else {
                    break;
                };
                if source.pass == Pass::Copy
                    && let Some(pacer) = &mut source.pacer
                {
                    if let Err(next) = pacer.ready(self.now) {
                        source.paced_until = Some(next);
                        break;
                    }
                    source.paced_until = None;
                    pacer.spend(extent.bytes());
                }
                let Some(slot) = source.window.lock(extent) else {
                    break;
                };
                read_when_quiet(
                    source,
                    &self.table,
                    &self.slots,
                    &mut self.actions,
                    slot,
                    extent,
                );
            }
            if source.window.is_empty() && source.next_extent().is_none() {
                if self.finish_pass() {
                    continue;
                }
                return;
            }
            return;
        }
    }

    /// A guest write left these addresses: chunks that waited for it may be read now.
    #[inline]
    pub(super) fn writes_left(&mut self, extent: Extent) {
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
            read_when_quiet(
                source,
                &self.table,
                &self.slots,
                &mut self.actions,
                slot,
                extent,
            );
        }
    }

    /// The local read of a chunk finished.
    pub(super) fn chunk_read(&mut self, slot: ChunkSlot, result: Result<Content, RequestError>) {
        if self.orphaned_reads > 0 {
            // No migration starts while reads of an abandoned one are under way.
            self.orphaned_reads -= 1;
            return;
        }
        let Some(source) = &mut self.source else {
            return;
        };
        let pass = source.pass;
        let Some(chunk) = source
            .window
            .get(slot)
            .filter(|c| c.state == ChunkState::Reading)
        else {
            return;
        };
        chunk.state = ChunkState::Read(match result {
            Ok(Content::Digest(digest)) if pass != Pass::Copy => ChunkContent::Digest(digest),
            Ok(Content::Data) if pass == Pass::Copy => ChunkContent::Data,
            Ok(Content::Zeroes) if pass == Pass::Copy => ChunkContent::Zeroes,
            _ => {
                // The slot is idle again: it must not be counted as a read under way.
                chunk.state = ChunkState::Sent;
                self.abort_source(AbortReason::SourceDisk);
                return;
            }
        });
        self.send_read_chunks();
    }

    fn send_read_chunks(&mut self) {
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
            self.actions.push_back(Action::Send {
                class: TrafficClass::Copy,
                message,
            });
        }
    }

    /// The destination acknowledged a copy or a double write.
    pub(super) fn acknowledged(
        &mut self,
        class: TrafficClass,
        tag: u32,
        generation: Generation,
        result: Result<(), RequestError>,
    ) {
        let Some(source) = &mut self.source else {
            return;
        };
        source.last_heard = self.now;
        if class == TrafficClass::Sync {
            self.double_write_acknowledged(RequestTag(tag));
        } else if source.generation == generation
            && source.pass == Pass::Copy
            && result.is_ok()
            && let Ok(slot) = u16::try_from(tag)
        {
            self.chunk_done(ChunkSlot(slot));
        }
        if let Err(error) = result {
            self.abort_source(match error {
                RequestError::NoSpace => AbortReason::DestinationNoSpace,
                _ => AbortReason::DestinationDisk,
            });
        }
    }

    /// The destination compared a chunk.
    pub(super) fn chunk_compared(
        &mut self,
        slot: ChunkSlot,
        generation: Generation,
        result: Result<bool, RequestError>,
    ) {
        let Some(source) = &mut self.source else {
            return;
        };
        source.last_heard = self.now;
        if source.generation != generation || source.pass == Pass::Copy {
            return;
        }
        match result {
            Ok(true) => self.chunk_done(slot),
            Ok(false) => {
                source.mismatch = source.window.get(slot).map(|chunk| chunk.extent);
                self.abort_source(AbortReason::VerifyMismatch);
            }
            Err(_) => {
                self.abort_source(AbortReason::DestinationDisk);
            }
        }
    }

    fn chunk_done(&mut self, slot: ChunkSlot) {
        let Some(source) = &mut self.source else {
            return;
        };
        let Some((extent, waiters)) = source.window.acknowledge(slot) else {
            return;
        };
        source.pass_done += extent.bytes();
        match source.pass {
            Pass::Copy => source.counters.copied += extent.bytes(),
            _ => source.counters.verified += extent.bytes(),
        }
        self.wake(waiters);
        self.pump();
    }

    fn wake(&mut self, mut waiters: TagList) {
        while let Some(tag) = self.slots.pop(&mut waiters) {
            self.ready.push_back(tag);
        }
    }

    /// The pass came to its end: starts the next one (true) or the way to switchover.
    fn finish_pass(&mut self) -> bool {
        let Some(source) = &mut self.source else {
            return false;
        };
        if !matches!(source.phase, Phase::Copying | Phase::Verifying) {
            if source.phase == Phase::Draining && matches!(source.pass, Pass::VerifyDirty { .. }) {
                source.counters.all_verified = true;
                self.prepare();
            }
            return false;
        }
        let next = match source.pass {
            _ if !source.options.verify => None,
            Pass::Copy => Some(Pass::VerifyAll),
            Pass::VerifyAll => Some(Pass::VerifyDirty { number: 2 }),
            Pass::VerifyDirty { number } => {
                (number < MAX_VERIFY_PASSES).then_some(Pass::VerifyDirty { number: number + 1 })
            }
        };
        let small = source.pass != Pass::Copy && source.dirty_blocks() <= FREEZE_BLOCKS;
        match next {
            Some(pass) if !small => {
                source.start_pass(pass);
                if source.phase == Phase::Copying {
                    self.enter_phase(Phase::Verifying);
                }
                true
            }
            _ => {
                self.enter_phase(Phase::Draining);
                false
            }
        }
    }

    /// When the guest is held and everything it had in flight is done: compares what was written
    /// since the last pass, then asks the destination to accept.
    pub(super) fn check_drained(&mut self) {
        let Some(source) = &mut self.source else {
            return;
        };
        if source.phase != Phase::Draining || self.admitted > 0 || !source.window.is_empty() {
            return;
        }
        if source.options.verify && source.dirty_blocks() > 0 {
            source.start_pass(Pass::VerifyDirty {
                number: MAX_VERIFY_PASSES,
            });
            self.pump();
        } else {
            source.counters.all_verified = source.options.verify;
            self.prepare();
        }
    }

    fn prepare(&mut self) {
        let Some(source) = &self.source else { return };
        let migration = source.options.migration;
        self.enter_phase(Phase::Preparing);
        let effects = self.authority.prepare(migration);
        self.apply(effects);
    }

    pub(super) fn enter_phase(&mut self, phase: Phase) {
        let Some(source) = &mut self.source else {
            return;
        };
        source.phase = phase;
        source.phase_since = self.now;
        let migration = source.options.migration;
        self.notify(Event::PhaseEntered { migration, phase });
    }

    /// Gives the migration up: the guest goes on here, and nothing that was under way with the
    /// destination matters any more. False when it is too late.
    pub(super) fn abort_source(&mut self, reason: AbortReason) -> bool {
        if self.source.is_none() || !self.authority.cancel() {
            return false;
        }
        let Some(mut source) = self.source.take() else {
            return false;
        };
        let migration = source.options.migration;
        source.phase = Phase::Aborted;
        self.last_progress = Some(source.progress());
        let (reading, waiters) = source.window.abandon();
        self.orphaned_reads += reading;
        self.send(TrafficClass::Control, Message::Abort { migration, reason });
        let mismatch = source.mismatch;
        self.notify(Event::MigrationAborted {
            migration,
            reason,
            mismatch,
        });
        for tag in self.slots.select(|slot| slot.pending & REMOTE != 0) {
            self.double_write_acknowledged(tag);
        }
        for list in waiters {
            self.wake(list);
        }
        self.control_up = false;
        self.release_held();
        true
    }

    /// The destination serves: nothing is left to do but to forward.
    pub(super) fn complete_source(&mut self) {
        if let Some(mut source) = self.source.take() {
            source.phase = Phase::Completed;
            self.last_progress = Some(source.progress());
        }
    }

    /// The other node answered something.
    pub(super) fn heard(&mut self) {
        if let Some(source) = &mut self.source {
            source.last_heard = self.now;
        }
        self.destination_heard();
    }

    pub(super) fn source_timer(&mut self) {
        let now = self.now;
        let Some(source) = &mut self.source else {
            return;
        };
        if source.paced_until.is_some_and(|until| until <= now) {
            source.paced_until = None;
            self.pump();
        }
        let Some(source) = &mut self.source else {
            return;
        };
        if source.next_tick > now {
            return;
        }
        let timeout = source.options.peer_timeout;
        source.next_tick = now.after(source.tick());
        let deciding = matches!(source.phase, Phase::Draining | Phase::Preparing);
        let late = now.since(source.last_heard) > timeout
            || (deciding && now.since(source.phase_since) > timeout)
            || !self
                .slots
                .select(|slot| slot.pending & REMOTE != 0 && now.since(slot.issued) > timeout)
                .is_empty();
        if late && self.abort_source(AbortReason::PeerTimeout) {
            self.run_ready();
            return;
        }
        self.send(TrafficClass::Control, Message::Ping);
    }
}

/// Reads a locked chunk unless guest writes to it are under way; no new ones start, because the
/// chunk is locked.
fn read_when_quiet(
    source: &mut Source,
    table: &crate::write_table::WriteTable,
    slots: &super::slots::Slots,
    actions: &mut std::collections::VecDeque<Action>,
    slot: ChunkSlot,
    extent: Extent,
) {
    let busy = table.find(extent, |entry| {
        slots
            .get(entry.tag)
            .is_some_and(|slot| slot.stage == super::slots::Stage::InFlight)
    });
    if busy.is_some() {
        return;
    }
    source.window.start_reading(slot);
    let inspect = match source.pass {
        Pass::Copy => Inspect::Zeroes,
        Pass::VerifyAll | Pass::VerifyDirty { .. } => Inspect::Digest,
    };
    if let (Inspect::Digest, Some(dirty)) = (inspect, &mut source.dirty) {
        dirty.clear(extent);
    }
    actions.push_back(Action::Disk {
        tag: DiskTag::Chunk(slot),
        operation: DiskOperation::Read { extent, inspect },
    });
}
