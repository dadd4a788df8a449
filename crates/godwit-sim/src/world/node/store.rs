//! The state of a node that outlasts its process, and updates on their way to stable storage.

use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{Extent, MigrationId, Sectors};
use godwit_core::{ActiveAreas, Controller, Missing, PIECE_WORDS, WordPiece, Written};

use crate::random::Random;
use crate::world::MICROSECOND;

/// Sectors of a block, which a disk has completely or not at all.
pub(crate) const BLOCK: u64 = 8;

/// Returns true if the set of blocks, a bit for each, has the block of a sector.
pub(crate) fn has(blocks: &[u64], sector: u64) -> bool {
    let block = sector / BLOCK;
    blocks[(block / 64) as usize] & 1 << (block % 64) != 0
}

pub(crate) fn insert(blocks: &mut [u64], sector: u64) {
    let block = sector / BLOCK;
    blocks[(block / 64) as usize] |= 1 << (block % 64);
}

/// A node's stored knowledge of its disk's missing blocks.
#[derive(Clone, Debug)]
pub(crate) struct StoredMissing {
    /// Missing blocks that outlast a process: arrivals are noted at once.
    noted: Vec<u64>,
    /// Missing blocks that outlast the host.
    durable: Vec<u64>,
    heat: Vec<u8>,
    /// Blocks held by the other node, if the rest is in an image.
    at_source: Option<Vec<u64>>,
}

impl StoredMissing {
    pub(crate) fn new(words: Vec<u64>, heat: Vec<u8>) -> Self {
        Self {
            noted: words.clone(),
            durable: words,
            heat,
            at_source: None,
        }
    }

    /// Returns true if the sector, when missing, is at the other node and not in an image; `None` if all is in one
    /// place.
    pub(crate) fn is_at_source(&self, sector: u64) -> Option<bool> {
        Some(has(self.at_source.as_ref()?, sector))
    }

    /// Returns true if nothing is missing, durably, of the other node's blocks, where the rest is in an image.
    pub(crate) fn is_repaid(&self) -> bool {
        self.at_source.as_ref().is_some_and(|at_source| {
            let mut both = at_source.iter().zip(&self.durable);
            both.all(|(at_source, missing)| at_source & missing == 0)
        })
    }

    /// Returns true if the sector is missing by the state that outlasts a process.
    pub(crate) fn is_noted(&self, sector: u64) -> bool {
        has(&self.noted, sector)
    }

    /// Returns true if the sector is missing by the durable state.
    pub(crate) fn lacks(&self, sector: u64) -> bool {
        has(&self.durable, sector)
    }

    /// Notes the arrival of a missing extent.
    pub(crate) fn note_here(&mut self, extent: Extent) {
        for block in extent.start().0 / BLOCK..extent.end().0.div_ceil(BLOCK) {
            self.noted[(block / 64) as usize] &= !(1 << (block % 64));
        }
    }

    fn restore(&self, capacity: Sectors) -> Option<Missing> {
        let missing = Missing::from_parts(capacity, &self.noted, &self.heat)?;
        match &self.at_source {
            Some(at_source) => missing.in_two_places(at_source),
            None => Some(missing),
        }
    }
}

/// An update of the missing blocks.
#[derive(Clone, Debug)]
pub(crate) struct StoringMissing {
    pieces: Vec<WordPiece>,
    heat: Vec<u8>,
    at_source: Option<Vec<u64>>,
    /// True if the disk comes here and nothing was stored before.
    first: bool,
}

impl StoringMissing {
    /// Returns the update that a controller asks for.
    pub(crate) fn of(controller: &Controller) -> Option<Self> {
        let missing = controller.missing()?;
        let (heat, at_source) = (missing.heat().to_vec(), missing.at_source());
        Some(Self {
            pieces: controller.missing_to_store()?,
            heat,
            at_source,
            first: !controller.serves(),
        })
    }
}

/// The writes since the disk came, stored by an owner's process when ending.
#[derive(Clone, Debug)]
struct StoredWritten {
    since: MigrationId,
    words: Vec<u64>,
}

/// What a node has stored, and is storing.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) record: AuthorityRecord,
    /// Record with which the node has served, possibly before the next one is stored.
    pub(crate) served_on: Option<AuthorityRecord>,
    pub(crate) storing: Option<AuthorityRecord>,
    /// True if more than one party may have written: the stored value, and the value being stored.
    pub(crate) shared: bool,
    pub(crate) storing_shared: Option<bool>,
    /// The disk's missing blocks: the stored map, and the update being stored.
    pub(crate) missing: Option<StoredMissing>,
    pub(crate) storing_missing: Option<StoringMissing>,
    /// Migration by which the disk left, while the image durably equals the disk of that moment.
    pub(crate) base: Option<MigrationId>,
    written: Option<StoredWritten>,
    /// The activity log of a disk that is followed, and the update being stored.
    pub(crate) activity: Option<ActiveAreas>,
    pub(crate) storing_activity: Option<Option<ActiveAreas>>,
    /// Longest time for a record to become durable.
    latency: u64,
    /// Additional latency of a slow store, and the time until which it applies.
    pub(crate) slow: (u64, u64),
}

impl Store {
    pub(crate) fn new(record: AuthorityRecord, latency: u64) -> Self {
        Self {
            record,
            served_on: None,
            storing: None,
            shared: false,
            storing_shared: None,
            missing: None,
            storing_missing: None,
            base: None,
            written: None,
            activity: None,
            storing_activity: None,
            latency,
            slow: (0, 0),
        }
    }

    /// Returns true while the end of a migration is not stored.
    pub(crate) fn is_undecided(&self) -> bool {
        matches!(
            self.record.ownership,
            Ownership::Accepted { .. } | Ownership::Relinquished { .. }
        )
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.storing.is_none() && self.storing_missing.is_none() && self.storing_activity.is_none()
    }

    /// Returns the time until a record is durable.
    pub(crate) fn record_latency(&self, now: u64, random: &mut Random) -> u64 {
        let (more, until) = self.slow;
        let more = if now < until { more } else { 0 };
        random.between(20 * MICROSECOND, self.latency + more)
    }

    /// Returns the time until anything but a record is durable.
    pub(crate) fn latency(&self, random: &mut Random) -> u64 {
        random.between(20 * MICROSECOND, self.latency + 20 * MICROSECOND + 1)
    }

    /// Completes the store of the missing blocks. Returns false if none was under way.
    pub(crate) fn missing_stored(&mut self, capacity: Sectors) -> bool {
        let Some(storing) = self.storing_missing.take() else {
            return false;
        };
        self.keep(storing, capacity);
        true
    }

    fn keep(&mut self, storing: StoringMissing, capacity: Sectors) {
        let before = self.missing.as_mut().filter(|_| !storing.first);
        let mut words = match &before {
            Some(before) => before.durable.clone(),
            None => vec![0; Missing::word_length(capacity)],
        };
        for (number, piece) in storing.pieces {
            let words = words.iter_mut().skip(number * PIECE_WORDS);
            words.zip(piece).for_each(|(word, new)| *word = new);
        }
        if let Some(before) = before {
            before.durable = words;
            return;
        }
        self.missing = Some(StoredMissing {
            at_source: storing.at_source,
            ..StoredMissing::new(words, storing.heat)
        });
    }

    /// Applies a crash to what is being stored, except for missing blocks. Returns whether a record was kept, if one was
    /// on its way.
    pub(crate) fn interrupt(&mut self, random: &mut Random) -> Option<bool> {
        if let Some(log) = self.storing_activity.take()
            && random.below(2) == 0
        {
            self.activity = log;
        }
        let sharing = self.storing_shared.take();
        if random.below(2) == 0 {
            self.shared = sharing.unwrap_or(self.shared);
        }
        let record = self.storing.take()?;
        let kept = random.below(2) == 0;
        if kept {
            self.record = record;
            self.shared = sharing.unwrap_or(self.shared);
        }
        Some(kept)
    }

    /// Applies a crash or a power loss to the missing blocks.
    pub(crate) fn interrupt_missing(
        &mut self,
        power: bool,
        capacity: Sectors,
        random: &mut Random,
    ) {
        if let Some(mut storing) = self.storing_missing.take() {
            let kept = random.below(3);
            if let (Some(before), false) = (&self.missing, storing.first)
                && kept == 1
            {
                // Some words were written and others not.
                for (number, piece) in &mut storing.pieces {
                    let before = before.durable.iter().skip(*number * PIECE_WORDS);
                    for (word, before) in piece.iter_mut().zip(before) {
                        if random.below(2) == 0 {
                            *word = *before;
                        }
                    }
                }
            }
            if kept > 0 {
                self.keep(storing, capacity);
            }
        }
        if let Some(missing) = self.missing.as_mut().filter(|_| power) {
            missing.noted = missing.durable.clone();
        }
    }

    /// Returns the missing blocks for a starting process; forgets those of a disk that has left.
    pub(crate) fn restore_missing(&mut self, capacity: Sectors) -> Option<Missing> {
        let lacks = self.record.remainder.is_some()
            && matches!(
                self.record.ownership,
                Ownership::Serving | Ownership::Accepted { .. }
            );
        if !lacks {
            self.missing = None;
        }
        self.missing.as_ref()?.restore(capacity)
    }

    /// Stores the writes since the disk came, as known to a process that ends in order.
    pub(crate) fn store_written(&mut self, written: Option<&Written>) {
        self.written = written.map(|written| StoredWritten {
            since: written.since(),
            words: written.words().collect(),
        });
    }

    /// Removes the stored writes, for a starting process.
    pub(crate) fn take_written(&mut self, capacity: Sectors) -> Option<Written> {
        let stored = self.written.take()?;
        Written::from_words(stored.since, capacity, &stored.words)
    }
}
