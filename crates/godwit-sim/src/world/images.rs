//! The bodies' part for a disk created from an image: delivery of unfetched blocks, and comparison of the disk with the
//! image before a move without the image.

use godwit_core::action::PullSlot;
use godwit_core::request::RequestError;
use godwit_core::units::{Extent, MigrationId, Sectors};
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{ImageOffer, MigrationOptions, Missing, OlderCopy};

use crate::disk::sectors;
use crate::history::{IMAGE, Value};
use crate::plan::MigrationPlan;
use crate::run::coverage::Reached;
use crate::world::MICROSECOND;
use crate::world::MILLISECOND;
use crate::world::Occurrence;
use crate::world::World;
use crate::world::name;

/// Stands for a migration in the record of the node at which the disk was created.
pub(super) const CREATED: MigrationId = MigrationId([0xEE; 16]);

/// Sectors of a block, which a disk has completely or not at all.
const BLOCK: u64 = 8;

/// A node's knowledge of its disk's image.
#[derive(Clone, Debug, Default)]
pub(super) struct OnImage {
    /// Durable remainder of the record while part of the image is missing here.
    fetch: Option<MigrationId>,
    /// True while the engine is connected to the image; `connections` counts the connections.
    connected: bool,
    connections: u32,
    /// True if the image's connection exists beside a pull from another node.
    apart: bool,
    /// Comparison in progress: the missing blocks and the disk's content at its start.
    begun: Option<(Vec<u64>, Vec<Value>)>,
    /// True once the disk was compared and may leave.
    compared: bool,
}

impl OnImage {
    /// Returns the traffic class of the image's connection.
    const fn class(&self) -> TrafficClass {
        match self.apart {
            true => TrafficClass::Image,
            false => TrafficClass::Pull,
        }
    }

    /// Clears the state of an ended process.
    pub(super) fn clear(&mut self) {
        self.connected = false;
        self.begun = None;
        self.compared = false;
    }
}

/// Returns the image's content of a sector: two of each eight blocks are holes.
fn content(sector: u64) -> Value {
    match sector / BLOCK % 8 {
        2 | 5 => 0,
        _ => IMAGE + sector as Value,
    }
}

impl World {
    /// Puts the disk on an image: all of the image's data is missing at first.
    pub(super) fn create_from_image(&mut self) {
        let capacity = Sectors(self.plan.sectors);
        let mut words = vec![0; Missing::word_length(capacity)];
        for sector in (0..capacity.0).filter(|sector| content(*sector) != 0) {
            let block = sector / BLOCK;
            words[(block / 64) as usize] |= 1 << (block % 64);
            self.history.holds_at_first(sector, content(sector));
        }
        let heat = vec![0; Missing::heat_length(capacity)];
        let it = &mut self.nodes[0];
        it.record.remainder = Some(CREATED);
        it.image.fetch = Some(CREATED);
        it.store_missing_of_new_disk(words, heat);
    }

    /// Returns true if the node fetches from the image now.
    fn fetches(&self, node: usize) -> bool {
        let it = &self.nodes[node];
        it.image.fetch.is_some() && it.record.lacks() == it.image.fetch
    }

    /// Returns a sector as read by a guest: from the node's disk, or from the other node or the image where the disk
    /// lacks the block.
    pub(super) fn as_guests_see_it(&self, node: usize, sector: u64) -> Value {
        let it = &self.nodes[node];
        // A migration's missing blocks may be stored after the migration was given up; they do not count then.
        let lacks = it.record.remainder.is_some();
        match it.missing.as_ref().filter(|_| lacks) {
            Some(missing)
                if missing.is_noted(sector) && missing.is_at_source(sector) == Some(true) =>
            {
                self.nodes[1 - node].disk.current[sector as usize]
            }
            Some(missing) if missing.is_noted(sector) => content(sector),
            _ => it.disk.current[sector as usize],
        }
    }

    /// Returns true if the next migration from this node leaves the image behind.
    pub(super) fn leaves_image(&self, source: usize, planned: &MigrationPlan) -> bool {
        let Some(plan) = &self.plan.image else {
            return false;
        };
        let lacks = self.nodes[source].record.lacks().is_some();
        self.fetches(source) || !lacks && plan.leaves(planned.options.migration)
    }

    /// Returns the options of a migration without the image.
    pub(super) fn options_on_image(planned: MigrationOptions) -> MigrationOptions {
        MigrationOptions {
            policy: planned.policy.without_image(),
            image: ImageOffer::TwoPlaces,
            older_copy: OlderCopy::None,
            verify: false,
            ..planned
        }
    }

    /// Discards an outdated comparison.
    pub(super) fn forget_comparison(&mut self, node: usize) {
        self.nodes[node].image.compared = false;
        self.with(node, |controller, _| controller.forget_comparison());
    }

    /// Returns true if the disk was compared with its image, for this migration or for an earlier one, refused by a
    /// busy destination. Otherwise starts the comparison; the migration is retried at its end.
    pub(super) fn is_compared(&mut self, source: usize) -> bool {
        let known = self.with(source, |controller, _| controller.compared());
        let is_known = known.flatten().is_some();
        let for_this = std::mem::take(&mut self.nodes[source].image.compared);
        if for_this || is_known && self.image_random.permille(700) {
            return true;
        }
        let begun = self.with(source, |controller, _| controller.begin_comparison());
        let Some(Ok(missing)) = begun else {
            self.schedule(2 * MILLISECOND, Occurrence::Migrate);
            return false;
        };
        let it = &mut self.nodes[source];
        it.image.begun = Some((missing, it.disk.current.clone()));
        let incarnation = it.incarnation;
        let delay = self
            .image_random
            .magnitude(20 * MICROSECOND, 10 * MILLISECOND);
        let node = source;
        self.schedule(delay, Occurrence::Compared { node, incarnation });
        false
    }

    /// Ends a comparison: the differences are known, except for the guest's writes since.
    pub(super) fn compared(&mut self, node: usize, incarnation: u32) {
        self.schedule(1, Occurrence::Migrate);
        let it = &mut self.nodes[node];
        if it.incarnation != incarnation {
            return;
        }
        let Some((missing, at_first)) = it.image.begun.take() else {
            return;
        };
        let (mut different, mut same) = (vec![0; missing.len()], vec![0; missing.len()]);
        // The repository may not know which blocks of a chunk differ.
        let coarse = self.image_random.permille(200);
        for block in 0..self.plan.sectors.div_ceil(BLOCK) {
            let range = block * BLOCK..((block + 1) * BLOCK).min(self.plan.sectors);
            let bit = |words: &mut Vec<u64>| words[(block / 64) as usize] |= 1 << (block % 64);
            let in_image = content(range.start) != 0;
            if missing[(block / 64) as usize] & 1 << (block % 64) != 0 {
                bit(&mut same);
                continue;
            }
            // The block was read at some time between start and end.
            let read = match self.image_random.below(2) {
                0 => &at_first,
                _ => &self.nodes[node].disk.current,
            };
            let equal = range.clone().all(|at| read[at as usize] == content(at));
            match (in_image, equal && !(in_image && coarse)) {
                (true, true) => bit(&mut same),
                (false, true) => {}
                (_, false) => bit(&mut different),
            }
        }
        let told = self.with(node, |controller, _| {
            controller.end_comparison(&different, &same)
        });
        self.nodes[node].image.compared = told == Some(true);
        if told == Some(true) {
            self.reached(Reached::Compared);
        }
    }

    /// Empties the destination's disk for an incoming disk on an image. Returns false while data of an earlier move is
    /// still being written there.
    pub(super) fn empty_for_image(&mut self, node: usize) -> bool {
        let may = self.with(node, |controller, _| controller.give_up_image());
        if may == Some(true) {
            self.nodes[node].disk.empty();
        }
        may == Some(true)
    }

    /// Sets the source of an incoming disk's missing blocks: the image for `Some`, another node for `None`.
    pub(super) fn comes_on_image(&mut self, node: usize, fetch: Option<MigrationId>) {
        self.nodes[node].image.fetch = fetch;
    }

    /// Connects a node's engine to the image, if the engine fetches and is not connected.
    pub(super) fn connect_image(&mut self, node: usize) {
        let it = &self.nodes[node];
        let (Some(migration), true) = (it.image.fetch, it.is_up() && it.serves()) else {
            return;
        };
        let apart = it.controller.as_ref();
        let apart = apart.is_some_and(|controller| controller.lacks_in_two_places());
        let taken = it.pull.is_some() && !apart;
        if it.image.connected || taken || !self.fetches(node) {
            return;
        }
        let image = &mut self.nodes[node].image;
        image.connected = true;
        image.connections += 1;
        image.apart = apart;
        self.with(node, |controller, now| match apart {
            true => controller.handle_image_up(now),
            false => controller.handle_pull_up(now, false),
        });
        let class = self.nodes[node].image.class();
        self.with(node, |controller, now| {
            let owes = Message::Owes {
                migration,
                max_bandwidth: None,
            };
            controller.handle_message(now, class, owes, None);
        });
    }

    /// Handles a message of an engine to the image. Returns false for a message to another node.
    pub(super) fn say_to_image(
        &mut self,
        node: usize,
        class: TrafficClass,
        message: &Message,
    ) -> bool {
        let it = &self.nodes[node];
        if !it.image.connected || it.image.class() != class {
            return false;
        }
        let (incarnation, connection) = (it.incarnation, it.image.connections);
        match *message {
            Message::Pull { slot, extent } => {
                let delay = self
                    .image_random
                    .magnitude(50 * MICROSECOND, 5 * MILLISECOND);
                let answer = Occurrence::ImageAnswers {
                    node,
                    incarnation,
                    connection,
                    slot: slot.0,
                    start: extent.start().0,
                    sectors: extent.sectors(),
                };
                self.schedule(delay, answer);
            }
            Message::Whole { .. } => {
                // Answers still in flight are not accepted any more.
                let connection = connection + 1;
                self.nodes[node].image.connections = connection;
                let hangs_up = Occurrence::ImageHangsUp {
                    node,
                    incarnation,
                    connection,
                };
                self.schedule(20 * MICROSECOND, hangs_up);
            }
            _ => self.fail("an engine asks an image only for what it has", || {
                format!("{} says {message:?}", name(node))
            }),
        }
        true
    }

    fn is_connection(&self, node: usize, incarnation: u32, connection: u32) -> bool {
        let it = &self.nodes[node];
        let image = &it.image;
        it.incarnation == incarnation && image.connected && image.connections == connection
    }

    /// Answers a request, unless the repository is away.
    pub(super) fn image_answers(
        &mut self,
        (node, incarnation, connection): (usize, u32, u32),
        slot: PullSlot,
        extent: Extent,
    ) {
        if !self.is_connection(node, incarnation, connection) {
            return;
        }
        if self.image_random.permille(5) {
            return self.image_hangs_up(node, incarnation, connection);
        }
        let plan = self.plan.image.as_ref();
        let away = plan.is_some_and(|plan| !self.settling && plan.is_away(self.now));
        let data: Vec<Value> = sectors(extent).map(|at| content(at as u64)).collect();
        let zeroes = data.iter().all(|value| *value == 0);
        let result = match away {
            true => Err(RequestError::NotServing),
            false => Ok(()),
        };
        self.reached(if away {
            Reached::RepositoryAway
        } else {
            Reached::Fetched
        });
        let data = (!away && !zeroes).then(|| data.into());
        self.nodes[node].pull_buffers[usize::from(slot.0)] = data;
        let pulled = Message::Pulled {
            slot,
            extent,
            zeroes: zeroes && !away,
            result,
        };
        let class = self.nodes[node].image.class();
        let expected = self.with(node, |controller, now| {
            controller.handle_pulled(now, class, pulled)
        });
        if expected == Some(false) {
            self.fail("what arrives was pulled", || {
                format!("{pulled:?} at {}", name(node))
            });
        }
    }

    /// Disconnects the engine of a disk that has left without its unfetched blocks.
    pub(super) fn leave_image(&mut self, node: usize) {
        let image = &self.nodes[node].image;
        let (incarnation, connection) = (self.nodes[node].incarnation, image.connections);
        self.image_hangs_up(node, incarnation, connection);
    }

    pub(super) fn image_hangs_up(&mut self, node: usize, incarnation: u32, connection: u32) {
        if self.is_connection(node, incarnation, connection) {
            self.nodes[node].image.connected = false;
            let class = self.nodes[node].image.class();
            self.with(node, |controller, now| match class {
                TrafficClass::Image => controller.handle_image_lost(now),
                _ => controller.handle_pull_lost(now),
            });
        }
    }
}
