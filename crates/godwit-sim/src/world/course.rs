//! The course of the current or the last migration.

use godwit_core::action::DiskOperation;
use godwit_core::event::Phase;
use godwit_core::units::Lba;

use super::checks::promise::Promise;
use crate::plan::Target;

/// Length of the chunks for which writes are counted.
const CHUNK_SECTORS: u64 = 128;

#[derive(Debug, Default)]
pub(super) struct Course {
    pub(super) source: usize,
    pub(super) phase: Option<Phase>,
    pub(super) paused: bool,
    /// True if the migration leaves an image behind.
    pub(super) on_image: bool,
    pub(super) promise: Option<Promise>,
    /// Number of migrations begun.
    pub(super) begun: usize,
    /// Time of the end.
    pub(super) ended: u64,
    pub(super) last_move: u64,
    /// Number of the guest's writes to each chunk of 64 KiB since the migration began.
    write_counts: Vec<u8>,
}

impl Course {
    pub(super) fn begin(&mut self, source: usize, on_image: bool, sectors: u64) {
        self.source = source;
        self.on_image = on_image;
        self.paused = false;
        self.begun += 1;
        self.write_counts = vec![0; sectors.div_ceil(CHUNK_SECTORS) as usize];
    }

    /// Records the end, whatever the outcome.
    pub(super) fn end(&mut self, now: u64) {
        self.ended = now;
        self.promise = None;
        self.paused = false;
    }

    /// Returns the number of the migration.
    pub(super) fn number(&self) -> Option<usize> {
        self.begun.checked_sub(1)
    }

    pub(super) const fn node(&self, target: Target) -> usize {
        match target {
            Target::Source => self.source,
            Target::Destination => 1 - self.source,
        }
    }

    /// Counts a write of the guest to the source's disk.
    pub(super) fn count_write(&mut self, operation: &DiskOperation) {
        let (DiskOperation::Write { extent, .. } | DiskOperation::WriteZeroes { extent, .. }) =
            operation
        else {
            return;
        };
        let chunks = extent.start().0 / CHUNK_SECTORS..extent.end().0.div_ceil(CHUNK_SECTORS);
        for count in &mut self.write_counts[chunks.start as usize..chunks.end as usize] {
            *count = count.saturating_add(1);
        }
    }

    pub(super) fn forget_writes(&mut self) {
        self.write_counts.fill(0);
    }

    /// Returns a chunk among these sectors, and its number of writes, if the writes do not have this heat.
    pub(super) fn with_other_heat(&self, start: Lba, sectors: u32, heat: u8) -> Option<(u64, u8)> {
        let end = start.0 + u64::from(sectors);
        let chunks = start.0 / CHUNK_SECTORS..end.div_ceil(CHUNK_SECTORS);
        let mut counts = chunks.map(|chunk| (chunk, self.write_counts[chunk as usize]));
        counts.find(|(_, count)| u32::from(heat) != u8::BITS - count.leading_zeros())
    }
}
