//! The bodies' part for a disk handed over before the end of the copy: the connection on which the owner pulls the
//! rest, and the stored missing blocks.

use godwit_core::action::DiskOperation;
use godwit_core::authority::Ownership;
use godwit_core::units::{Extent, Sectors};
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{Controller, Missing, PIECE_WORDS, WordPiece};

use crate::disk::Data;
use crate::run::coverage::Reached;
use crate::world::MICROSECOND;
use crate::world::MILLISECOND;
use crate::world::Occurrence;
use crate::world::World;
use crate::world::name;

/// Length of the chunks for which writes are counted.
pub(in crate::world) const CHUNK_SECTORS: u64 = 128;

/// A node's stored knowledge of its disk's missing blocks.
#[derive(Clone, Debug)]
pub(in crate::world) struct StoredMissing {
    /// Missing blocks that outlast a process: arrivals are noted at once.
    noted: Vec<u64>,
    /// Missing blocks that outlast the host.
    durable: Vec<u64>,
    heat: Vec<u8>,
    /// Blocks held by the other node, if the rest is in an image.
    at_source: Option<Vec<u64>>,
}

impl StoredMissing {
    pub(in crate::world) fn new(words: Vec<u64>, heat: Vec<u8>) -> Self {
        Self {
            noted: words.clone(),
            durable: words,
            heat,
            at_source: None,
        }
    }

    /// Returns true if the sector, when missing, is at the other node and not in an image; `None` if all is in one
    /// place.
    pub(in crate::world) fn is_at_source(&self, sector: u64) -> Option<bool> {
        let block = sector / 8;
        let words = self.at_source.as_ref()?;
        Some(words[(block / 64) as usize] & 1 << (block % 64) != 0)
    }

    /// Returns true if nothing is missing, durably, of the other node's blocks, where the rest is in an image.
    pub(in crate::world) fn is_repaid(&self) -> bool {
        self.at_source.as_ref().is_some_and(|at_source| {
            let both = at_source.iter().zip(&self.durable);
            both.into_iter()
                .all(|(at_source, missing)| at_source & missing == 0)
        })
    }

    /// Returns true if the sector is missing by the state that outlasts a process.
    pub(in crate::world) fn is_noted(&self, sector: u64) -> bool {
        let block = sector / 8;
        self.noted[(block / 64) as usize] & 1 << (block % 64) != 0
    }

    /// Returns true if the sector is missing by the durable state.
    pub(in crate::world) fn lacks(&self, sector: u64) -> bool {
        let block = sector / 8;
        self.durable[(block / 64) as usize] & 1 << (block % 64) != 0
    }
}

/// An update on its way to stable storage.
#[derive(Clone, Debug)]
pub(in crate::world) struct StoringMissing {
    pieces: Vec<WordPiece>,
    heat: Vec<u8>,
    at_source: Option<Vec<u64>>,
    /// True if the disk comes here and nothing was stored before.
    first: bool,
}

impl World {
    /// Counts a write to a node's disk.
    pub(in crate::world) fn count_write(&mut self, node: usize, operation: DiskOperation) {
        let (DiskOperation::Write { extent, .. } | DiskOperation::WriteZeroes { extent, .. }) =
            operation
        else {
            return;
        };
        if node == self.source && self.nodes[node].outgoing {
            let chunks = extent.start().0 / CHUNK_SECTORS..extent.end().0.div_ceil(CHUNK_SECTORS);
            for count in &mut self.write_counts[chunks.start as usize..chunks.end as usize] {
                *count = count.saturating_add(1);
            }
        }
    }

    /// Checks the write counts in a source's message.
    pub(in crate::world) fn check_counts(&mut self, message: &Message) {
        let Message::Lacks {
            start,
            sectors,
            heat,
            at_source,
        } = *message
        else {
            return;
        };
        if self.on_image && !at_source {
            // For blocks in the image the heat is the order of fetching.
            return;
        }
        let end = start.0 + u64::from(sectors);
        for chunk in start.0 / CHUNK_SECTORS..end.div_ceil(CHUNK_SECTORS) {
            let count = self.write_counts[chunk as usize];
            if u32::from(heat) != u8::BITS - count.leading_zeros() {
                return self.fail("the destination learns how often the guest wrote", || {
                    format!("chunk {chunk}: {count} writes, told as {heat}")
                });
            }
        }
    }

    /// Stores the disk's missing blocks.
    pub(in crate::world) fn store_missing(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        let stored = it.controller.as_ref().and_then(|c| {
            let missing = c.missing()?;
            let pieces = c.missing_to_store()?;
            Some((pieces, missing.heat().to_vec(), missing.at_source()))
        });
        let Some((pieces, heat, at_source)) = stored else {
            return self.fail(
                "what a disk lacks is stored while it lacks something",
                || name(node).to_string(),
            );
        };
        let first = !it.serves();
        it.storing_missing = Some(StoringMissing {
            pieces,
            heat,
            at_source,
            first,
        });
        let incarnation = it.incarnation;
        let delay = self
            .store_random
            .between(20 * MICROSECOND, self.plan.store + 20 * MICROSECOND + 1);
        self.schedule(delay, Occurrence::MissingStored { node, incarnation });
    }

    /// Completes the store of the missing blocks.
    pub(in crate::world) fn missing_stored(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        if let Some(storing) = it.storing_missing.take() {
            keep(&mut it.missing, storing, Sectors(self.plan.sectors));
            self.reached(Reached::MissingStored);
            self.with(node, |controller, now| {
                controller.handle_missing_stored(now)
            });
        }
    }

    /// Notes the arrival of a missing extent.
    pub(in crate::world) fn note_here(&mut self, node: usize, extent: Extent) {
        let Some(missing) = &mut self.nodes[node].missing else {
            return self.fail("what comes to a disk was stored as missing", || {
                format!("{} {extent}", name(node))
            });
        };
        for block in extent.start().0 / 8..extent.end().0.div_ceil(8) {
            missing.noted[(block / 64) as usize] &= !(1 << (block % 64));
        }
    }

    /// Applies a crash or a power loss to the stored missing blocks.
    pub(in crate::world) fn interrupt_missing(&mut self, node: usize, power: bool) {
        let it = &mut self.nodes[node];
        if let Some(mut storing) = it.storing_missing.take() {
            let kept = self.fault_random.below(3);
            if let (Some(before), false) = (&it.missing, storing.first)
                && kept == 1
            {
                // Some words were written and others not.
                for (number, piece) in &mut storing.pieces {
                    let before = before.durable.iter().skip(*number * PIECE_WORDS);
                    for (word, before) in piece.iter_mut().zip(before) {
                        if self.fault_random.below(2) == 0 {
                            *word = *before;
                        }
                    }
                }
            }
            if kept > 0 {
                keep(&mut it.missing, storing, Sectors(self.plan.sectors));
            }
        }
        if let Some(missing) = it.missing.as_mut().filter(|_| power) {
            missing.noted = missing.durable.clone();
        }
    }

    /// Gives a starting process the stored missing blocks of its disk.
    pub(in crate::world) fn restore_missing(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        let expected = it.record.remainder.is_some()
            && matches!(
                it.record.ownership,
                Ownership::Serving | Ownership::Accepted { .. }
            );
        if it.record.owes().is_some()
            && self.plan.image.is_some()
            && let Some(controller) = &mut it.controller
        {
            // The disk may have left without the unfetched blocks.
            controller.is_no_base();
        }
        if !expected {
            it.missing = None;
            return;
        }
        let capacity = Sectors(self.plan.sectors);
        let stored = it.missing.as_ref().and_then(|stored| {
            let missing = Missing::from_parts(capacity, &stored.noted, &stored.heat)?;
            match &stored.at_source {
                Some(at_source) => missing.in_two_places(at_source),
                None => Some(missing),
            }
        });
        if let (Some(missing), Some(controller)) = (stored, &mut it.controller) {
            controller.restore_missing(missing);
            self.reached(Reached::MissingRestored);
        } else if it.record.ownership == Ownership::Serving {
            self.fail("a node that serves knows what its disk lacks", || {
                name(node).to_string()
            });
        }
    }

    /// Connects a node that owes data to the owner, unless connected.
    pub(in crate::world) fn connect_pull(&mut self, node: usize) {
        let it = &self.nodes[node];
        let owes = it
            .controller
            .as_ref()
            .is_some_and(|controller| controller.record().owes().is_some());
        if !owes || it.pull.is_some() || !self.nodes[1 - node].is_up() {
            return;
        }
        self.reached(Reached::PullConnected);
        let apart = |it: &Controller| it.lacks_in_two_places();
        if self.nodes[1 - node].controller.as_ref().is_some_and(apart) {
            self.reached(Reached::TwoPlaces);
        }
        if let Some(old) = self.nodes[1 - node].pull {
            self.cut(old, MICROSECOND + 1);
            self.notice_loss(old, 1 - node);
        }
        let session = self.network.open();
        for each in [node, 1 - node] {
            self.nodes[each].pull = Some(session);
        }
        for each in [node, 1 - node] {
            self.with(each, |controller, now| {
                controller.handle_pull_up(now, each == node);
                controller.show_life();
            });
        }
    }

    pub(in crate::world) fn lose_pull(&mut self, session: usize, node: usize) {
        if self.nodes[node].pull == Some(session) {
            self.nodes[node].pull = None;
            self.with(node, |controller, now| controller.handle_pull_lost(now));
            let delay = self
                .link_random
                .magnitude(20 * MICROSECOND, 40 * MILLISECOND);
            self.schedule(delay, Occurrence::ConnectPull(node));
        }
    }

    /// Delivers a frame of the connection on which an owner pulls.
    pub(in crate::world) fn deliver_pull(
        &mut self,
        session: usize,
        to: usize,
        message: Message,
        data: Data,
    ) {
        let it = &mut self.nodes[to];
        if it.pull != Some(session) {
            return;
        }
        let Message::Pulled { slot, .. } = message else {
            self.with(to, |controller, now| {
                controller.handle_message(now, TrafficClass::Pull, message, None)
            });
            return;
        };
        it.pull_buffers[usize::from(slot.0)] = data;
        let expected = self.with(to, |controller, now| {
            controller.handle_pulled(now, TrafficClass::Pull, message)
        });
        if expected == Some(false) {
            self.fail("what arrives was pulled", || {
                format!("{message:?} at {}", name(to))
            });
        }
    }
}

fn keep(missing: &mut Option<StoredMissing>, storing: StoringMissing, capacity: Sectors) {
    let StoringMissing {
        pieces,
        heat,
        at_source,
        first,
    } = storing;
    let mut words = match missing {
        Some(missing) if !first => missing.durable.clone(),
        _ => vec![0; Missing::word_length(capacity)],
    };
    for (number, piece) in pieces {
        let words = words.iter_mut().skip(number * PIECE_WORDS);
        words.zip(piece).for_each(|(word, new)| *word = new);
    }
    match missing {
        Some(missing) if !first => missing.durable = words,
        _ => {
            *missing = Some(StoredMissing {
                at_source,
                ..StoredMissing::new(words, heat)
            });
        }
    }
}
