//! Disk operations, and records on their way to durability.

use godwit_core::action::{Content, Digest, DiskOperation, DiskTag, Inspect};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::AbortReason;
use godwit_core::units::{Extent, Lba};

use super::MICROSECOND;
use super::Occurrence;
use super::World;
use super::name;
use super::node::{Holder, Pending};
use crate::disk::Remains;
use crate::history::Value;
use crate::run::coverage::Reached;

impl World {
    pub(super) fn start_disk(&mut self, node: usize, tag: DiskTag, operation: DiskOperation) {
        let now = self.now;
        let it = &mut self.nodes[node];
        if it
            .pending
            .iter()
            .flatten()
            .any(|pending| pending.tag == tag)
        {
            self.fail("a tag has one disk operation at a time", || {
                format!("{} {tag:?} {operation:?}", name(node))
            });
            return;
        }
        let mut data = match (&operation, tag) {
            (DiskOperation::Write { .. }, DiskTag::Request(tag) | DiskTag::Replica(tag)) => {
                it.buffers[tag.0 as usize].clone()
            }
            (DiskOperation::Write { .. }, DiskTag::Pulled(slot)) => {
                it.pull_buffers[usize::from(slot.0)].clone()
            }
            _ => None,
        };
        let error = it.disk.fails(&operation, now);
        let latency = it.disk.latency(&operation, now, &mut self.disk_random);
        let early = error.is_none() && self.disk_random.below(2) == 0;
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
        let pending = Some(Pending {
            tag,
            operation,
            data,
            error,
            early,
            mark,
            started: now,
        });
        let index = match it.free_pending.pop() {
            Some(index) => {
                it.pending[index] = pending;
                index
            }
            None => {
                it.pending.push(pending);
                it.pending.len() - 1
            }
        };
        let incarnation = it.incarnation;
        self.schedule(
            latency,
            Occurrence::DiskDone {
                node,
                incarnation,
                index,
            },
        );
        if let Some(error) = error {
            self.reached(match error {
                godwit_core::request::RequestError::NoSpace => Reached::NoSpace,
                _ => Reached::IoError,
            });
        }
        if let DiskTag::Request(tag) = tag {
            self.count_write(node, operation);
            self.check_may_serve(node);
            if let Holder::Client(place) = self.nodes[node].holders[tag.0 as usize] {
                self.guest.disk_started(place, now);
            }
        }
    }

    pub(super) fn disk_done(&mut self, node: usize, index: usize) {
        let it = &mut self.nodes[node];
        let Some(done) = it.pending[index].take() else {
            return;
        };
        it.free_pending.push(index);
        self.mark(index as u64);
        let it = &mut self.nodes[node];
        let Pending {
            tag,
            operation,
            data,
            early,
            mark,
            started,
            ..
        } = done;
        let mut content = Content::Data;
        // A failed write may have stored part of the data.
        let tears = done.error.is_some() && self.disk_random.below(2) == 0;
        match operation {
            _ if tears => {
                it.disk.tear(&operation, &data, &mut self.disk_random);
            }
            _ if done.error.is_some() => {}
            DiskOperation::Flush => it.disk.flush(mark),
            DiskOperation::Read { extent, inspect } => {
                let read = data.unwrap_or_else(|| it.disk.read(extent));
                content = look(&read, inspect);
                if let DiskTag::Request(tag) | DiskTag::Replica(tag) = tag {
                    it.buffers[tag.0 as usize] = Some(read);
                } else if let Some(slot) = tag.source_slot() {
                    it.source_buffers.insert(slot, Some(read));
                }
            }
            DiskOperation::FindHole { extent } => {
                let read = data.unwrap_or_else(|| it.disk.read(extent));
                let sectors = hole(&read, extent);
                content = Content::Hole(sectors);
                match tag {
                    DiskTag::Layout if sectors > 0 => self.reached(Reached::HoleFound),
                    DiskTag::Chunk(_) if sectors < extent.sectors() => {
                        self.reached(Reached::HoleFilled);
                    }
                    DiskTag::Replica(_) => self.reached(Reached::HoleCompared),
                    _ => {}
                }
            }
            DiskOperation::FindLongHole { from } => {
                let read = data.unwrap_or_else(|| it.disk.current.as_slice().into());
                let (start, end) = long_hole(&read, from);
                content = Content::LongHole { start, end };
                if start < end {
                    self.reached(Reached::LongHoleFound);
                }
            }
            _ if !early => it.disk.store(&operation, &data),
            _ => {}
        }
        if let DiskTag::Request(tag) = tag {
            let holder = self.nodes[node].holders[tag.0 as usize];
            if let Holder::Client(place) = holder {
                self.guest.disk_ended(place, self.now);
            }
            if let Some(promise) = &mut self.promise {
                promise.longest_disk = promise.longest_disk.max(self.now - started);
            }
        }
        let result = match done.error {
            Some(error) => Err(error),
            None => Ok(content),
        };
        self.with(node, |controller, now| {
            controller.handle_disk_done(now, tag, result)
        });
    }

    pub(super) fn store(&mut self, node: usize, record: AuthorityRecord) {
        if let Some(storing) = self.nodes[node].storing {
            self.fail("one record is stored at a time", || {
                format!("{storing:?}, then {record:?}")
            });
        }
        let it = &mut self.nodes[node];
        it.storing = Some(record);
        if matches!(record.ownership, Ownership::Relinquished { .. }) {
            self.check_equal(node);
        }
        let it = &mut self.nodes[node];
        let (delay, until) = it.slow_store;
        let longest = self.plan.store + if self.now < until { delay } else { 0 };
        let incarnation = it.incarnation;
        let delay = self.store_random.between(20 * MICROSECOND, longest);
        self.schedule(delay, Occurrence::Stored { node, incarnation });
    }

    pub(super) fn stored(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        if let Some(record) = it.storing.take() {
            if matches!(record.ownership, Ownership::Relinquished { .. }) && self.store_refuses() {
                self.reached(Reached::NotStored);
                self.with(node, |controller, now| {
                    controller.handle_not_persisted(now, AbortReason::Cancelled)
                });
                return;
            }
            // The sharing state must be stored first.
            self.sharing_stored(node);
            let it = &mut self.nodes[node];
            it.record = record;
            self.check_records();
            self.with(node, |controller, now| controller.handle_persisted(now));
        }
    }

    fn store_refuses(&self) -> bool {
        let last = self.next_migration.checked_sub(1);
        last.is_some_and(|last| self.plan.migrations[last].store_refuses)
    }

    /// Checks for byte-identical images when the source gives the disk away, except for blocks known as missing at the
    /// destination.
    fn check_equal(&mut self, node: usize) {
        if self.on_image {
            return self.check_equal_on_image(node);
        }
        let (ours, theirs) = (&self.nodes[node].disk, &self.nodes[1 - node].disk);
        let owes = self.nodes[node]
            .storing
            .is_some_and(|record| record.remainder.is_some());
        let missing = self.nodes[1 - node].missing.as_ref().filter(|_| owes);
        let differs = (0..)
            .zip(ours.current.iter().zip(&theirs.current))
            .find(|(sector, (ours, theirs))| {
                ours != theirs && !missing.is_some_and(|missing| missing.lacks(*sector))
            })
            .map(|(sector, _)| sector as usize);
        if let Some(sector) = differs {
            let (ours, theirs) = (ours.current[sector], theirs.current[sector]);
            let writes = self.history.describe(sector as u64);
            self.fail(
                "the images are equal when the source gives the disk away",
                || {
                    format!(
                        "sector {sector} holds #{ours} here and #{theirs} there; writes:{writes}"
                    )
                },
            );
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
            self.fail(
                "a disk is the same on its image at both nodes when it is given away",
                || format!("sector {sector} is #{ours} here and #{theirs} there; writes:{writes}"),
            );
        }
    }

    /// Applies a crash to a node's operations in flight, and to a record on its way.
    pub(super) fn interrupt(&mut self, node: usize) {
        let random = &mut self.fault_random;
        let it = &mut self.nodes[node];
        let mut torn = 0;
        for pending in std::mem::take(&mut it.pending).into_iter().flatten() {
            if pending.early || matches!(pending.operation, DiskOperation::Read { .. }) {
                continue;
            }
            match Remains::draw(random) {
                Remains::Nothing => {}
                Remains::Everything => it.disk.store(&pending.operation, &pending.data),
                Remains::Torn => {
                    torn += u64::from(it.disk.tear(&pending.operation, &pending.data, random));
                }
            }
        }
        it.free_pending.clear();
        let sharing = it.storing_shared.take();
        if random.below(2) == 0 {
            it.shared = sharing.unwrap_or(it.shared);
        }
        let kept = it.storing.take().map(|record| {
            let kept = random.below(2) == 0;
            if kept {
                it.record = record;
                it.shared = sharing.unwrap_or(it.shared);
            }
            kept
        });
        self.coverage.add(Reached::TornWrite, torn);
        match kept {
            Some(true) => {
                self.reached(Reached::RecordKept);
                self.check_records();
            }
            Some(false) => self.reached(Reached::RecordLost),
            None => {}
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
