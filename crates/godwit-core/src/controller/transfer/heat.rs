//! Heat: the blocks that the other node lacks, and the writes to each of their chunks.

use crate::controller::block_set::BlockSet;
use crate::units::{Extent, Lba, MAX_EXTENT_SECTORS};

/// Sectors of a block in the set of remaining blocks: 4 KiB.
pub(in crate::controller) const BLOCK_SECTORS: u32 = 8;

/// Sectors of a chunk whose writes are counted: 64 KiB.
pub(in crate::controller) const CHUNK_SECTORS: u32 = 128;

/// Visits runs of set blocks in order, each of one heat. `heat` returns the heat of a chunk's part.
pub(in crate::controller) fn each_run_by_heat(
    blocks: &BlockSet,
    heat: impl Fn(u64, Extent) -> u8,
    visit: impl FnMut(Lba, u32, u8),
) {
    let mut runs = RunsByHeat::new(visit);
    for found in blocks.runs(Lba(0), MAX_EXTENT_SECTORS) {
        for (chunk, part) in chunks(found) {
            runs.add(part.start(), part.end(), heat(chunk, part));
        }
    }
    runs.end();
}

/// Joins adjacent parts of equal heat.
pub(in crate::controller) struct RunsByHeat<V> {
    run: Option<(Lba, Lba, u8)>,
    visit: V,
}

impl<V: FnMut(Lba, u32, u8)> RunsByHeat<V> {
    pub(in crate::controller) const fn new(visit: V) -> Self {
        Self { run: None, visit }
    }

    pub(in crate::controller) fn add(&mut self, start: Lba, end: Lba, heat: u8) {
        match &mut self.run {
            Some((_, last, before)) if *last == start && *before == heat => *last = end,
            _ => {
                self.end();
                self.run = Some((start, end, heat));
            }
        }
    }

    /// Flushes the last run.
    pub(in crate::controller) fn end(&mut self) {
        const LONGEST: u64 = u32::MAX as u64 / CHUNK_SECTORS as u64 * CHUNK_SECTORS as u64;
        let Some((mut start, end, heat)) = self.run.take() else {
            return;
        };
        while start < end {
            let until = end.min(Lba(start.0 + LONGEST));
            (self.visit)(start, (until.0 - start.0) as u32, heat);
            start = until;
        }
    }
}

/// Returns the order of magnitude of a count, so that few runs differ: 0 for none, 1 for one, 8 for 128 and more.
pub(in crate::controller) const fn heat(count: u8) -> u8 {
    (u8::BITS - count.leading_zeros()) as u8
}

/// Returns the chunks that an extent touches, each with the part of the extent inside the chunk.
pub(in crate::controller) fn chunks(extent: Extent) -> impl Iterator<Item = (u64, Extent)> {
    let size = u64::from(CHUNK_SECTORS);
    let (start, end) = (extent.start().0, extent.end().0);
    (start / size..end.div_ceil(size)).filter_map(move |chunk| {
        let from = start.max(chunk * size);
        let to = end.min((chunk + 1) * size);
        Some((chunk, Extent::new(Lba(from), (to - from) as u32)?))
    })
}
