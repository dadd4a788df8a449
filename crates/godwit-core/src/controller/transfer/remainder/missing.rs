//! Which blocks of a disk are not here, and which of them are wanted most.

use crate::action::PULL_SECTORS;
use crate::controller::transfer::dirty::DirtyBitmap;
use crate::controller::transfer::push_pull::{BLOCK_SECTORS, CHUNK_SECTORS, chunks};
use crate::units::{Bytes, Extent, Lba, MAX_EXTENT_SECTORS, SECTOR_SIZE, Sectors};
use crate::wire::TrafficClass;

/// Blocks of 4 KiB that a disk lacks, and how often each chunk of 64 KiB was written, as far as that is known.
#[derive(Debug)]
pub struct Missing {
    capacity: Sectors,
    blocks: DirtyBitmap,
    heat: Box<[u8]>,
    /// How many blocks of each heat are missing.
    of_heat: [u64; HOTTEST as usize + 1],
    /// Those of the blocks that are at the node that gave the disk away, where the rest of them is in an image; nothing
    /// where all of them are in one place. What is here stays set.
    at_source: Option<DirtyBitmap>,
    /// How many blocks are missing and there.
    left_at_source: u64,
}

impl Missing {
    pub(in crate::controller) fn new(capacity: Sectors) -> Self {
        Self {
            capacity,
            blocks: DirtyBitmap::new(capacity, BLOCK_SECTORS),
            heat: vec![0; Self::heat_length(capacity)].into_boxed_slice(),
            of_heat: [0; HOTTEST as usize + 1],
            at_source: None,
            left_at_source: 0,
        }
    }

    /// What was stored: [`Self::words`] and [`Self::heat`]. Nothing if their lengths are not those of a disk of
    /// this capacity.
    pub fn from_parts(capacity: Sectors, words: &[u64], heat: &[u8]) -> Option<Self> {
        let fits =
            words.len() == Self::word_length(capacity) && heat.len() == Self::heat_length(capacity);
        if !fits {
            return None;
        }
        let mut missing = Self {
            capacity,
            blocks: DirtyBitmap::from_words(capacity, BLOCK_SECTORS, words),
            heat: heat.iter().map(|heat| (*heat).min(HOTTEST)).collect(),
            of_heat: [0; HOTTEST as usize + 1],
            at_source: None,
            left_at_source: 0,
        };
        missing.count_heat();
        Some(missing)
    }

    /// The same of a disk that lacks something in two places: [`Self::at_source`] as it was stored. Nothing if its length
    /// is not that of the disk.
    #[must_use]
    pub fn in_two_places(mut self, at_source: &[u64]) -> Option<Self> {
        let fits = at_source.len() == Self::word_length(self.capacity);
        self.at_source =
            fits.then(|| DirtyBitmap::from_words(self.capacity, BLOCK_SECTORS, at_source));
        self.count_at_source();
        fits.then_some(self)
    }

    /// A bit for each block that is, or was, at the node that gave the disk away, where the rest is in an image; nothing
    /// where all that is missing is in one place.
    pub fn at_source(&self) -> Option<&[u64]> {
        self.at_source.as_ref().map(DirtyBitmap::words)
    }

    /// Whether what is missing is in two places, or was.
    pub(super) const fn has_two_places(&self) -> bool {
        self.at_source.is_some()
    }

    /// Bytes that are missing and at the node that gave the disk away, where the rest is in an image.
    pub fn bytes_at_source(&self) -> Option<Bytes> {
        let bytes = self.left_at_source * u64::from(BLOCK_SECTORS) * SECTOR_SIZE;
        self.at_source.as_ref().map(|_| Bytes(bytes))
    }

    /// Whether some of what is missing is at the node that gave the disk away, where the rest is in an image.
    pub(super) const fn needs_source(&self) -> bool {
        self.left_at_source > 0
    }

    /// Whether some of these blocks was, or is, there.
    pub(super) fn was_at_source(&self, blocks: &DirtyBitmap) -> bool {
        let at_source = self.at_source().unwrap_or_default().iter();
        let both = at_source.zip(blocks.words());
        both.into_iter()
            .any(|(at_source, blocks)| at_source & blocks != 0)
    }

    fn count_at_source(&mut self) {
        let both = self
            .at_source()
            .unwrap_or_default()
            .iter()
            .zip(self.words());
        self.left_at_source = both
            .map(|(at_source, missing)| u64::from((at_source & missing).count_ones()))
            .sum();
    }

    /// The first part of an extent that is all in one place, and on which connection it is to be had.
    pub(super) fn place(&self, part: Extent) -> (Extent, TrafficClass) {
        let Some(at_source) = &self.at_source else {
            return (part, TrafficClass::Pull);
        };
        let run = at_source.next_run(part.start(), part.sectors());
        let (end, class) = match run {
            Some(run) if run.start() <= part.start() => (run.end(), TrafficClass::Pull),
            Some(run) => (run.start(), TrafficClass::Image),
            None => (part.end(), TrafficClass::Image),
        };
        let sectors = end.min(part.end()).0 - part.start().0;
        let first = Extent::new(part.start(), sectors as u32);
        (first.unwrap_or(part), class)
    }

    fn count_heat(&mut self) {
        self.of_heat = [0; HOTTEST as usize + 1];
        let mut head = Lba(0);
        while let Some(run) = self.blocks.next_run(head, MAX_EXTENT_SECTORS) {
            head = run.end();
            for (chunk, part) in chunks(run) {
                let heat = self.heat[chunk as usize];
                self.of_heat[usize::from(heat)] += self.blocks.count_in(part);
            }
        }
    }

    /// How many words [`Self::words`] has for a disk of this capacity.
    pub const fn word_length(capacity: Sectors) -> usize {
        capacity.0.div_ceil(BLOCK_SECTORS as u64).div_ceil(64) as usize
    }

    /// How many bytes [`Self::heat`] has for a disk of this capacity.
    pub const fn heat_length(capacity: Sectors) -> usize {
        capacity.0.div_ceil(CHUNK_SECTORS as u64) as usize
    }

    /// A bit for each block of 4 KiB that is missing, the first block's the lowest of the first word.
    pub fn words(&self) -> &[u64] {
        self.blocks.words()
    }

    /// How hot each chunk of 64 KiB is, 0 to 8.
    pub fn heat(&self) -> &[u8] {
        &self.heat
    }

    /// Bytes that are missing; a last block that the disk cuts short counts whole.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.blocks.sectors() * SECTOR_SIZE)
    }

    pub(super) const fn blocks(&self) -> &DirtyBitmap {
        &self.blocks
    }

    /// All that is missing was told.
    pub(in crate::controller) fn complete(&mut self) {
        self.count_heat();
        self.count_at_source();
    }

    /// These sectors are missing; [`Self::complete`] follows the last. False when the disk has no such sectors.
    pub(in crate::controller) fn add(
        &mut self,
        start: Lba,
        sectors: u32,
        heat: u8,
        at_source: bool,
    ) -> bool {
        let Some(end) = start.0.checked_add(u64::from(sectors)) else {
            return false;
        };
        if sectors == 0 || end > self.capacity.0 {
            return false;
        }
        self.blocks.set_range(start, Lba(end));
        if at_source {
            let capacity = self.capacity;
            self.at_source
                .get_or_insert_with(|| DirtyBitmap::new(capacity, BLOCK_SECTORS))
                .set_range(start, Lba(end));
        }
        let size = u64::from(CHUNK_SECTORS);
        let chunks = (start.0 / size) as usize..end.div_ceil(size) as usize;
        self.heat[chunks].fill(heat.min(HOTTEST));
        true
    }

    /// The blocks that the extent covers whole: they are here once it is written. Nothing when it covers none.
    pub(super) fn covered(&self, extent: Extent) -> Option<Extent> {
        let block = u64::from(BLOCK_SECTORS);
        let first = extent.start().0.next_multiple_of(block);
        let end = match extent.end().0 {
            end if end >= self.capacity.0 => self.capacity.0,
            end => end / block * block,
        };
        Extent::new(Lba(first), u32::try_from(end.checked_sub(first)?).ok()?)
    }

    /// Whether what is done there needs data that is missing: a read all of it, a write that of the blocks which it
    /// covers in part.
    #[inline]
    pub(super) fn is_needed(&self, extent: Extent, writes: bool) -> bool {
        if !self.blocks.touches(extent) {
            return false;
        }
        if !writes {
            return true;
        }
        let covered = self
            .covered(extent)
            .map_or(0, |part| self.blocks.count_in(part));
        covered < self.blocks.count_in(extent)
    }

    /// How many blocks of the extent are missing and at the node that gave the disk away.
    fn count_both(&self, extent: Extent) -> u64 {
        let Some(at_source) = self.at_source.as_ref().filter(|_| self.left_at_source > 0) else {
            return 0;
        };
        let block = u64::from(BLOCK_SECTORS);
        (extent.start().0 / block..extent.end().0.div_ceil(block))
            .filter_map(|number| Extent::new(Lba(number * block), 1))
            .filter(|sector| self.blocks.touches(*sector) && at_source.touches(*sector))
            .count() as u64
    }

    /// These blocks are here.
    pub(super) fn clear(&mut self, extent: Extent) {
        for (chunk, part) in chunks(extent) {
            let heat = self.heat[chunk as usize];
            self.of_heat[usize::from(heat)] -= self.blocks.count_in(part);
            self.left_at_source -= self.count_both(part);
            self.blocks.clear(part);
        }
    }

    /// The first part of the extent, at or behind `from`, that is missing, to the end of its chunk at most. It may begin before the
    /// extent, and end behind it: blocks are pulled whole.
    pub(super) fn part_for(&self, extent: Extent, from: Lba) -> Option<Extent> {
        let block = u64::from(BLOCK_SECTORS);
        // The disk's end may cut the last block short.
        let from = from.0.next_multiple_of(block);
        let from = from.max(extent.start().0 / block * block);
        let run = self.blocks.next_run(Lba(from), CHUNK_SECTORS)?;
        let (_, part) = chunks(run).next()?;
        (part.start() < extent.end()).then_some(part)
    }

    /// The first missing part at or behind `from` whose chunks are as hot as that, at most a pull long.
    pub(super) fn next_of(&self, heat: u8, from: Lba) -> Option<Extent> {
        if self.of_heat[usize::from(heat)] == 0 {
            return None;
        }
        let mut from = from;
        loop {
            let run = self.blocks.next_run(from, PULL_SECTORS)?;
            let as_hot = |chunk: u64| self.heat[chunk as usize] == heat;
            let end = chunks(run)
                .take_while(|(chunk, _)| as_hot(*chunk))
                .last()
                .map(|(_, part)| part.end());
            match end {
                Some(end) => {
                    return Extent::new(run.start(), (end.0 - run.start().0) as u32);
                }
                None => {
                    let chunk = run.start().0 / u64::from(CHUNK_SECTORS);
                    from = Lba((chunk + 1) * u64::from(CHUNK_SECTORS));
                }
            }
        }
    }
}

/// The heat of what was written most often.
pub(super) const HOTTEST: u8 = 8;
