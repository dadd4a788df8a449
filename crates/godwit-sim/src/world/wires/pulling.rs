//! The bodies' part for a disk handed over before the end of the copy: the connection on which the owner pulls the
//! rest, and the stored missing blocks.

use godwit_core::action::PullSlot;
use godwit_core::authority::Ownership;
use godwit_core::units::{Extent, Sectors};
use godwit_core::wire::{Message, TrafficClass};

use crate::disk::Data;
use crate::run::coverage::Reached;
use crate::world::node::{Node, StoringMissing};
use crate::world::{MICROSECOND, World, name};

impl World {
    /// Checks the write counts in a source's message.
    pub(crate) fn check_counts(&mut self, message: &Message) {
        let Message::Lacks {
            start,
            sectors,
            heat,
            at_source,
        } = *message
        else {
            return;
        };
        if self.course.on_image && !at_source {
            // For blocks in the image the heat is the order of fetching.
            return;
        }
        if let Some((chunk, count)) = self.course.with_other_heat(start, sectors, heat) {
            self.fail("the destination learns how often the guest wrote", || {
                format!("chunk {chunk}: {count} writes, told as {heat}")
            });
        }
    }

    /// Stores the disk's missing blocks.
    pub(crate) fn store_missing(&mut self, node: usize) {
        let it = &mut self.nodes[node];
        let Some(storing) = it.controller.as_ref().and_then(StoringMissing::of) else {
            let claim = "what a disk lacks is stored while it lacks something";
            return self.fail(claim, || name(node).to_string());
        };
        it.store.storing_missing = Some(storing);
        let delay = it.store.latency(&mut self.random.store);
        self.schedule_own(node, delay, move |world| world.missing_stored(node));
    }

    /// Completes the store of the missing blocks.
    pub(crate) fn missing_stored(&mut self, node: usize) {
        let capacity = Sectors(self.plan.sectors);
        if self.nodes[node].store.missing_stored(capacity) {
            self.reached(Reached::MissingStored);
            self.with(node, |c, now| c.handle_missing_stored(now));
        }
    }

    /// Notes the arrival of a missing extent.
    pub(crate) fn note_here(&mut self, node: usize, extent: Extent) {
        match &mut self.nodes[node].store.missing {
            Some(missing) => missing.note_here(extent),
            None => self.fail("what comes to a disk was stored as missing", || {
                format!("{} {extent}", name(node))
            }),
        }
    }

    /// Gives a starting process the stored missing blocks of its disk.
    pub(crate) fn restore_missing(&mut self, node: usize) {
        let Node {
            controller: Some(controller),
            store,
            ..
        } = &mut self.nodes[node]
        else {
            return;
        };
        let record = store.record;
        if record.owes().is_some() && self.plan.image.is_some() {
            // The disk may have left without the unfetched blocks.
            controller.is_no_base();
        }
        if let Some(missing) = store.restore_missing(Sectors(self.plan.sectors)) {
            controller.restore_missing(missing);
            self.reached(Reached::MissingRestored);
        } else if record.remainder.is_some() && record.ownership == Ownership::Serving {
            let claim = "a node that serves knows what its disk lacks";
            self.fail(claim, || name(node).to_string());
        }
    }

    /// Connects a node that owes data to the owner, unless connected.
    pub(crate) fn connect_pull(&mut self, node: usize) {
        let it = &self.nodes[node];
        let controller = it.controller.as_ref();
        let owes = controller.is_some_and(|controller| controller.record().owes().is_some());
        if !owes || it.sessions.pull.is_some() || !self.nodes[1 - node].is_up() {
            return;
        }
        self.reached(Reached::PullConnected);
        if self.nodes[1 - node].lacks_in_two_places() {
            self.reached(Reached::TwoPlaces);
        }
        if let Some(old) = self.nodes[1 - node].sessions.pull {
            self.cut(old, MICROSECOND + 1);
            self.notice_loss(old, 1 - node);
        }
        let session = self.network.open();
        for it in &mut self.nodes {
            it.sessions.pull = Some(session);
        }
        for each in [node, 1 - node] {
            self.with(each, |c, now| {
                c.handle_pull_up(now, each == node);
                c.show_life();
            });
        }
    }

    pub(crate) fn lose_pull(&mut self, session: usize, node: usize) {
        let pull = &mut self.nodes[node].sessions.pull;
        if pull.take_if(|lost| *lost == session).is_some() {
            self.with(node, |c, now| c.handle_pull_lost(now));
            let delay = self.retry_delay();
            self.schedule(delay, move |world| world.connect_pull(node));
        }
    }

    /// Delivers a frame of the connection on which an owner pulls.
    pub(crate) fn deliver_pull(&mut self, session: usize, to: usize, message: Message, data: Data) {
        if self.nodes[to].sessions.pull != Some(session) {
            return;
        }
        let class = TrafficClass::Pull;
        if let Message::Pulled { slot, .. } = message {
            self.take_pulled(to, class, slot, message, data);
        } else {
            self.with(to, |c, now| c.handle_message(now, class, message, None));
        }
    }

    /// Gives a controller pulled data.
    pub(crate) fn take_pulled(
        &mut self,
        node: usize,
        class: TrafficClass,
        slot: PullSlot,
        pulled: Message,
        data: Data,
    ) {
        self.nodes[node].buffers.keep_pulled(slot, data);
        let expected = self.with(node, |c, now| c.handle_pulled(now, class, pulled));
        if expected == Some(false) {
            self.fail("what arrives was pulled", || {
                format!("{pulled:?} at {}", name(node))
            });
        }
    }
}
