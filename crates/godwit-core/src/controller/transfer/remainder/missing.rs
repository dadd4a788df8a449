//! The missing blocks of a disk, and their priorities.

use crate::action::PULL_SECTORS;
use crate::controller::block_set::{BlockSet, GROUP_WORDS};
use crate::controller::transfer::heat::{BLOCK_SECTORS, CHUNK_SECTORS, chunks};
use crate::units::{Bytes, Extent, Lba, SECTOR_SIZE, Sectors};
use crate::wire::TrafficClass;

/// Words of a stored piece: 16 MiB of the disk.
pub const PIECE_WORDS: usize = GROUP_WORDS;

/// Sectors of a stored piece.
pub(super) const PIECE_SECTORS: u32 = PIECE_WORDS as u32 * 64 * BLOCK_SECTORS;

/// Bytes of a piece of chunk heats: 32 MiB of the disk.
pub const PIECE_HEATS: usize = 512;

/// A part of a bitmap with a bit for each block of 4 KiB: its number, and its words.
pub type WordPiece = (usize, [u64; PIECE_WORDS]);

/// A part of the chunk heats: its number, and a byte for each chunk of 64 KiB.
pub type HeatPiece = (usize, [u8; PIECE_HEATS]);

/// The 4 KiB blocks that a disk lacks, and the known heat of each chunk of 64 KiB.
#[derive(Debug)]
pub struct Missing {
    capacity: Sectors,
    blocks: BlockSet,
    heat: Box<[u8]>,
    /// Chunks that are not cold and lack a block.
    hot: BlockSet,
    /// Number of missing blocks of each heat.
    of_heat: [u64; HOTTEST as usize + 1],
    /// Blocks at the node that gave the disk away, if the rest is in an image; `None` if all blocks are in one place.
    /// Bits of arrived blocks stay set.
    at_source: Option<BlockSet>,
    /// Number of missing blocks in `at_source`.
    left_at_source: u64,
    /// Pieces whose stored form is out of date; `None` if unknown.
    unstored: Option<Vec<usize>>,
}

impl Missing {
    pub(in crate::controller) fn new(capacity: Sectors) -> Self {
        Self {
            capacity,
            blocks: BlockSet::new(capacity, BLOCK_SECTORS),
            heat: vec![0; Self::heat_length(capacity)].into_boxed_slice(),
            hot: BlockSet::new(capacity, CHUNK_SECTORS),
            of_heat: [0; HOTTEST as usize + 1],
            at_source: None,
            left_at_source: 0,
            unstored: None,
        }
    }

    /// Restores the stored [`Self::words`] and [`Self::heat`]. Returns `None` if their lengths do not match the
    /// capacity.
    pub fn from_parts(capacity: Sectors, words: &[u64], heat: &[u8]) -> Option<Self> {
        let fits =
            words.len() == Self::word_length(capacity) && heat.len() == Self::heat_length(capacity);
        if !fits {
            return None;
        }
        let mut missing = Self::new(capacity);
        missing.blocks = BlockSet::from_words(capacity, BLOCK_SECTORS, words);
        missing.restore_heat(0, heat);
        missing.complete();
        Some(missing)
    }

    /// Restores the stored [`Self::pieces`] and [`Self::heat_pieces`]. Pieces left out lack nothing and are cold.
    /// Returns `None` if a piece's number does not fit the capacity.
    pub fn from_pieces(
        capacity: Sectors,
        words: impl IntoIterator<Item = WordPiece>,
        heat: impl IntoIterator<Item = HeatPiece>,
    ) -> Option<Self> {
        let mut missing = Self::new(capacity);
        for (number, words) in words {
            if number >= missing.blocks.group_count() {
                return None;
            }
            missing.blocks.put_group(number, &words);
        }
        for (number, heat) in heat {
            let first = number.checked_mul(PIECE_HEATS)?;
            let length = missing.heat.len().checked_sub(first)?.min(PIECE_HEATS);
            missing.restore_heat(first, &heat[..length]);
        }
        missing.complete();
        Some(missing)
    }

    /// Marks the pieces whose stored form is out of date; all other pieces are stored durably.
    #[must_use]
    pub fn stored_but_for(mut self, pieces: Vec<usize>) -> Self {
        self.unstored = Some(pieces);
        self
    }

    /// Returns a bit for each piece whose stored form is or may be out of date.
    pub(super) fn unstored(&self) -> BlockSet {
        let mut unstored = BlockSet::new(self.capacity, PIECE_SECTORS);
        match &self.unstored {
            None => unstored.fill(),
            Some(pieces) => pieces.iter().for_each(|piece| unstored.set_number(*piece)),
        }
        unstored
    }

    fn restore_heat(&mut self, first: usize, heat: &[u8]) {
        for (chunk, heat) in (first..).zip(heat).filter(|(_, heat)| **heat > 0) {
            self.heat[chunk] = (*heat).min(HOTTEST);
            let start = chunk as u64 * u64::from(CHUNK_SECTORS);
            self.hot
                .set_range(Lba(start), Lba(start + u64::from(CHUNK_SECTORS)));
        }
    }

    /// Adds the stored [`Self::at_source`] of a disk that lacks blocks in two places. Returns `None` if the length does
    /// not match the disk.
    #[must_use]
    pub fn in_two_places(mut self, at_source: &[u64]) -> Option<Self> {
        let fits = at_source.len() == Self::word_length(self.capacity);
        self.at_source =
            fits.then(|| BlockSet::from_words(self.capacity, BLOCK_SECTORS, at_source));
        self.count_at_source();
        fits.then_some(self)
    }

    /// Like [`Self::in_two_places`], with the stored pieces ([`Self::pieces_at_source`]).
    #[must_use]
    pub fn in_two_places_by_pieces(
        mut self,
        pieces: impl IntoIterator<Item = WordPiece>,
    ) -> Option<Self> {
        let mut at_source = self.blocks.like();
        for (number, words) in pieces {
            if number >= at_source.group_count() {
                return None;
            }
            at_source.put_group(number, &words);
        }
        self.at_source = Some(at_source);
        self.count_at_source();
        Some(self)
    }

    /// Returns a bit for each block that is or was at the node that gave the disk away, if the rest is in an image;
    /// `None` if all missing blocks are in one place.
    pub fn at_source(&self) -> Option<Vec<u64>> {
        Some(self.at_source.as_ref()?.words().collect())
    }

    /// Returns the same bits in pieces, without empty pieces.
    pub fn pieces_at_source(&self) -> Option<Vec<WordPiece>> {
        let at_source = self.at_source.as_ref()?;
        let pieces = at_source.groups();
        Some(pieces.map(|at| (at, at_source.group(at))).collect())
    }

    /// Returns true if the missing blocks are or were in two places.
    pub(super) const fn has_two_places(&self) -> bool {
        self.at_source.is_some()
    }

    /// Returns the missing bytes at the node that gave the disk away, if the rest is in an image.
    pub fn bytes_at_source(&self) -> Option<Bytes> {
        let bytes = self.left_at_source * u64::from(BLOCK_SECTORS) * SECTOR_SIZE;
        self.at_source.as_ref().map(|_| Bytes(bytes))
    }

    /// Returns true if a missing block is at the node that gave the disk away, and the rest is in an image.
    pub(super) const fn needs_source(&self) -> bool {
        self.left_at_source > 0
    }

    /// Returns true if some of these blocks are or were at the node that gave the disk away.
    pub(super) fn was_at_source(&self, blocks: &BlockSet) -> bool {
        let at_source = self.at_source.as_ref();
        at_source.is_some_and(|at_source| at_source.count_common(blocks) > 0)
    }

    fn count_at_source(&mut self) {
        let at_source = self.at_source.as_ref();
        self.left_at_source = at_source.map_or(0, |it| it.count_common(&self.blocks));
    }

    /// Returns the first part of an extent that is in one place, and the class of the connection to this place.
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
        for chunk in self.hot.runs(Lba(0), CHUNK_SECTORS) {
            let number = chunk.start().0 / u64::from(CHUNK_SECTORS);
            let heat = self.heat[number as usize];
            self.of_heat[usize::from(heat)] += self.blocks.count_in(chunk);
        }
        self.of_heat[0] = self.blocks.count() - self.of_heat.iter().sum::<u64>();
    }

    /// Returns the number of [`Self::words`] for a disk of this capacity.
    pub const fn word_length(capacity: Sectors) -> usize {
        capacity.0.div_ceil(BLOCK_SECTORS as u64).div_ceil(64) as usize
    }

    /// Returns the bytes of [`Self::heat`] for a disk of this capacity.
    pub const fn heat_length(capacity: Sectors) -> usize {
        capacity.0.div_ceil(CHUNK_SECTORS as u64) as usize
    }

    /// Returns a bit for each missing block of 4 KiB; the first block is the lowest bit of the first word.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        self.blocks.words()
    }

    /// Returns the pieces of these words with a missing block.
    pub fn pieces(&self) -> impl Iterator<Item = WordPiece> {
        let pieces = self.blocks.groups();
        pieces.map(|number| (number, self.blocks.group(number)))
    }

    pub(super) fn piece(&self, number: usize) -> [u64; PIECE_WORDS] {
        self.blocks.group(number)
    }

    /// Returns a word of [`Self::words`]; 0 beyond the last.
    pub fn word(&self, number: usize) -> u64 {
        self.blocks.word(number)
    }

    /// Returns the heat of each chunk of 64 KiB, 0 to 8.
    pub fn heat(&self) -> &[u8] {
        &self.heat
    }

    /// Returns the pieces of the heats with a chunk that lacks a block and is not cold.
    pub fn heat_pieces(&self) -> Vec<HeatPiece> {
        let mut pieces: Vec<HeatPiece> = Vec::new();
        let mut head = Lba(0);
        let piece_sectors = PIECE_HEATS as u64 * u64::from(CHUNK_SECTORS);
        while let Some((start, _)) = self.hot.next_blocks(head, u64::from(CHUNK_SECTORS)) {
            let number = (start.0 / piece_sectors) as usize;
            let heat = self
                .heat
                .chunks(PIECE_HEATS)
                .nth(number)
                .unwrap_or_default();
            let mut piece = [0; PIECE_HEATS];
            piece[..heat.len()].copy_from_slice(heat);
            pieces.push((number, piece));
            head = Lba((number as u64 + 1) * piece_sectors);
        }
        pieces
    }

    /// Returns the missing bytes; a last block that the disk cuts short counts whole.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.blocks.sectors() * SECTOR_SIZE)
    }

    pub(super) const fn blocks(&self) -> &BlockSet {
        &self.blocks
    }

    /// Completes the list: all missing blocks have been announced.
    pub(in crate::controller) fn complete(&mut self) {
        self.count_heat();
        self.count_at_source();
    }

    /// Adds missing sectors; [`Self::complete`] follows the last call. Returns false if the disk has no such sectors.
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
                .get_or_insert_with(|| BlockSet::new(capacity, BLOCK_SECTORS))
                .set_range(start, Lba(end));
        }
        let size = u64::from(CHUNK_SECTORS);
        let (first, end) = (start.0 / size * size, end.next_multiple_of(size));
        if heat > 0 {
            self.heat[(first / size) as usize..(end / size) as usize].fill(heat.min(HOTTEST));
            self.hot.set_range(Lba(first), Lba(end));
            return true;
        }
        let hot = self.hot.runs(Lba(first), CHUNK_SECTORS);
        for chunk in hot.take_while(|chunk| chunk.start().0 < end) {
            self.heat[(chunk.start().0 / size) as usize] = 0;
        }
        self.hot.clear_range(Lba(first), Lba(end));
        true
    }

    /// Returns the blocks that the extent covers whole, which are here once the extent is written; `None` if there are
    /// none.
    pub(super) fn covered(&self, extent: Extent) -> Option<Extent> {
        let block = u64::from(BLOCK_SECTORS);
        let first = extent.start().0.next_multiple_of(block);
        let end = match extent.end().0 {
            end if end >= self.capacity.0 => self.capacity.0,
            end => end / block * block,
        };
        Extent::new(Lba(first), u32::try_from(end.checked_sub(first)?).ok()?)
    }

    /// Returns true if a request on the extent needs missing blocks: a read all blocks, a write the blocks it covers in
    /// part.
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

    /// Notes that these blocks are here.
    pub(super) fn clear(&mut self, extent: Extent) {
        for (chunk, part) in chunks(extent) {
            let heat = self.heat[chunk as usize];
            self.of_heat[usize::from(heat)] -= self.blocks.count_in(part);
            if let Some(at_source) = &self.at_source {
                self.left_at_source -= at_source.count_both(&self.blocks, part);
            }
            self.blocks.clear(part);
            let start = chunk * u64::from(CHUNK_SECTORS);
            let whole = Extent::new(Lba(start), CHUNK_SECTORS);
            if heat > 0 && whole.is_some_and(|whole| !self.blocks.touches(whole)) {
                self.hot
                    .clear_range(Lba(start), Lba(start + u64::from(CHUNK_SECTORS)));
            }
        }
    }

    /// Returns the first missing part of the extent at or behind `from`, up to the end of its chunk. The part may begin
    /// before the extent and end behind the extent: blocks are pulled whole.
    pub(super) fn part_for(&self, extent: Extent, from: Lba) -> Option<Extent> {
        let block = u64::from(BLOCK_SECTORS);
        // The disk's end may cut the last block short.
        let from = from.0.next_multiple_of(block);
        let from = from.max(extent.start().0 / block * block);
        let run = self.blocks.next_run(Lba(from), CHUNK_SECTORS)?;
        let (_, part) = chunks(run).next()?;
        (part.start() < extent.end()).then_some(part)
    }

    /// Returns the first missing part at or behind `from` whose chunks have this heat, up to the length of a pull.
    pub(super) fn next_of(&self, heat: u8, from: Lba) -> Option<Extent> {
        if self.of_heat[usize::from(heat)] == 0 {
            return None;
        }
        let mut from = from;
        loop {
            // Cold chunks lie between the others.
            let run = match heat {
                0 => self.next_cold(from)?,
                _ => self.next_in_hot(from)?,
            };
            let as_hot = |chunk: u64| self.heat[chunk as usize] == heat;
            let end = chunks(run)
                .take_while(|(chunk, _)| heat == 0 || as_hot(*chunk))
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

    /// Returns the first missing blocks at or behind `from` in cold chunks.
    fn next_cold(&self, from: Lba) -> Option<Extent> {
        let size = u64::from(CHUNK_SECTORS);
        let mut from = from;
        loop {
            let run = self.blocks.next_run(from, PULL_SECTORS)?;
            let first = Lba(run.start().0 / size * size);
            match self.hot.next_blocks(first, u64::MAX) {
                Some((hot, end)) if hot == first => from = end,
                Some((hot, _)) if hot < run.end() => {
                    return Extent::new(run.start(), (hot.0 - run.start().0) as u32);
                }
                _ => return Some(run),
            }
        }
    }

    /// Returns the first missing blocks at or behind `from` in chunks that are not cold.
    fn next_in_hot(&self, from: Lba) -> Option<Extent> {
        let size = u64::from(CHUNK_SECTORS);
        let mut from = from;
        loop {
            let first = Lba(from.0 / size * size);
            let (hot, end) = self.hot.next_blocks(first, u64::MAX)?;
            let run = self.blocks.next_run(from.max(hot), PULL_SECTORS)?;
            if run.start() < end {
                let sectors = run.end().min(end).0 - run.start().0;
                return Extent::new(run.start(), sectors as u32);
            }
            from = end;
        }
    }
}

/// Heat of the chunks written most often.
pub(super) const HOTTEST: u8 = 8;
