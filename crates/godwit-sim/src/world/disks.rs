//! Disk operations, and records on their way to durability.

use godwit_core::action::{Content, Digest, DiskOperation, DiskTag, Inspect};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::AbortReason;
use godwit_core::request::RequestError;
use godwit_core::units::{Extent, Lba};

use super::node::{Holder, Pending};
use super::{World, name};
use crate::history::Value;
use crate::run::coverage::Reached;

impl World {
    pub(super) fn start_disk(&mut self, node: usize, tag: DiskTag, operation: DiskOperation) {
        let now = self.now;
        let it = &mut self.nodes[node];
        if it.operations.has(tag) {
            return self.fail("a tag has one disk operation at a time", || {
                format!("{} {tag:?} {operation:?}", name(node))
            });
        }
        let mut data = match operation {
            DiskOperation::Write { .. } => it.buffers.to_write(tag),
            _ => None,
        };
        let error = it.disk.fails(&operation, now);
        let latency = it.disk.latency(&operation, now, &mut self.random.disk);
        let early = error.is_none() && self.random.disk.below(2) == 0;
        let mark = it.disk.completed();
        match operation {
            DiskOperation::Read { extent, .. } | DiskOperation::FindHole { extent } if early => {
                data = Some(it.disk.read(extent));
            }
            DiskOperation::FindLongHole { .. } if early => {
                data = Some(it.disk.current.as_slice().into());
            }
            _ if early => it.disk.store(&operation, &data),
            _ => {}
        }
        let place = it.operations.begin(Pending {
            tag,
            operation,
            data,
            error,
            early,
            mark,
            started: now,
        });
        self.schedule_own(node, latency, move |world| world.disk_done(node, place));
        match error {
            Some(RequestError::NoSpace) => self.reached(Reached::NoSpace),
            Some(_) => self.reached(Reached::IoError),
            None => {}
        }
        if let DiskTag::Request(tag) = tag {
            if node == self.course.source && self.nodes[node].outgoing {
                self.course.count_write(&operation);
            }
            self.check_may_serve(node);
            if let Holder::Client(place) = self.nodes[node].buffers.holder(tag) {
                self.guest.disk_started(place, now);
            }
        }
    }

    pub(super) fn disk_done(&mut self, node: usize, place: usize) {
        let Some(done) = self.nodes[node].operations.end(place) else {
            return;
        };
        self.mark(place as u64);
        let (tag, started) = (done.tag, done.started);
        let result = self.carry_out_on_disk(node, done);
        if let DiskTag::Request(tag) = tag {
            if let Holder::Client(place) = self.nodes[node].buffers.holder(tag) {
                self.guest.disk_ended(place, self.now);
            }
            if let Some(promise) = &mut self.course.promise {
                promise.longest_disk = promise.longest_disk.max(self.now - started);
            }
        }
        self.with(node, |c, now| c.handle_disk_done(now, tag, result));
    }

    /// Carries out the part of an operation that takes effect at the end. Returns the operation's result.
    fn carry_out_on_disk(&mut self, node: usize, done: Pending) -> Result<Content, RequestError> {
        let Pending {
            tag,
            operation,
            data,
            error,
            early,
            mark,
            ..
        } = done;
        let it = &mut self.nodes[node];
        if let Some(error) = error {
            // A failed write may have stored part of the data.
            if self.random.disk.below(2) == 0 {
                it.disk.tear(&operation, &data, &mut self.random.disk);
            }
            return Err(error);
        }
        match operation {
            DiskOperation::Flush => it.disk.flush(mark),
            DiskOperation::Read { extent, inspect } => {
                let read = data.unwrap_or_else(|| it.disk.read(extent));
                let content = look(&read, inspect);
                it.buffers.keep_read(tag, Some(read));
                return Ok(content);
            }
            DiskOperation::FindHole { extent } => {
                let read = data.unwrap_or_else(|| it.disk.read(extent));
                let sectors = hole(&read, extent);
                match tag {
                    DiskTag::Layout if sectors > 0 => self.reached(Reached::HoleFound),
                    DiskTag::Chunk(_) if sectors < extent.sectors() => {
                        self.reached(Reached::HoleFilled);
                    }
                    DiskTag::Replica(_) => self.reached(Reached::HoleCompared),
                    _ => {}
                }
                return Ok(Content::Hole(sectors));
            }
            DiskOperation::FindLongHole { from } => {
                let read = data.unwrap_or_else(|| it.disk.current.as_slice().into());
                let (start, end) = long_hole(&read, from);
                if start < end {
                    self.reached(Reached::LongHoleFound);
                }
                return Ok(Content::LongHole { start, end });
            }
            _ if !early => it.disk.store(&operation, &data),
            _ => {}
        }
        Ok(Content::Data)
    }

    pub(super) fn store(&mut self, node: usize, record: AuthorityRecord) {
        if let Some(storing) = self.nodes[node].store.storing.replace(record) {
            self.fail("one record is stored at a time", || {
                format!("{storing:?}, then {record:?}")
            });
        }
        if matches!(record.ownership, Ownership::Relinquished { .. }) {
            self.check_equal(node);
        }
        let store = &self.nodes[node].store;
        let delay = store.record_latency(self.now, &mut self.random.store);
        self.schedule_own(node, delay, move |world| world.stored(node));
    }

    pub(super) fn stored(&mut self, node: usize) {
        let Some(record) = self.nodes[node].store.storing.take() else {
            return;
        };
        let refuses = || self.planned().is_some_and(|planned| planned.store_refuses);
        if matches!(record.ownership, Ownership::Relinquished { .. }) && refuses() {
            self.reached(Reached::NotStored);
            let cancelled = AbortReason::Cancelled;
            self.with(node, |c, now| c.handle_not_persisted(now, cancelled));
            return;
        }
        // The sharing state must be stored first.
        self.sharing_stored(node);
        self.nodes[node].store.record = record;
        self.check_records();
        self.with(node, |c, now| c.handle_persisted(now));
    }

    /// Checks for byte-identical images when the source gives the disk away, except for blocks known as missing at the
    /// destination.
    fn check_equal(&mut self, node: usize) {
        if self.course.on_image {
            return self.check_equal_on_image(node);
        }
        let (ours, theirs) = (&self.nodes[node], &self.nodes[1 - node]);
        let record = ours.store.storing;
        let owes = record.is_some_and(|record| record.remainder.is_some());
        let missing = theirs.store.missing.as_ref().filter(|_| owes);
        let (ours, theirs) = (&ours.disk.current, &theirs.disk.current);
        let mut all = (0..).zip(ours.iter().zip(theirs));
        let differs = all.find(|(sector, (ours, theirs))| {
            ours != theirs && !missing.is_some_and(|missing| missing.lacks(*sector))
        });
        if let Some((sector, (&ours, &theirs))) = differs {
            let writes = self.history.describe(sector);
            let claim = "the images are equal when the source gives the disk away";
            self.fail(claim, || {
                format!("sector {sector} holds #{ours} here and #{theirs} there; writes:{writes}")
            });
        }
    }

    /// Checks the same for a disk that leaves its image behind; blocks missing at a node read as in the image.
    fn check_equal_on_image(&mut self, node: usize) {
        let differs = (0..self.plan.sectors).find_map(|sector| {
            let [ours, theirs] = [node, 1 - node].map(|node| self.as_guests_see_it(node, sector));
            (ours != theirs).then_some((sector, ours, theirs))
        });
        if let Some((sector, ours, theirs)) = differs {
            let writes = self.history.describe(sector);
            let claim = "a disk is the same on its image at both nodes when it is given away";
            self.fail(claim, || {
                format!("sector {sector} is #{ours} here and #{theirs} there; writes:{writes}")
            });
        }
    }
}

/// Returns the number of sectors that are a hole from the start of the extent, whose content is `read`. Allocated
/// zeroes are no hole: one of each eight blocks is allocated.
fn hole(read: &[Value], extent: Extent) -> u32 {
    let start = extent.start().0;
    let zeroes = (start..).zip(read).take_while(is_hole);
    zeroes.count() as u32
}

fn is_hole(&(sector, value): &(u64, &Value)) -> bool {
    let takes_space = sector / 8 % 8 == 5;
    *value == 0 && !takes_space
}

/// Returns the first hole of at least a block at or after `from` in a disk with content `read`, or the end of the disk.
fn long_hole(read: &[Value], from: Lba) -> (Lba, Lba) {
    let mut at = from.0;
    while at < read.len() as u64 {
        let rest = (at..).zip(&read[at as usize..]);
        let sectors = rest.take_while(is_hole).count() as u64;
        if sectors >= 8 {
            return (Lba(at), Lba(at + sectors));
        }
        at += sectors + 1;
    }
    (Lba(at), Lba(at))
}

fn look(read: &[Value], inspect: Inspect) -> Content {
    match inspect {
        Inspect::Nothing => Content::Data,
        Inspect::Zeroes if read.iter().all(|value| *value == 0) => Content::Zeroes,
        Inspect::Zeroes => Content::Data,
        Inspect::Digest => Content::Digest(digest(read)),
    }
}

/// Stands in for BLAKE3: without forgery, different data has different digests.
fn digest(data: &[Value]) -> Digest {
    let mut hash = [0xCBF2_9CE4_8422_2325_u64, 0x9E37_79B9_7F4A_7C15];
    for value in data {
        hash[0] = (hash[0] ^ u64::from(*value)).wrapping_mul(0x0000_0100_0000_01B3);
        hash[1] = (hash[1].rotate_left(9) ^ u64::from(*value)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    }
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&hash[0].to_le_bytes());
    digest[8..16].copy_from_slice(&hash[1].to_le_bytes());
    digest
}
