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
use crate::world::node::{BLOCK, StoredMissing, has, insert};
use crate::world::{MICROSECOND, MILLISECOND, World, name};

/// Stands for a migration in the record of the node at which the disk was created.
pub(super) const CREATED: MigrationId = MigrationId([0xEE; 16]);

/// A node's knowledge of its disk's image.
#[derive(Clone, Debug, Default)]
pub(super) struct OnImage {
    /// Durable remainder of the record while part of the image is missing here; `None` while another node has the
    /// missing blocks.
    pub(super) fetch: Option<MigrationId>,
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

    /// Returns true if this is the current connection.
    const fn is_on(&self, connection: u32) -> bool {
        self.connected && self.connections == connection
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
            insert(&mut words, sector);
            self.history.holds_at_first(sector, content(sector));
        }
        let heat = vec![0; Missing::heat_length(capacity)];
        let it = &mut self.nodes[0];
        it.store.record.remainder = Some(CREATED);
        it.store.missing = Some(StoredMissing::new(words, heat));
        it.image.fetch = Some(CREATED);
    }

    /// Returns true if the node fetches from the image now.
    fn fetches(&self, node: usize) -> bool {
        let it = &self.nodes[node];
        it.image.fetch.is_some() && it.store.record.lacks() == it.image.fetch
    }

    /// Returns a sector as read by a guest: from the node's disk, or from the other node or the image where the disk
    /// lacks the block.
    pub(super) fn as_guests_see_it(&self, node: usize, sector: u64) -> Value {
        let it = &self.nodes[node];
        // A migration's missing blocks may be stored after the migration was given up; they do not count then.
        let lacks = it.store.record.remainder.is_some();
        match it.store.missing.as_ref().filter(|_| lacks) {
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
        let lacks = self.nodes[source].store.record.lacks().is_some();
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
        self.with(node, |c, _| c.forget_comparison());
    }

    /// Returns true if the disk was compared with its image, for this migration or for an earlier one, refused by a
    /// busy destination. Otherwise starts the comparison; the migration is retried at its end.
    pub(super) fn is_compared(&mut self, source: usize) -> bool {
        let known = self.with(source, |c, _| c.compared());
        let is_known = known.flatten().is_some();
        let for_this = std::mem::take(&mut self.nodes[source].image.compared);
        if for_this || is_known && self.random.image.permille(700) {
            return true;
        }
        let begun = self.with(source, |c, _| c.begin_comparison());
        let Some(Ok(missing)) = begun else {
            self.schedule(2 * MILLISECOND, Self::operate);
            return false;
        };
        let it = &mut self.nodes[source];
        it.image.begun = Some((missing, it.disk.current.clone()));
        let incarnation = it.incarnation;
        let random = &mut self.random.image;
        let delay = random.magnitude(20 * MICROSECOND, 10 * MILLISECOND);
        self.schedule(delay, move |world| {
            world.schedule(1, Self::operate);
            if world.nodes[source].incarnation == incarnation {
                world.compared(source);
            }
        });
        false
    }

    /// Ends a comparison: the differences are known, except for the guest's writes since.
    fn compared(&mut self, node: usize) {
        let Some((missing, at_first)) = self.nodes[node].image.begun.take() else {
            return;
        };
        let (mut different, mut same) = (vec![0; missing.len()], vec![0; missing.len()]);
        // The repository may not know which blocks of a chunk differ.
        let coarse = self.random.image.permille(200);
        for block in 0..self.plan.sectors.div_ceil(BLOCK) {
            let start = block * BLOCK;
            let mut range = start..(start + BLOCK).min(self.plan.sectors);
            let in_image = content(start) != 0;
            if has(&missing, start) {
                insert(&mut same, start);
                continue;
            }
            // The block was read at some time between start and end.
            let read = match self.random.image.below(2) {
                0 => &at_first,
                _ => &self.nodes[node].disk.current,
            };
            let equal = range.all(|at| read[at as usize] == content(at));
            match (in_image, equal && !(in_image && coarse)) {
                (true, true) => insert(&mut same, start),
                (false, true) => {}
                (_, false) => insert(&mut different, start),
            }
        }
        let told = self.with(node, |c, _| c.end_comparison(&different, &same));
        self.nodes[node].image.compared = told == Some(true);
        if told == Some(true) {
            self.reached(Reached::Compared);
        }
    }

    /// Empties the destination's disk for an incoming disk on an image. Returns false while data of an earlier move is
    /// still being written there.
    pub(super) fn empty_for_image(&mut self, node: usize) -> bool {
        let may = self.with(node, |c, _| c.give_up_image()) == Some(true);
        if may {
            self.nodes[node].disk.empty();
        }
        may
    }

    /// Connects a node's engine to the image, if the engine fetches and is not connected.
    pub(super) fn connect_image(&mut self, node: usize) {
        let it = &self.nodes[node];
        let (Some(migration), true) = (it.image.fetch, it.is_up() && it.serves()) else {
            return;
        };
        let apart = it.lacks_in_two_places();
        let taken = it.sessions.pull.is_some() && !apart;
        if it.image.connected || taken || !self.fetches(node) {
            return;
        }
        let image = &mut self.nodes[node].image;
        image.connected = true;
        image.connections += 1;
        image.apart = apart;
        self.with(node, |c, now| match apart {
            true => c.handle_image_up(now),
            false => c.handle_pull_up(now, false),
        });
        let class = self.nodes[node].image.class();
        let owes = Message::Owes {
            migration,
            max_bandwidth: None,
        };
        self.with(node, |c, now| c.handle_message(now, class, owes, None));
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
        let connection = it.image.connections;
        match *message {
            Message::Pull { slot, extent } => {
                let random = &mut self.random.image;
                let delay = random.magnitude(50 * MICROSECOND, 5 * MILLISECOND);
                self.schedule_own(node, delay, move |world| {
                    world.image_answers(node, connection, slot, extent)
                });
            }
            Message::Whole { .. } => {
                // Answers still in flight are not accepted any more.
                let connection = connection + 1;
                self.nodes[node].image.connections = connection;
                self.schedule_own(node, 20 * MICROSECOND, move |world| {
                    world.image_hangs_up(node, connection)
                });
            }
            _ => self.fail("an engine asks an image only for what it has", || {
                format!("{} says {message:?}", name(node))
            }),
        }
        true
    }

    /// Answers a request, unless the repository is away.
    pub(super) fn image_answers(
        &mut self,
        node: usize,
        connection: u32,
        slot: PullSlot,
        extent: Extent,
    ) {
        if !self.nodes[node].image.is_on(connection) {
            return;
        }
        if self.random.image.permille(5) {
            return self.image_hangs_up(node, connection);
        }
        let plan = self.plan.image.as_ref();
        let away = plan.is_some_and(|plan| !self.settling && plan.is_away(self.now));
        let data: Vec<Value> = sectors(extent).map(|at| content(at as u64)).collect();
        let zeroes = data.iter().all(|value| *value == 0);
        let (result, state) = match away {
            true => (Err(RequestError::NotServing), Reached::RepositoryAway),
            false => (Ok(()), Reached::Fetched),
        };
        self.reached(state);
        let data = (!away && !zeroes).then(|| data.into());
        let pulled = Message::Pulled {
            slot,
            extent,
            zeroes: zeroes && !away,
            result,
        };
        self.take_pulled(node, self.nodes[node].image.class(), slot, pulled, data);
    }

    /// Disconnects the engine of a disk that has left without its unfetched blocks.
    pub(super) fn leave_image(&mut self, node: usize) {
        self.image_hangs_up(node, self.nodes[node].image.connections);
    }

    pub(super) fn image_hangs_up(&mut self, node: usize, connection: u32) {
        let image = &mut self.nodes[node].image;
        if image.is_on(connection) {
            image.connected = false;
            let class = image.class();
            self.with(node, |c, now| match class {
                TrafficClass::Image => c.handle_image_lost(now),
                _ => c.handle_pull_lost(now),
            });
        }
    }
}
