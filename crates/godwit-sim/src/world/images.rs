//! What bodies do for a disk that was created from an image: they give it what it has not fetched, and compare it with the
//! image before it moves without that.

use godwit_core::PolicyOptions;
use godwit_core::action::PullSlot;
use godwit_core::request::RequestError;
use godwit_core::units::{Extent, MigrationId, Sectors};
use godwit_core::wire::{Message, TrafficClass};
use godwit_core::{ImageOffer, MigrationOptions, Missing, OlderCopy, RoundOptions};

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

/// Sectors of a block, of which a disk has all or nothing.
const BLOCK: u64 = 8;

/// What a node knows of the image that its disk is on.
#[derive(Clone, Debug, Default)]
pub(super) struct OnImage {
    /// What its record says that it lacks while a part of the image is not here: stored.
    fetch: Option<MigrationId>,
    /// Whether its engine is connected to what gives it the image; counts the connections.
    connected: bool,
    connections: u32,
    /// That connection is beside one on which another node owes some.
    apart: bool,
    /// The comparison under way: what was missing when it began, and what was read of the disk then.
    begun: Option<(Vec<u64>, Vec<Value>)>,
    /// It was compared, and may leave.
    compared: bool,
}

impl OnImage {
    /// What an engine is told on that connection is told as this.
    const fn class(&self) -> TrafficClass {
        match self.apart {
            true => TrafficClass::Image,
            false => TrafficClass::Pull,
        }
    }

    /// A process has ended.
    pub(super) fn clear(&mut self) {
        self.connected = false;
        self.begun = None;
        self.compared = false;
    }
}

/// What the image has in a sector: of each eight blocks two are holes.
fn content(sector: u64) -> Value {
    match sector / BLOCK % 8 {
        2 | 5 => 0,
        _ => IMAGE + sector as Value,
    }
}

impl World {
    /// The disk is on an image: all that it has of that is missing at first.
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

    /// Whether the node fetches from the image now.
    fn fetches(&self, node: usize) -> bool {
        let it = &self.nodes[node];
        it.image.fetch.is_some() && it.record.lacks() == it.image.fetch
    }

    /// What a guest would read there: of the node's disk, or, where that lacks it, of the image.
    pub(super) fn as_guests_see_it(&self, node: usize, sector: u64) -> Value {
        let it = &self.nodes[node];
        // What a migration stores may be stored after that has been given up: such a note counts for nothing.
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

    /// Whether the next migration from this node leaves the image behind.
    pub(super) fn leaves_image(&self, source: usize, planned: &MigrationPlan) -> bool {
        let Some(plan) = &self.plan.image else {
            return false;
        };
        let lacks = self.nodes[source].record.lacks().is_some();
        self.fetches(source) || !lacks && plan.leaves(planned.options.migration)
    }

    /// The options of such a migration.
    pub(super) fn options_on_image(planned: MigrationOptions) -> MigrationOptions {
        let in_blocks = |rounds| {
            PolicyOptions::PreCopy(RoundOptions {
                block_sectors: BLOCK as u32,
                ..rounds
            })
        };
        MigrationOptions {
            policy: match planned.policy {
                PolicyOptions::PreCopy(rounds) => in_blocks(rounds),
                PolicyOptions::PushPull(push) => PolicyOptions::PushPull(push),
                _ => in_blocks(RoundOptions::default()),
            },
            image: ImageOffer::TwoPlaces,
            older_copy: OlderCopy::None,
            verify: false,
            ..planned
        }
    }

    /// What was compared is of no use any more.
    pub(super) fn forget_comparison(&mut self, node: usize) {
        self.nodes[node].image.compared = false;
        self.with(node, |controller, _| controller.forget_comparison());
    }

    /// Whether the disk was compared with its image, for this migration or for one that its destination was too busy to
    /// take. If not, that begins, and the migration is tried again when it ends.
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

    /// All of the disk was read: what differs is known, but for what the guest has written since.
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
        // The repository may not tell which blocks of a chunk differ.
        let coarse = self.image_random.permille(200);
        for block in 0..self.plan.sectors.div_ceil(BLOCK) {
            let range = block * BLOCK..((block + 1) * BLOCK).min(self.plan.sectors);
            let bit = |words: &mut Vec<u64>| words[(block / 64) as usize] |= 1 << (block % 64);
            let in_image = content(range.start) != 0;
            if missing[(block / 64) as usize] & 1 << (block % 64) != 0 {
                bit(&mut same);
                continue;
            }
            // It was read at some time between begin and end.
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

    /// The destination makes its disk one hole before it takes a disk that is on an image. False when something of an
    /// earlier move is still being written there.
    pub(super) fn empty_for_image(&mut self, node: usize) -> bool {
        let may = self.with(node, |controller, _| controller.give_up_image());
        if may == Some(true) {
            self.nodes[node].disk.empty();
        }
        may == Some(true)
    }

    /// What the node will lack of a disk that comes is what the image has, or what another node owes.
    pub(super) fn comes_on_image(&mut self, node: usize, fetch: Option<MigrationId>) {
        self.nodes[node].image.fetch = fetch;
    }

    /// Connects a node's engine to what gives it the image, if it fetches and is not connected.
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

    /// What an engine says to what gives it the image; false when it says it to another node.
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
                // What is still on its way is not taken any more.
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

    /// What was asked for comes, unless the repository is away.
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

    /// The disk has left without what it had not fetched: its engine hangs up.
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
