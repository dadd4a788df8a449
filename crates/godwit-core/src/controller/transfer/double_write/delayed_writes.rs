//! Writes that a pause kept from the destination: their table, and their later transfer (`DelayedTableFlush`, Alg. 3 of
//! the SmartNIC storage-migration paper).
//!
//! A delayed write is read from the local disk when it is sent, so the frame carries the guest's latest data. The frame
//! uses the sync connection: a later double write to the same address arrives later. If the guest writes to blocks that
//! are being read, the read is given up and the blocks are remembered anew.
//!
//! Writes to hot places during the copy are kept back even without a pause, and join the table when the copy nears its
//! end.

use crate::action::{Action, Content, DelayedSlot, DiskOperation, DiskTag, Inspect};
use crate::controller::cx::Cx;
use crate::controller::transfer::double_write::delayed_table::{DelayedTable, MAX_SECTORS};
use crate::controller::transfer::double_write::hot_writes::{Heat, HotWrites};
use crate::controller::transfer::outgoing::Outgoing;
use crate::controller::transfer::outgoing::Source;
use crate::controller::{Controller, Limits};
use crate::event::AbortReason;
use crate::request::RequestError;
use crate::units::{Extent, Generation, Lba, MAX_EXTENT_SECTORS, Sectors, Time};
use crate::wire::{Message, TrafficClass};

/// Entries skipped because the guest is writing to them, before the rest waits for the next occasion.
const MOST_BUSY: u32 = 8;

/// Sectors that a pause sends to probe the link: about one double write.
const PROBE_SECTORS: u32 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferState {
    /// The local read is under way.
    Reading,
    /// The local read is under way, and its data is useless.
    Cancelled,
    /// Sent; not acknowledged.
    Sent(Time),
}

#[derive(Clone, Copy, Debug)]
struct Transfer {
    slot: DelayedSlot,
    extent: Extent,
    state: TransferState,
}

/// The table, and its entries in flight.
#[derive(Debug)]
pub(in crate::controller) struct DelayedWrites {
    table: DelayedTable,
    hot: HotWrites,
    transfers: Vec<Transfer>,
    free: Vec<DelayedSlot>,
    /// End of the last entry sent: the disk is covered in order.
    cursor: Lba,
    pub(in crate::controller) sent_bytes: u64,
    pub(in crate::controller) cancelled_bytes: u64,
    #[cfg(feature = "planted-bugs")]
    forgets_hot: bool,
}

impl DelayedWrites {
    pub(in crate::controller) fn new(limits: Limits, capacity: Sectors) -> Self {
        let slots = limits.delayed_chunks.max(1);
        Self {
            table: DelayedTable::new(capacity, limits.delayed_ranges),
            hot: HotWrites::new(limits.hot_places),
            transfers: Vec::with_capacity(usize::from(slots)),
            free: (0..slots).rev().map(DelayedSlot).collect(),
            cursor: Lba(0),
            sent_bytes: 0,
            cancelled_bytes: 0,
            #[cfg(feature = "planted-bugs")]
            forgets_hot: false,
        }
    }

    /// Plants a defect: a full table drops new entries.
    #[cfg(feature = "planted-bugs")]
    pub(in crate::controller) fn drop_on_overflow(&mut self) {
        self.table.drop_on_overflow();
    }

    /// Plants a defect: kept back writes are never sent.
    #[cfg(feature = "planted-bugs")]
    pub(in crate::controller) fn forget_hot(&mut self) {
        self.forgets_hot = true;
    }

    /// Returns true if the destination has everything: nothing is remembered and nothing is in flight.
    #[inline]
    pub(in crate::controller) fn is_settled(&self) -> bool {
        self.table.is_empty()
            && self.hot.kept_bytes() == 0
            && self
                .transfers
                .iter()
                .all(|transfer| transfer.state == TransferState::Cancelled)
    }

    /// Returns the bytes that the destination lacks or has not confirmed.
    pub(in crate::controller) fn pending_bytes(&self) -> u64 {
        self.owed_bytes() + self.hot.kept_bytes()
    }

    /// Returns the bytes in the table and in flight, which are sent as soon as possible.
    pub(in crate::controller) fn owed_bytes(&self) -> u64 {
        let under_way: u64 = self
            .transfers
            .iter()
            .filter(|transfer| transfer.state != TransferState::Cancelled)
            .map(|transfer| transfer.extent.bytes())
            .sum();
        self.table.sectors().bytes().0 + under_way
    }

    /// Forgets a range that is copied again later.
    pub(in crate::controller) fn leave_to_copies(&mut self, start: Lba, end: Lba) {
        // A block at the end of the range may reach further, into blocks never copied. A block shared by two parts must
        // lie whole in one part.
        let (mut start, end) = (start.0, end.0 + u64::from(MAX_SECTORS));
        while start < end {
            let sectors = (end - start).min(u64::from(MAX_EXTENT_SECTORS)) as u32;
            if let Some(part) = Extent::new(Lba(start), sectors) {
                self.table.remove(part);
            }
            start += u64::from(MAX_EXTENT_SECTORS - MAX_SECTORS);
        }
    }

    /// Returns the time since which the oldest sent write waits for its acknowledgement.
    pub(in crate::controller) fn waiting_since(&self) -> Option<Time> {
        self.transfers
            .iter()
            .filter_map(|transfer| match transfer.state {
                TransferState::Sent(at) => Some(at),
                _ => None,
            })
            .min()
    }

    /// Remembers a write of the guest that the destination does not receive.
    pub(in crate::controller) fn remember(&mut self, extent: Extent) {
        self.cancel_reads(extent);
        self.table.insert(extent);
    }

    /// Counts a write to the extent. Returns true if the write is kept back, because the extent is hot and `may_keep`
    /// is true; any other write is treated as usual.
    #[inline]
    pub(in crate::controller) fn keep_back(&mut self, extent: Extent, may_keep: bool) -> bool {
        match self.hot.write(extent, may_keep) {
            Heat::Cold => false,
            Heat::Hot => true,
            Heat::Again => {
                self.cancelled_bytes += extent.bytes();
                true
            }
            Heat::Full => {
                self.release();
                false
            }
        }
    }

    /// Moves the kept back writes to the table.
    pub(in crate::controller) fn release(&mut self) {
        #[cfg(feature = "planted-bugs")]
        if self.forgets_hot {
            return self.hot.release(|_| {});
        }
        self.hot.release(|extent| self.table.insert(extent));
    }

    /// Forgets an extent made obsolete by a double write that is being sent.
    #[inline]
    pub(in crate::controller) fn overtaken(&mut self, extent: Extent) {
        if self.transfers.is_empty() && self.table.is_empty() {
            return;
        }
        self.cancel_reads(extent);
        self.cancelled_bytes += self.table.remove(extent).bytes().0;
    }

    fn cancel_reads(&mut self, extent: Extent) {
        for transfer in &mut self.transfers {
            if transfer.state == TransferState::Reading && transfer.extent.overlaps(extent) {
                transfer.state = TransferState::Cancelled;
                self.table.insert(transfer.extent);
            }
        }
    }

    /// Takes back the writes in flight, because a pause begins and they may never arrive.
    pub(in crate::controller) fn recall(&mut self) {
        let Self {
            table,
            transfers,
            free,
            ..
        } = self;
        transfers.retain_mut(|transfer| match transfer.state {
            TransferState::Cancelled => true,
            TransferState::Reading => {
                transfer.state = TransferState::Cancelled;
                table.insert(transfer.extent);
                true
            }
            TransferState::Sent(_) => {
                table.insert(transfer.extent);
                free.push(transfer.slot);
                false
            }
        });
    }

    /// Hands over all unsent entries; the caller remembers the entries from now on.
    pub(in crate::controller) fn take_rest(&mut self, mut remember: impl FnMut(Extent)) {
        self.release();
        for transfer in &mut self.transfers {
            if transfer.state == TransferState::Reading {
                transfer.state = TransferState::Cancelled;
                remember(transfer.extent);
            }
        }
        while let Some(extent) = self.table.next(Lba(0)) {
            self.table.take(extent);
            remember(extent);
        }
    }

    /// Returns the number of local reads under way.
    pub(in crate::controller) fn reads(&self) -> u32 {
        self.transfers
            .iter()
            .filter(|transfer| !matches!(transfer.state, TransferState::Sent(_)))
            .count() as u32
    }

    fn has_transfers(&self) -> bool {
        self.transfers
            .iter()
            .any(|transfer| transfer.state != TransferState::Cancelled)
    }

    fn land(&mut self, slot: DelayedSlot) -> Option<Transfer> {
        let at = self
            .transfers
            .iter()
            .position(|transfer| transfer.slot == slot)?;
        self.free.push(slot);
        Some(self.transfers.swap_remove(at))
    }
}

impl Source {
    /// Returns the next delayed write to send, if one may be sent now.
    fn next_delayed(&mut self, now: Time) -> Option<Extent> {
        self.rate.delayed_wait = None;
        let limit = self.migrated();
        let freezing = self.stage.is_freezing();
        if !(freezing || self.runs()) {
            return None;
        }
        let sends = match &self.pauses.current {
            None => true,
            Some(pause) => pause.probing && !self.delayed.has_transfers(),
        };
        let copying = self.has_window();
        let delayed = &self.delayed;
        if !sends || delayed.free.is_empty() {
            return None;
        }
        let within = |extent: &Extent| extent.start() < limit;
        let next = delayed.table.next(delayed.cursor).filter(within);
        let extent = next.or_else(|| delayed.table.next(Lba(0)).filter(within))?;
        let length = limit.0.saturating_sub(extent.start().0);
        let longest = match &self.pauses.current {
            Some(_) => delayed
                .table
                .least_part(PROBE_SECTORS)
                .min(extent.sectors()),
            None => extent.sectors(),
        };
        let mut length = length.min(u64::from(longest)) as u32;
        if copying {
            // A block that reaches into the window may also stand for writes there.
            length -= length % delayed.table.least_part(1);
        }
        let extent = Extent::new(extent.start(), length)?;
        if !freezing && let Err(next) = self.may_send(now, true) {
            self.rate.delayed_wait = Some(next);
            return None;
        }
        Some(extent)
    }
}

impl Outgoing {
    /// Sends kept back writes beside the last of the copies.
    pub(in crate::controller) fn flush_hot(&mut self, cx: &mut Cx) {
        let Some(source) = &mut self.source else {
            return;
        };
        if source.is_copying_pass() && source.nears_end() {
            source.delayed.release();
            if !source.delayed.is_settled() {
                self.flush_delayed(cx);
            }
        }
    }

    /// Sends delayed writes, ahead of copies, as far as their rate allows.
    pub(in crate::controller) fn flush_delayed(&mut self, cx: &mut Cx) {
        let mut busy = 0;
        while let Some(source) = &mut self.source {
            let Some(extent) = source.next_delayed(cx.now) else {
                return;
            };
            let delayed = &mut source.delayed;
            delayed.cursor = extent.end();
            let slots = &cx.slots;
            let writing = cx.table.find(extent, |entry| {
                slots
                    .get(entry.tag)
                    .is_some_and(|slot| slot.is_request() && slot.is_at_disk())
            });
            if writing.is_some() {
                busy += 1;
                if busy > MOST_BUSY {
                    return;
                }
                continue;
            }
            let Some(slot) = delayed.free.pop() else {
                return;
            };
            delayed.table.take(extent);
            delayed.transfers.push(Transfer {
                slot,
                extent,
                state: TransferState::Reading,
            });
            source.spend(extent.bytes(), true);
            source.holes.sends(extent);
            cx.act(Action::Disk {
                tag: DiskTag::Delayed(slot),
                operation: DiskOperation::Read {
                    extent,
                    inspect: Inspect::Zeroes,
                },
            });
        }
    }
}

impl Controller {
    /// Handles the local read of a delayed write.
    pub(in crate::controller) fn delayed_read(
        &mut self,
        slot: DelayedSlot,
        result: Result<Content, RequestError>,
    ) {
        let now = self.cx.now;
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        let generation = source.generation;
        let delayed = &mut source.delayed;
        let Some(transfer) = delayed
            .transfers
            .iter_mut()
            .find(|transfer| transfer.slot == slot)
        else {
            return;
        };
        match (transfer.state, result) {
            (TransferState::Sent(_), _) => {}
            (TransferState::Cancelled, _) => {
                delayed.land(slot);
                self.outgoing.flush_delayed(&mut self.cx);
            }
            (TransferState::Reading, Ok(content)) => {
                transfer.state = TransferState::Sent(now);
                let extent = transfer.extent;
                let zeroes = content == Content::Zeroes;
                if !zeroes {
                    delayed.sent_bytes += extent.bytes();
                }
                self.cx.send(
                    TrafficClass::Sync,
                    Message::DelayedWrite {
                        slot,
                        generation,
                        extent,
                        zeroes,
                    },
                );
            }
            (TransferState::Reading, Err(_)) => {
                delayed.land(slot);
                self.abort_source(AbortReason::SourceDisk);
            }
        }
    }

    /// Handles the destination's answer to a delayed write.
    pub(in crate::controller) fn delayed_written(
        &mut self,
        slot: DelayedSlot,
        generation: Generation,
        result: Result<(), RequestError>,
    ) {
        let now = self.cx.now;
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        source.peer.last_heard = now;
        let sent = source
            .delayed
            .transfers
            .iter()
            .find_map(|transfer| match transfer.state {
                TransferState::Sent(at) if transfer.slot == slot => Some(at),
                _ => None,
            });
        let Some(sent) = sent.filter(|_| source.generation == generation) else {
            return;
        };
        source.delayed.land(slot);
        if let Err(error) = result {
            self.abort_source(AbortReason::of_destination(error));
            return;
        }
        self.probed(now.since(sent));
        self.outgoing.flush_delayed(&mut self.cx);
        self.pump();
    }
}
