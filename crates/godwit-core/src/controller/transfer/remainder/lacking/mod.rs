//! At the owner: serves a disk of which a part is still at the node that gave the disk away.
//!
//! A block is missing until its content is on this node's disk: pulled from the other node, or overwritten as a whole.
//! A read waits for the blocks it touches, a write for the blocks it covers in part. Blocks with waiting requests are
//! pulled first, and nothing else is asked for in the meantime. Pulled data is written only if all of it is still
//! missing: the guest may have written there since the pull began.
//!
//! A disk on an image may have left before all differences from the image had. The missing blocks are then in two
//! places, each with its own connection, and each may be out of reach without the other. Blocks at the other node must
//! all arrive in the end; blocks in the image may stay there for ever. The other node is therefore told when none of
//! its blocks are missing any more, durably.
//!
//! Blocks that are here must stay here. If a process dies, nothing it noted ([`Action::NoteHere`]) is lost. After a
//! power loss the disk lacks the blocks stored last by [`Action::StoreMissing`], and pulls them again, even blocks that
//! the guest has written since. A flush of the guest, and a write that must be durable, are therefore answered only
//! after a *checkpoint*: the disk is flushed, and then the new list of missing blocks is stored.

mod checkpoint;
mod pulling;
mod waiting;

use core::time::Duration;
use std::collections::VecDeque;

use crate::action::{Action, PULL_SLOTS};
use crate::controller::Controller;
use crate::controller::block_set::BlockSet;
use crate::controller::governor::token_bucket::TokenBucket;
use crate::controller::requests::slots::{TagList, WorkStage};
use crate::controller::transfer::remainder::SILENT_AFTER;
use crate::controller::transfer::remainder::lacking::checkpoint::Checkpoint;
use crate::controller::transfer::remainder::lacking::pulling::{Prefetch, Pull, PutOff};
use crate::controller::transfer::remainder::missing::{Missing, PIECE_SECTORS};
use crate::event::Event;
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, MigrationId, Time};
use crate::wire::{Message, TrafficClass};

/// Missing blocks of the disk, and their pulling.
#[derive(Debug)]
pub(in crate::controller) struct Lacking {
    migration: MigrationId,
    missing: Missing,
    /// True if the owing node has confirmed its debt on the current connection.
    is_owed: bool,
    /// Time of the owing node's last sign of life on this connection.
    heard: Time,
    /// True if the owing node has been silent for [`SILENT_AFTER`].
    is_silent: bool,
    /// Like `is_owed`, for the image, if the missing blocks are in two places.
    is_in_image: bool,
    /// True if none of the owing node's blocks are missing any more, durably, and the rest is in an image.
    is_repaid: bool,
    pulls: [Pull; PULL_SLOTS as usize],
    /// Requests that wait for missing blocks, in the order of their waits, with their start times.
    waiting: VecDeque<(RequestTag, Time)>,
    /// Extents of requests that were [given back](Controller::give_back_missing), and whether these requests write. The
    /// extents are pulled as if the requests still waited.
    wanted: Vec<(Extent, bool)>,
    put_off: PutOff,
    prefetch: Prefetch,
    /// True if only blocks with waiting requests are pulled.
    on_demand_only: bool,
    /// End of a rest after an error; nothing is pulled before.
    resumes: Option<Time>,
    /// Error of the last failed write here, or of the last failed read at the other node.
    trouble: Option<RequestError>,
    /// Keeps pulling from the node that gave the disk away within the migration's bandwidth bound, even for waiting
    /// requests.
    bound: Option<TokenBucket>,
    /// Time at which the bound allows the next pull.
    paced_until: Option<Time>,
    checkpoint: Checkpoint,
    /// Requests that are answered after the next checkpoint, and after the current one.
    for_next: TagList,
    for_this: TagList,
    /// Blocks that arrived since the last checkpoint began, and whether any arrived since the last one that ended.
    young: BlockSet,
    unsaved: bool,
    /// Pieces changed since the last store, and pieces being stored: a bit each.
    changed: BlockSet,
    storing: BlockSet,
}

impl Lacking {
    pub(in crate::controller) fn new(migration: MigrationId, missing: Missing) -> Self {
        let young = missing.blocks().like();
        let changed = BlockSet::new(missing.blocks().capacity(), PIECE_SECTORS);
        let mut storing = changed.like();
        for piece in missing.blocks().groups() {
            storing.set_number(piece);
        }
        Self {
            migration,
            missing,
            is_owed: false,
            heard: Time(0),
            is_silent: false,
            is_in_image: false,
            is_repaid: false,
            pulls: [Pull::Free; PULL_SLOTS as usize],
            waiting: VecDeque::new(),
            wanted: Vec::new(),
            put_off: PutOff::default(),
            prefetch: Prefetch::new(),
            on_demand_only: false,
            resumes: None,
            trouble: None,
            bound: None,
            paced_until: None,
            checkpoint: Checkpoint::None,
            for_next: TagList::EMPTY,
            for_this: TagList::EMPTY,
            young,
            unsaved: false,
            changed,
            storing,
        }
    }

    pub(in crate::controller) const fn migration(&self) -> MigrationId {
        self.migration
    }

    /// Returns a bit for each missing block.
    pub(in crate::controller) fn missing_words(&self) -> Vec<u64> {
        self.missing.words().collect()
    }

    /// Returns true if any missing block can be pulled now, as far as is known.
    const fn is_somewhere(&self) -> bool {
        self.is_owed || self.is_in_image
    }

    /// Returns true if blocks of this connection can be pulled now.
    const fn can_come(&self, class: TrafficClass) -> bool {
        match class {
            TrafficClass::Image => self.is_in_image,
            _ => self.is_owed,
        }
    }

    /// Returns true if this process knows that the missing blocks are or were in two places.
    const fn has_two_places(&self) -> bool {
        self.missing.has_two_places()
    }

    /// Returns true if a durably missing block is only at the node that gave the disk away, and the rest is in an
    /// image.
    pub(in crate::controller) const fn needs_source(&self) -> bool {
        self.has_two_places() && !self.is_repaid
    }

    /// Returns true if a part of the extent is missing.
    pub(in crate::controller) fn lacks_any_of(&self, extent: Extent) -> bool {
        self.missing.is_needed(extent, false)
    }

    /// Returns the time of the next retry, or the time at which a request has waited for too long.
    pub(in crate::controller) fn deadline(&self, longest_wait: Option<Duration>) -> Option<Time> {
        let next = match self.resumes {
            // Nothing is asked for before.
            Some(resumes) => Some(resumes),
            None => self.put_off.next().filter(|_| self.is_somewhere()),
        };
        let silent = self.heard.after(SILENT_AFTER);
        let silent = Some(silent).filter(|_| self.is_owed && !self.is_silent);
        [next, silent, self.paced_until, self.wait_ends(longest_wait)]
            .into_iter()
            .flatten()
            .min()
    }
}

impl Controller {
    /// Restores the stored and noted list of missing blocks in a process that starts. To be called before anything else
    /// if the record has a [remainder](crate::authority::AuthorityRecord::remainder) and this node is the owner, or has
    /// accepted. A disk whose list is unknown must not be served.
    pub fn restore_missing(&mut self, missing: Missing) {
        if let Some(migration) = self.cx.authority.lacks_or_will() {
            let unstored = missing.unstored();
            let mut lacking = Lacking::new(migration, missing);
            lacking.changed = unstored;
            // Noted blocks are not durable, and may be the last ones.
            lacking.unsaved = true;
            lacking.resumes = Some(Time(0));
            self.lacking = Some(Box::new(lacking));
        }
    }

    /// Pulls only blocks with waiting requests from now on: the rest may stay in its place for ever.
    pub fn pull_on_demand_only(&mut self) {
        if let Some(lacking) = &mut self.lacking {
            lacking.on_demand_only = true;
        }
    }

    /// Returns the migration whose source has the blocks that this node's disk lacks, or will lack on arrival.
    pub fn lacks(&self) -> Option<MigrationId> {
        self.lacking.as_ref().map(|lacking| lacking.migration)
    }

    /// Returns the missing blocks; `None` if the disk is whole.
    pub fn missing(&self) -> Option<&Missing> {
        self.lacking.as_ref().map(|lacking| &lacking.missing)
    }

    /// Returns true if the owing node is connected, has confirmed its debt, and has recently shown a sign of life.
    pub fn missing_is_owed(&self) -> bool {
        let lacking = self.lacking.as_ref();
        lacking.is_some_and(|lacking| lacking.is_owed && !lacking.is_silent)
    }

    /// Returns the error of the last failed write here, or of the last failed read at the other node. The pull is
    /// retried.
    pub fn missing_trouble(&self) -> Option<RequestError> {
        self.lacking.as_ref()?.trouble
    }

    /// Notes a sign of life of the owing node.
    fn source_heard(&mut self) {
        let now = self.cx.now;
        if let Some(lacking) = &mut self.lacking {
            lacking.heard = now;
            lacking.is_silent = false;
        }
    }

    /// Returns true if the missing blocks are in the image and at another node, or were when this process began.
    pub fn lacks_in_two_places(&self) -> bool {
        self.lacking.as_ref().is_some_and(|it| it.has_two_places())
    }

    /// Returns true if the node that gave the disk away is needed beside the image: a durably missing block is only
    /// there. Such a disk cannot [leave](Self::start_source).
    pub fn needs_source(&self) -> bool {
        self.lacking.as_ref().is_some_and(|it| it.needs_source())
    }

    /// Makes a request wait if missing blocks are needed; returns true if so.
    #[inline]
    pub(in crate::controller) fn waits_for_missing(
        &mut self,
        tag: RequestTag,
        extent: Extent,
        writes: bool,
    ) -> bool {
        let ignores = writes && self.cx.has_bug(PlantedBug::ForgetRestOfBlock);
        let Some(lacking) = &mut self.lacking else {
            return false;
        };
        if ignores || !lacking.missing.is_needed(extent, writes) {
            return false;
        }
        lacking.waiting.push_back((tag, self.cx.now));
        self.cx.slots[tag].stage = WorkStage::Lacking;
        self.pull();
        true
    }

    /// Notes a write to the extent that has reached this node's disk.
    pub(in crate::controller) fn written_here(&mut self, extent: Extent) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        let Some(part) = lacking.missing.covered(extent) else {
            return;
        };
        if lacking.missing.blocks().touches(part) {
            self.is_here(part);
        }
    }

    /// Notes that these blocks are here.
    fn is_here(&mut self, extent: Extent) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        // Blocks present before may be durable by the last checkpoint. Such blocks must not count as missing again, or
        // they would be pulled over data that the guest has flushed.
        let came = lacking.missing.blocks();
        lacking.young.set_those_of(came, extent);
        lacking.missing.clear(extent);
        lacking.changed.set(extent);
        lacking.unsaved = true;
        let tells_early = lacking.needs_source() && !lacking.missing.needs_source();
        self.cx.act(Action::NoteHere { extent });
        if tells_early && self.cx.has_bug(PlantedBug::RepaidEarly) {
            if let Some(lacking) = &mut self.lacking {
                lacking.is_repaid = true;
            }
            self.tell_of_repayment();
        }
        self.wake_for_missing();
        self.checkpoint_if_due();
    }

    /// Forgets the missing blocks, because the disk has left without them: its new owner gets them from the same place.
    pub(in crate::controller) fn leave_image(&mut self) {
        self.differences.on_image = None;
        let Some(lacking) = self.lacking.take() else {
            return;
        };
        debug_assert!(lacking.waiting.is_empty(), "the guest is held");
        self.is_no_base();
        let migration = lacking.migration;
        self.nothing_is_missing(migration);
        self.cx.notify(Event::LeftImage { migration });
    }

    /// Ends the pulling: the whole disk is durably here.
    pub(in crate::controller) fn became_whole(&mut self, migration: MigrationId) {
        let lacking = self.lacking.take();
        debug_assert!(
            lacking.is_some_and(|lacking| lacking.missing.blocks().count() == 0),
            "something is missing"
        );
        self.nothing_is_missing(migration);
        self.cx.notify(Event::Whole { migration });
    }

    /// Tells the nodes from which blocks could have been pulled.
    fn nothing_is_missing(&mut self, migration: MigrationId) {
        for (class, is_up) in [
            (TrafficClass::Pull, self.pull_link.is_up()),
            (TrafficClass::Image, self.image_is_up),
        ] {
            if is_up {
                self.cx.send(class, Message::Whole { migration });
            }
        }
    }
}
