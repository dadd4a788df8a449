//! A disk with a volatile write cache, and the effects of a crash on it.

use std::rc::Rc;

use godwit_core::action::DiskOperation;
use godwit_core::request::RequestError;
use godwit_core::units::{Extent, Lba};

use crate::history::Value;
use crate::plan::DiskPlan;
use crate::random::Random;

/// The content of consecutive sectors; `None` for frames and requests without data.
pub(crate) type Data = Option<Rc<[Value]>>;

/// Length of a transfer that occupies a disk for as long as an operation without its transfer.
const OPERATION_SECTORS: u64 = 8;

/// Length of a disk's standstill, and the time before which there is none.
const STALL: u64 = 8_000_000;
const STALLS_FROM: u64 = 2_000_000_000;

/// A write in the cache.
#[derive(Debug)]
struct Cached {
    sequence: u32,
    extent: Extent,
    /// `None` for zeroes.
    data: Data,
}

/// The part of a write left by a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remains {
    Nothing,
    Everything,
    /// Some of the sectors.
    Torn,
}

impl Remains {
    pub(crate) fn draw(random: &mut Random) -> Self {
        random.pick(&[Self::Nothing, Self::Everything, Self::Torn])
    }
}

/// An error of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failing {
    pub(crate) error: RequestError,
    /// End of the errors; 0 for at most one failed operation.
    pub(crate) until: u64,
}

#[derive(Debug)]
pub(crate) struct Disk {
    /// Content seen by reads.
    pub(crate) current: Vec<Value>,
    /// Content certain to survive a power loss, with the sequence number of the write.
    durable: Vec<(Value, u32)>,
    /// Completed, unflushed writes, oldest first.
    cache: Vec<Cached>,
    sequence: u32,
    plan: DiskPlan,
    /// End of the last transfer, where transfers queue.
    free_at: u64,
    /// Latency factor, and the time until which the factor applies.
    pub(crate) slow: (u64, u64),
    pub(crate) failing: Option<Failing>,
}

pub(crate) fn sectors(extent: Extent) -> std::ops::Range<usize> {
    extent.start().0 as usize..extent.end().0 as usize
}

impl Disk {
    pub(crate) fn new(sectors: u64, plan: DiskPlan) -> Self {
        Self {
            current: vec![0; sectors as usize],
            durable: vec![(0, 0); sectors as usize],
            cache: Vec::new(),
            sequence: 0,
            plan,
            free_at: 0,
            slow: (1, 0),
            failing: None,
        }
    }

    /// Makes the disk one hole, durably.
    pub(crate) fn empty(&mut self) {
        self.cache.clear();
        self.sequence += 1;
        self.current.fill(0);
        self.durable.fill((0, self.sequence));
    }

    /// Returns the duration of an operation starting now.
    pub(crate) fn latency(
        &mut self,
        operation: &DiskOperation,
        now: u64,
        random: &mut Random,
    ) -> u64 {
        let sectors = match operation {
            DiskOperation::Read { extent, .. } | DiskOperation::Write { extent, .. } => {
                u64::from(extent.sectors())
            }
            DiskOperation::WriteZeroes { .. }
            | DiskOperation::Keep { .. }
            | DiskOperation::KeepZeroes { .. }
            | DiskOperation::Flush
            | DiskOperation::FindHole { .. }
            | DiskOperation::FindLongHole { .. } => 0,
        };
        let tail = if random.permille(self.plan.tail_permille) {
            random.exponential(self.plan.tail)
        } else {
            0
        };
        let factor = if now < self.slow.1 { self.slow.0 } else { 1 };
        let way = self.plan.base + random.exponential(self.plan.base / 3);
        if !self.plan.queues {
            let transfer = sectors * self.plan.nanoseconds_per_sector;
            return (way + transfer + tail) * factor;
        }
        let transfer = (sectors + OPERATION_SECTORS) * self.plan.nanoseconds_per_sector;
        let every = self.plan.stalls_every;
        if every > 0 && self.free_at / every != now.max(self.free_at) / every && now > STALLS_FROM {
            self.free_at = now + STALL;
        }
        self.free_at = self.free_at.max(now) + (transfer + tail) * factor;
        way + self.free_at - now
    }

    /// Returns the error of an operation starting now, if any.
    pub(crate) fn fails(&mut self, operation: &DiskOperation, now: u64) -> Option<RequestError> {
        let failing = self.failing?;
        let writes = matches!(
            operation,
            DiskOperation::Write { .. } | DiskOperation::WriteZeroes { .. }
        );
        if failing.error == RequestError::NoSpace && !writes {
            return None;
        }
        if failing.until <= now {
            self.failing = None;
        }
        (failing.until == 0 || now < failing.until).then_some(failing.error)
    }

    pub(crate) fn read(&self, extent: Extent) -> Rc<[Value]> {
        Rc::from(&self.current[sectors(extent)])
    }

    /// Returns the number of completed writes: a flush starting now makes them durable.
    pub(crate) fn completed(&self) -> u32 {
        self.sequence
    }

    /// Carries out a write. Reads and flushes change nothing here.
    pub(crate) fn store(&mut self, operation: &DiskOperation, data: &Data) {
        let (DiskOperation::Write { extent, fua } | DiskOperation::WriteZeroes { extent, fua, .. }) =
            *operation
        else {
            return;
        };
        self.sequence += 1;
        match data {
            Some(data) => self.current[sectors(extent)].copy_from_slice(data),
            None => self.current[sectors(extent)].fill(0),
        }
        let cached = Cached {
            sequence: self.sequence,
            extent,
            data: data.clone(),
        };
        if fua {
            harden(&mut self.durable, &cached, |_| true);
        } else {
            self.cache.push(cached);
        }
    }

    /// Carries out parts of a write. Returns true if some sectors were written and others not.
    pub(crate) fn tear(
        &mut self,
        operation: &DiskOperation,
        data: &Data,
        random: &mut Random,
    ) -> bool {
        let (DiskOperation::Write { extent, .. } | DiskOperation::WriteZeroes { extent, .. }) =
            *operation
        else {
            return false;
        };
        let mut written = 0;
        for sector in 0..extent.sectors() {
            if random.below(2) == 0 {
                continue;
            }
            written += 1;
            let Some(extent) = Extent::new(Lba(extent.start().0 + u64::from(sector)), 1) else {
                continue;
            };
            let part = sector as usize..=sector as usize;
            let data = data.as_ref().map(|data| Rc::from(&data[part]));
            self.store(&DiskOperation::Write { extent, fua: false }, &data);
        }
        written > 0 && written < extent.sectors()
    }

    /// Makes all writes up to `mark` durable (see [`Self::completed`]).
    pub(crate) fn flush(&mut self, mark: u32) {
        let flushed = self.cache.partition_point(|write| write.sequence <= mark);
        for write in self.cache.drain(..flushed) {
            harden(&mut self.durable, &write, |_| true);
        }
    }

    /// Simulates a power loss: each write in the cache is kept, lost or torn. Returns the number of writes lost at
    /// least in parts, and the number of torn writes.
    pub(crate) fn power_loss(&mut self, random: &mut Random) -> (u64, u64) {
        let (mut lost, mut torn) = (0, 0);
        for write in self.cache.drain(..) {
            match Remains::draw(random) {
                Remains::Nothing => lost += 1,
                Remains::Everything => harden(&mut self.durable, &write, |_| true),
                Remains::Torn => {
                    (lost, torn) = (lost + 1, torn + 1);
                    harden(&mut self.durable, &write, |_| random.below(2) == 0);
                }
            }
        }
        for (current, durable) in self.current.iter_mut().zip(&self.durable) {
            *current = durable.0;
        }
        (lost, torn)
    }
}

/// Makes the sectors of a write durable, if accepted by `keep` and not overwritten by a later write.
fn harden(durable: &mut [(Value, u32)], write: &Cached, mut keep: impl FnMut(usize) -> bool) {
    for (at, kept) in durable[sectors(write.extent)].iter_mut().enumerate() {
        if kept.1 < write.sequence && keep(at) {
            let value = write.data.as_ref().map_or(0, |data| data[at]);
            *kept = (value, write.sequence);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Disk {
        let plan = DiskPlan {
            base: 1,
            tail: 1,
            tail_permille: 0,
            nanoseconds_per_sector: 0,
            queues: false,
            stalls_every: 0,
        };
        Disk::new(16, plan)
    }

    fn write(disk: &mut Disk, start: u64, sectors: u32, value: Value, fua: bool) {
        let extent = Extent::new(Lba(start), sectors).expect("not empty");
        let data = Some(Rc::from(vec![value; sectors as usize]));
        disk.store(&DiskOperation::Write { extent, fua }, &data);
    }

    #[test]
    fn a_power_loss_keeps_what_was_flushed_or_forced_and_may_lose_or_tear_the_rest() {
        let mut random = Random::stream(1, 1);
        let (mut lost, mut torn) = (false, false);
        for _ in 0..100 {
            let mut disk = disk();
            write(&mut disk, 0, 4, 1, false);
            write(&mut disk, 8, 2, 2, false);
            let mark = disk.completed();
            write(&mut disk, 2, 4, 3, false);
            disk.flush(mark);
            write(&mut disk, 9, 1, 4, true);
            write(&mut disk, 12, 2, 5, false);
            disk.power_loss(&mut random);
            assert_eq!(disk.current[..2], [1, 1]);
            let mut parts = disk.current[2..6].iter().zip([1, 1, 0, 0]);
            assert!(parts.all(|(value, older)| [older, 3].contains(value)));
            assert_eq!(disk.current[8..10], [2, 4]);
            lost |= disk.current[2..6] == [1, 1, 0, 0];
            torn |= disk.current[12] != disk.current[13];
        }
        assert!(lost && torn);
    }

    #[test]
    fn an_older_write_in_the_cache_does_not_come_back_over_a_forced_one() {
        let mut random = Random::stream(2, 1);
        for _ in 0..50 {
            let mut disk = disk();
            write(&mut disk, 0, 2, 1, false);
            write(&mut disk, 0, 1, 2, true);
            disk.power_loss(&mut random);
            assert_eq!(disk.current[0], 2);
        }
    }
}
