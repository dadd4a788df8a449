//! The activity log of a disk that is followed: the areas of this node's image that may differ from the follower's copy.
//!
//! The follower takes the disk when this node dies. If this node comes back, its image is the disk as it was taken,
//! except for writes that the follower did not have, and writes that a power loss has undone. All of these are in areas
//! of the log, so only the areas, and the blocks written since by the new owner, have to be sent.
//!
//! ```text
//!  follower says Follows ─► flush the image, store the log of the unanswered writes ─► Followed
//!  write to another area ─► store the log with the area, then write
//!  many areas written    ─► a turn: flush the image, and await the next checkpoint if there are any; then forget the
//!                           areas that were not written since
//!  alone again           ─► store that there is no log, then write elsewhere
//! ```
//!
//! The log costs nothing while the guest writes to areas of the stored log. A log with too many areas is given up until a
//! later turn has made it short enough: the disks are then compared.

use crate::action::{Action, DiskOperation, DiskTag};
use crate::controller::block_set::BlockSet;
use crate::controller::cx::Cx;
use crate::controller::requests::Answers;
use crate::controller::requests::slots::{Slot, WorkStage};
use crate::controller::transfer::follow::source::{CHECKPOINTS, Follower};
use crate::controller::{Controller, Limits};
use crate::event::Event;
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Lba, MigrationId, Sectors, Time};

/// Sectors of an area between nodes: 4 MiB.
pub const AREA_SECTORS: u32 = 8192;

/// Most areas of a stored log. A longer log is not stored.
pub const MAX_AREAS: usize = 960;

/// An activity log: the migration by which another node followed, and the numbers of the areas, ascending. An area has
/// [`Limits::area_sectors`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActiveAreas {
    /// The migration by which the disk was followed.
    pub of: MigrationId,
    /// Areas that may differ from the follower's copy.
    pub areas: Vec<u32>,
}

/// A log that is stored, or being stored.
#[derive(Debug)]
struct Stored {
    of: MigrationId,
    areas: BlockSet,
}

impl Stored {
    fn activity(&self) -> ActiveAreas {
        ActiveAreas {
            of: self.of,
            areas: self.areas.numbers().map(|area| area as u32).collect(),
        }
    }
}

/// A turn of the log: the areas written before are to be forgotten.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// The checkpoint with the last write before the turn, until the follower has that checkpoint.
    checkpoint: Option<u64>,
    flushed: bool,
}

/// The areas of a disk that is followed.
#[derive(Debug)]
struct Running {
    of: MigrationId,
    /// Areas written since the last turn, or with unanswered writes at that time.
    new: BlockSet,
    /// Areas written before the last turn.
    old: BlockSet,
    /// True once the image was flushed after the follower had everything.
    is_flushed: bool,
    turn: Option<Turn>,
}

/// The activity log of this node's disk.
#[derive(Debug, Default)]
pub(in crate::controller) struct ActivityLog {
    /// Present while another node follows, or followed until it is known who owns the disk.
    running: Option<Running>,
    /// The stored log.
    stored: Option<Stored>,
    /// The log being stored, or the absence of one.
    storing: Option<Option<Stored>>,
    /// True while a flush is at the disk.
    flushing: bool,
    /// True if that flush began before it was wanted.
    flush_is_early: bool,
}

impl ActivityLog {
    /// Notes a write. Returns false if the write has to wait until its area is stored.
    #[inline]
    fn admits(&mut self, extent: Extent) -> bool {
        if let Some(running) = &mut self.running {
            running.new.set(extent);
        }
        let has = |log: &Option<Stored>| log.as_ref().is_none_or(|it| it.areas.covers(extent));
        has(&self.stored) && self.storing.as_ref().is_none_or(has)
    }

    /// Returns the log that should be stored.
    fn wanted(&self) -> Option<Stored> {
        let running = self.running.as_ref().filter(|it| it.is_flushed)?;
        let mut areas = running.new.like();
        areas.add(&running.new);
        areas.add(&running.old);
        let of = running.of;
        (areas.count() <= MAX_AREAS as u64).then_some(Stored { of, areas })
    }

    /// Stores the log, unless that is under way. A log of another migration is replaced by none first.
    fn store(&mut self, cx: &mut Cx) {
        if self.storing.is_none() {
            let other = |it: &Stored| self.stored.as_ref().is_some_and(|old| old.of != it.of);
            self.storing = Some(self.wanted().filter(|it| !other(it)));
            cx.act(Action::StoreActivity);
        }
    }

    /// Returns true if something else than the wanted log is stored and counts.
    fn is_wrong(&self) -> bool {
        let running = self.running.as_ref().filter(|it| it.is_flushed);
        match (running, &self.stored) {
            (Some(running), Some(stored)) => running.of != stored.of,
            (Some(_), None) => self.wanted().is_some(),
            (None, stored) => stored.is_some(),
        }
    }

    fn flush(&mut self, cx: &mut Cx) {
        self.flush_is_early = self.flushing;
        if !core::mem::replace(&mut self.flushing, true) {
            cx.act(Action::Disk {
                tag: DiskTag::ActivityFlush,
                operation: DiskOperation::Flush,
            });
        }
    }

    /// Begins the log of a migration whose destination follows.
    fn begin(&mut self, cx: &mut Cx, of: MigrationId) {
        let new = unanswered(cx);
        self.running = Some(Running {
            of,
            old: new.like(),
            new,
            is_flushed: false,
            turn: None,
        });
        self.flush(cx);
    }

    /// Begins a turn, unless one is under way. `checkpoint` is the checkpoint that ends now.
    fn turn(&mut self, cx: &mut Cx, checkpoint: Option<u64>) {
        let due = |it: &&mut Running| it.turn.is_none() && it.is_flushed;
        let many = u64::from(cx.limits.active_areas);
        let running = self.running.as_mut().filter(due);
        let Some(running) = running.filter(|it| it.new.count() >= many) else {
            return;
        };
        let early = cx.has_bug(PlantedBug::AreaClearedEarly);
        let next = if early {
            running.new.like()
        } else {
            unanswered(cx)
        };
        running.old.add(&core::mem::replace(&mut running.new, next));
        running.turn = Some(Turn {
            checkpoint,
            flushed: false,
        });
        self.flush(cx);
    }

    /// Forgets the areas written before the turn, if the follower has their writes and the image is flushed.
    fn end_turn(&mut self, cx: &mut Cx) {
        let over = |it: &Turn| it.checkpoint.is_none() && it.flushed;
        if let Some(running) = &mut self.running
            && running.turn.as_ref().is_some_and(over)
        {
            running.old.empty();
            running.turn = None;
            if self.is_wrong() {
                self.store(cx);
            }
        }
    }

    /// Notes that the follower has this checkpoint.
    fn checkpoint_is_there(&mut self, cx: &mut Cx, number: u64) {
        let turn = self.running.as_mut().and_then(|it| it.turn.as_mut());
        let hurries = cx.has_bug(PlantedBug::AreaClearedBehind);
        if let Some(turn) = turn {
            turn.checkpoint.take_if(|it| *it <= number || hurries);
        }
        self.end_turn(cx);
    }

    /// Handles the end of the flush.
    fn flushed(&mut self, cx: &mut Cx, result: Result<(), RequestError>) {
        self.flushing = false;
        if core::mem::take(&mut self.flush_is_early) {
            return self.flush(cx);
        }
        let Some(running) = &mut self.running else {
            return;
        };
        if result.is_err() {
            // Nothing would be known of the image after a power loss.
            self.running = None;
        } else if let Some(turn) = &mut running.turn {
            turn.flushed = true;
        } else {
            running.is_flushed = true;
        }
        self.end_turn(cx);
        if self.is_wrong() {
            self.store(cx);
        }
    }

    /// Returns true if the log is as far as the follower needs it.
    fn is_settled(&self) -> bool {
        !self.flushing && self.storing.is_none() && !self.is_wrong()
    }

    /// Ends the log: this node goes on alone.
    pub(in crate::controller) fn end(&mut self, cx: &mut Cx) {
        self.running = None;
        if self.stored.is_some() {
            self.store(cx);
        }
    }

    /// Returns true while a log is being stored or the image is flushed for it.
    pub(in crate::controller) const fn is_busy(&self) -> bool {
        self.storing.is_some() || self.flushing
    }

    /// Leaves the stored log to the next migration to this node.
    pub(in crate::controller) fn leave(&mut self) {
        (self.running, self.stored) = (None, None);
    }
}

impl Cx {
    fn no_areas(&self) -> BlockSet {
        BlockSet::new(self.capacity, self.limits.area_sectors)
    }
}

/// Returns the areas of the unanswered writes.
fn unanswered(cx: &Cx) -> BlockSet {
    let mut areas = cx.no_areas();
    let is_write = |slot: &Slot| slot.is_request() && slot.is_write();
    for tag in cx.slots.select(is_write) {
        if let Some(extent) = cx.slots[tag].extent {
            areas.set(extent);
        }
    }
    areas
}

impl Limits {
    /// Returns the sectors of each area of a log. Nothing differs behind the end of the disk.
    fn areas(self, log: &ActiveAreas, capacity: Sectors) -> impl Iterator<Item = (Lba, Lba)> {
        let length = u64::from(self.area_sectors);
        let starts = log.areas.iter().map(move |area| u64::from(*area) * length);
        let starts = starts.filter(move |start| *start < capacity.0);
        starts.map(move |start| (Lba(start), Lba(capacity.0.min(start + length))))
    }
}

impl Controller {
    /// Begins the activity log of a disk that the destination follows.
    pub(in crate::controller) fn begin_activity(&mut self, migration: MigrationId) {
        self.activity.begin(&mut self.cx, migration);
    }

    /// Lets a write of the guest wait until the activity log has its area. Returns true if so.
    #[inline]
    pub(in crate::controller) fn waits_for_activity(&mut self, tag: RequestTag) -> bool {
        let Some(extent) = self.cx.slots[tag].extent else {
            return false;
        };
        let hurries = self.cx.has_bug(PlantedBug::AreaStoredLate);
        let waits = !self.activity.admits(extent) && !hurries;
        if waits {
            self.cx.slots[tag].stage = WorkStage::Logging;
            self.activity.store(&mut self.cx);
        }
        // A write that fails here severs the follower, and is answered though the copies may differ.
        if let Some(source) = &self.outgoing.source
            && source.peer.follower.follows()
            && source.options.switchover != CHECKPOINTS
            && self.requests.answers == Answers::Flow
        {
            self.activity.turn(&mut self.cx, None);
        }
        waits
    }

    /// Handles the mark of a checkpoint, when the follower has all checkpoints up to `whole`.
    pub(in crate::controller) fn turn_at_checkpoint(&mut self, number: u64, whole: u64) {
        self.activity.checkpoint_is_there(&mut self.cx, whole);
        self.activity.turn(&mut self.cx, Some(number));
    }

    /// Handles the end of the flush for the activity log.
    pub(in crate::controller) fn activity_flushed(&mut self, result: Result<(), RequestError>) {
        self.activity.flushed(&mut self.cx, result);
        self.follow_with_activity();
    }

    /// Returns the content for [`Action::StoreActivity`]; `None` if no log is to be stored any more.
    pub fn activity_to_store(&self) -> Option<ActiveAreas> {
        self.activity
            .storing
            .as_ref()?
            .as_ref()
            .map(Stored::activity)
    }

    /// Notes that the content of the last [`Action::StoreActivity`] is durable; if not `stored`, that no log is stored
    /// instead, durably.
    pub fn handle_activity_stored(&mut self, now: Time, stored: bool) {
        self.cx.now = now;
        let log = self.activity.storing.take().flatten();
        if self.cx.authority.may_serve() {
            self.activity.stored = log.filter(|_| stored);
            if !stored {
                self.activity.running = None;
            }
            if self.activity.is_wrong() {
                self.activity.store(&mut self.cx);
            }
        }
        let waiting = self
            .cx
            .slots
            .select(|slot| slot.stage == WorkStage::Logging);
        self.cx.ready.extend(waiting);
        self.follow_with_activity();
        self.run_ready();
    }

    /// Lets the disk be followed once the activity log is stored.
    fn follow_with_activity(&mut self) {
        let settled = self.activity.is_settled();
        let Some(source) = self.outgoing.source.as_deref().filter(|_| settled) else {
            return;
        };
        if source.peer.follower != Follower::Logging {
            return;
        }
        let migration = source.options.migration;
        self.outgoing.change_stage(&mut self.cx, |source| {
            source.peer.follower = Follower::Following { marked: 0 };
        });
        self.cx.notify(Event::Followed { migration });
    }

    /// Restores the stored activity log of a disk that this node may not own any more. To be called before the first
    /// request.
    pub fn restore_activity(&mut self, activity: &ActiveAreas) {
        let of = activity.of;
        let [mut areas, mut old] = [(); 2].map(|()| self.cx.no_areas());
        for (start, end) in self.cx.limits.areas(activity, self.cx.capacity) {
            areas.set_range(start, end);
        }
        old.add(&areas);
        self.activity.running = Some(Running {
            of,
            new: areas.like(),
            old,
            is_flushed: true,
            turn: None,
        });
        self.activity.stored = Some(Stored { of, areas });
    }

    /// Counts the areas of another node's log as written since this node has taken the disk from there. Has no effect if
    /// another migration brought the disk.
    pub fn may_differ(&mut self, activity: &ActiveAreas) {
        let written = self.differences.written.as_mut();
        if let Some(written) = written.filter(|it| it.since() == activity.of) {
            for (start, end) in self.cx.limits.areas(activity, self.cx.capacity) {
                written.blocks_mut().set_range(start, end);
            }
        }
    }
}
