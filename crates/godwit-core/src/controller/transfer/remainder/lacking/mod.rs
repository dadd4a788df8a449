//! At the owner: serves a disk of which a part is still at the node that gave it away.
//!
//! A block is missing until what belongs there is on this node's disk: pulled from the other node, or written over
//! as a whole. A read waits for the blocks that it touches, a write for those that it covers in part. What somebody
//! waits for is pulled first; nothing else is asked for meanwhile. What was pulled is written only if all of it is
//! missing still: the guest may have written there since it was asked for.
//!
//! A disk on an image may have left before all that differs from the image had: then what is missing is in two places, each
//! with a connection of its own, and each may be away without the other. What is at the other node has no end but that it
//! comes; of the image some may stay where it is for ever. So the other node is told when nothing of what it has is missing
//! any more, durably.
//!
//! What is here must stay here. Of a process that dies nothing is lost that it noted ([`Action::NoteHere`]); after a
//! power loss the disk lacks what [`Action::StoreMissing`] stored last, and is pulled again, also where the guest has
//! written since. So a flush of the guest, and a write that must be durable, are answered only after the disk was
//! flushed and then stored what it lacks no longer: a *checkpoint*.

mod checkpoint;
mod pulling;
mod waiting;

use core::time::Duration;
use std::collections::VecDeque;

use crate::action::{Action, PULL_SLOTS};
use crate::controller::Controller;
use crate::controller::governor::token_bucket::TokenBucket;
use crate::controller::requests::slots::{TagList, WorkStage};
use crate::controller::transfer::dirty::DirtyBitmap;
use crate::controller::transfer::remainder::SILENT_AFTER;
use crate::controller::transfer::remainder::lacking::checkpoint::Checkpoint;
use crate::controller::transfer::remainder::lacking::pulling::{Prefetch, Pull, PutOff};
use crate::controller::transfer::remainder::missing::{Missing, PIECE_SECTORS};
use crate::event::Event;
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, MigrationId, Time};
use crate::wire::{Message, TrafficClass};

/// What the disk lacks, and what is done about it.
#[derive(Debug)]
pub(in crate::controller) struct Lacking {
    migration: MigrationId,
    missing: Missing,
    /// The node that has the rest has said so on the connection that is there.
    is_owed: bool,
    /// When that node was heard of last on that connection.
    heard: Time,
    /// It has not been heard of for [`SILENT_AFTER`].
    is_silent: bool,
    /// The same of the image, where what is missing is in two places.
    is_in_image: bool,
    /// Of what that node has nothing is missing any more, durably, where the rest is in an image.
    is_repaid: bool,
    pulls: [Pull; PULL_SLOTS as usize],
    /// Requests that wait for missing blocks, in the order in which they began to, and since when.
    waiting: VecDeque<(RequestTag, Time)>,
    /// What was waited for by requests that were [given back](Controller::give_back_missing), and whether they write. It is
    /// pulled as if they waited still.
    wanted: Vec<(Extent, bool)>,
    put_off: PutOff,
    prefetch: Prefetch,
    /// Only what somebody waits for is asked for.
    on_demand_only: bool,
    /// Something went wrong, and nothing is asked for before.
    resumes: Option<Time>,
    /// Why what came last could not be written, or not be read there.
    trouble: Option<RequestError>,
    /// Keeps what is pulled from the node that gave the disk away within what the migration was bound to, whoever waits
    /// for it.
    bound: Option<TokenBucket>,
    /// When the bound lets something be asked for again.
    paced_until: Option<Time>,
    checkpoint: Checkpoint,
    /// Requests that are answered after a checkpoint that has not begun, and after the one that has.
    for_next: TagList,
    for_this: TagList,
    /// Blocks that came here since the last checkpoint began, and whether any have since the last that ended.
    young: DirtyBitmap,
    unsaved: bool,
    /// The pieces that were changed since the last that were stored, and those that are being stored: a bit each.
    changed: DirtyBitmap,
    storing: DirtyBitmap,
}

impl Lacking {
    pub(in crate::controller) fn new(migration: MigrationId, missing: Missing) -> Self {
        let young = missing.blocks().like();
        let changed = DirtyBitmap::new(missing.blocks().capacity(), PIECE_SECTORS);
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

    /// A bit for each block that is missing.
    pub(in crate::controller) fn missing_words(&self) -> Vec<u64> {
        self.missing.words().collect()
    }

    /// Whether anything of what is missing can be had now, as far as that is known.
    const fn is_somewhere(&self) -> bool {
        self.is_owed || self.is_in_image
    }

    /// Whether what is to be had on this connection can be had now.
    const fn can_come(&self, class: TrafficClass) -> bool {
        match class {
            TrafficClass::Image => self.is_in_image,
            _ => self.is_owed,
        }
    }

    /// Whether this process knows that what is missing is in two places, or was.
    const fn has_two_places(&self) -> bool {
        self.missing.has_two_places()
    }

    /// Whether something is missing durably that only the node has which gave the disk away, where the rest is in an
    /// image.
    pub(in crate::controller) const fn needs_source(&self) -> bool {
        self.has_two_places() && !self.is_repaid
    }

    /// Whether a part of this is missing.
    pub(in crate::controller) fn lacks_any_of(&self, extent: Extent) -> bool {
        self.missing.is_needed(extent, false)
    }

    /// When something is to be tried again, or somebody will have waited for longer than that.
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
    /// What the disk lacks, as it was stored and noted, for a process that starts. To be called before anything
    /// else if the record has a [remainder](crate::authority::AuthorityRecord::remainder) and this node is the owner,
    /// or has accepted. A disk of which that is not known must not be served.
    pub fn restore_missing(&mut self, missing: Missing) {
        if let Some(migration) = self.authority.lacks_or_will() {
            let unstored = missing.unstored();
            let mut lacking = Lacking::new(migration, missing);
            lacking.changed = unstored;
            // What was noted is not durable, and it may be the last.
            lacking.unsaved = true;
            lacking.resumes = Some(Time(0));
            self.lacking = Some(Box::new(lacking));
        }
    }

    /// From now on only what somebody waits for is pulled: the rest may stay where it is for ever.
    pub fn pull_on_demand_only(&mut self) {
        if let Some(lacking) = &mut self.lacking {
            lacking.on_demand_only = true;
        }
    }

    /// The migration whose source has what this node's disk lacks, or will lack once it is here.
    pub fn lacks(&self) -> Option<MigrationId> {
        self.lacking.as_ref().map(|lacking| lacking.migration)
    }

    /// What the disk lacks; nothing when it lacks nothing.
    pub fn missing(&self) -> Option<&Missing> {
        self.lacking.as_ref().map(|lacking| &lacking.missing)
    }

    /// Whether the node that has what the disk lacks is connected, has said so, and has been heard of lately.
    pub fn missing_is_owed(&self) -> bool {
        let lacking = self.lacking.as_ref();
        lacking.is_some_and(|lacking| lacking.is_owed && !lacking.is_silent)
    }

    /// Why what came last of what the disk lacks could not be written here, or not be read there. It is tried again.
    pub fn missing_trouble(&self) -> Option<RequestError> {
        self.lacking.as_ref()?.trouble
    }

    /// The node that has what the disk lacks said something.
    fn source_heard(&mut self) {
        let now = self.now;
        if let Some(lacking) = &mut self.lacking {
            lacking.heard = now;
            lacking.is_silent = false;
        }
    }

    /// Whether what the disk lacks is in its image and at another node, or was when this process began.
    pub fn lacks_in_two_places(&self) -> bool {
        self.lacking.as_ref().is_some_and(|it| it.has_two_places())
    }

    /// Whether the node that gave the disk away is needed beside the image: something that only it has is missing here, as
    /// far as that is durable. Such a disk cannot [leave](Self::start_source).
    pub fn needs_source(&self) -> bool {
        self.lacking.as_ref().is_some_and(|it| it.needs_source())
    }

    /// Whether a request needs data that is not here. It waits then.
    #[inline]
    pub(in crate::controller) fn waits_for_missing(
        &mut self,
        tag: RequestTag,
        extent: Extent,
        writes: bool,
    ) -> bool {
        let ignores = writes && self.has_bug(PlantedBug::ForgetRestOfBlock);
        let Some(lacking) = &mut self.lacking else {
            return false;
        };
        if ignores || !lacking.missing.is_needed(extent, writes) {
            return false;
        }
        lacking.waiting.push_back((tag, self.now));
        self.slots[tag].stage = WorkStage::Lacking;
        self.pull();
        true
    }

    /// A write to the extent is on this node's disk.
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

    /// These blocks are here.
    fn is_here(&mut self, extent: Extent) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        // Of what was here before, the last checkpoint made durable what it could: that must not count as missing
        // again, or it would be pulled over what the guest has flushed.
        let came = lacking.missing.blocks();
        lacking.young.set_those_of(came, extent);
        lacking.missing.clear(extent);
        lacking.changed.set(extent);
        lacking.unsaved = true;
        let tells_early = lacking.needs_source() && !lacking.missing.needs_source();
        self.act(Action::NoteHere { extent });
        if tells_early && self.has_bug(PlantedBug::RepaidEarly) {
            if let Some(lacking) = &mut self.lacking {
                lacking.is_repaid = true;
            }
            self.tell_of_repayment();
        }
        self.wake_for_missing();
        self.checkpoint_if_due();
    }

    /// The disk has left without what it lacked, which its new owner gets where this node would have got it.
    pub(in crate::controller) fn leave_image(&mut self) {
        self.on_image = None;
        let Some(lacking) = self.lacking.take() else {
            return;
        };
        debug_assert!(lacking.waiting.is_empty(), "the guest is held");
        self.is_no_base();
        let migration = lacking.migration;
        self.nothing_is_missing(migration);
        self.notify(Event::LeftImage { migration });
    }

    /// All of the disk is here, durably.
    pub(in crate::controller) fn became_whole(&mut self, migration: MigrationId) {
        let lacking = self.lacking.take();
        debug_assert!(
            lacking.is_some_and(|lacking| lacking.missing.blocks().count() == 0),
            "something is missing"
        );
        self.nothing_is_missing(migration);
        self.notify(Event::Whole { migration });
    }

    /// Tells those from whom something could have been pulled.
    fn nothing_is_missing(&mut self, migration: MigrationId) {
        for (class, is_up) in [
            (TrafficClass::Pull, self.pull_is_up),
            (TrafficClass::Image, self.image_is_up),
        ] {
            if is_up {
                self.send(class, Message::Whole { migration });
            }
        }
    }
}
