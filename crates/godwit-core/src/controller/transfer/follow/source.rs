//! The source of a disk that stays: asks the destination to follow, and holds all answers once the destination is lost.

use crate::controller::requests::Answers;
use crate::controller::requests::slots::{TagList, WorkStage};
use crate::controller::transfer::outgoing::Outgoing;
use crate::controller::transfer::outgoing::stage::Stage;
use crate::controller::{Controller, Switchover};
use crate::event::{AbortReason, Event};
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Epoch, MigrationId, Time};
use crate::wire::{Message, TrafficClass};

pub(in crate::controller) const CHECKPOINTS: Switchover = Switchover::Never { checkpoints: true };

/// Progress of the destination towards following.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::controller) enum Follower {
    /// The destination lacks a part of the disk.
    Behind,
    /// The destination lacks the posted and delayed writes. Every new write waits for the destination.
    Catching,
    /// The destination has every acknowledged write, and was asked to follow.
    Asked,
    /// The destination follows, and the activity log is not stored yet.
    Logging,
    /// The destination follows.
    Following {
        /// Number of the last checkpoint that was marked; 0 before the first.
        marked: u64,
    },
}

impl Follower {
    /// Returns true if every write waits for the destination's acknowledgement.
    #[inline]
    pub(in crate::controller) const fn is_awaited(self) -> bool {
        !matches!(self, Self::Behind)
    }

    /// Returns true if the destination follows.
    pub(in crate::controller) const fn follows(self) -> bool {
        matches!(self, Self::Following { .. })
    }
}

impl Outgoing {
    /// Lets the destination catch up if the disk stays and only remembered writes are left.
    pub(in crate::controller) fn let_catch_up(&mut self) {
        let Some(source) = &mut self.source else {
            return;
        };
        let stays = source.options.switchover.is_never();
        if stays && source.stage == Stage::Converged && source.peer.follower == Follower::Behind {
            source.peer.follower = Follower::Catching;
            // The guest waits for the destination from here on, whatever was promised for the copy.
            source.governor = None;
            source.delayed.release();
        }
    }
}

impl Controller {
    /// Returns true if every write waits for the destination's acknowledgement.
    pub fn awaits_follower(&self) -> bool {
        let source = self.outgoing.source.as_deref();
        source.is_some_and(|source| source.peer.follower.is_awaited())
    }

    /// Asks the destination to follow once the destination has every acknowledged write.
    pub(in crate::controller) fn ask_to_follow(&mut self) {
        let early = self.cx.has_bug(PlantedBug::FollowBehind);
        let Some(source) = &mut self.outgoing.source else {
            return;
        };
        if !source.delayed.is_settled() && !early {
            return self.outgoing.flush_delayed(&mut self.cx);
        }
        if !source.posted.is_empty() && !early {
            return;
        }
        source.peer.follower = Follower::Asked;
        let follow = Message::Follow {
            migration: source.options.migration,
            epoch: self.cx.authority.record().epoch,
            checkpoints: source.options.switchover == CHECKPOINTS,
        };
        self.cx.send(TrafficClass::Control, follow);
    }

    /// Handles the destination's word that the disk follows there.
    pub(in crate::controller) fn followed(&mut self, migration: MigrationId) {
        self.heard();
        let asked = self.outgoing.source.as_deref_mut().filter(|source| {
            source.options.migration == migration && source.peer.follower == Follower::Asked
        });
        if let Some(source) = asked {
            source.peer.follower = Follower::Logging;
            self.begin_activity(migration);
        }
    }

    /// Ends the epoch of a checkpoint: the destination keeps apart every write that is sent from here on. Numbers count
    /// from 1; the destination has all checkpoints up to `whole`. Returns false if this is not the next number, or no
    /// destination follows with checkpoints: the destination then never tells of the checkpoint.
    pub fn mark_checkpoint(&mut self, now: Time, number: u64, whole: u64) -> bool {
        self.cx.now = now;
        let Some(source) = &mut self.outgoing.source else {
            return false;
        };
        let Follower::Following { marked } = &mut source.peer.follower else {
            return false;
        };
        let severed = self.requests.answers != Answers::Flow;
        let is_next = number.checked_sub(1) == Some(*marked);
        if severed || !is_next || source.options.switchover != CHECKPOINTS {
            return false;
        }
        *marked = number;
        let migration = source.options.migration;
        let mark = Message::CheckpointMark { migration, number };
        self.cx.send(TrafficClass::Sync, mark);
        self.turn_at_checkpoint(number, whole);
        true
    }

    /// Holds all answers because the follower is lost. Returns false if the destination does not follow: the migration
    /// then ends as any other.
    pub(in crate::controller) fn sever_source(&mut self, reason: AbortReason) -> bool {
        let Some(source) = &self.outgoing.source else {
            return false;
        };
        if !source.peer.follower.follows() || self.cx.has_bug(PlantedBug::AloneUnasked) {
            return false;
        }
        let migration = source.options.migration;
        if self.requests.answers == Answers::Flow {
            self.requests.answers = Answers::Held;
            self.cx.notify(Event::Severed { migration, reason });
        }
        true
    }

    /// Holds all answers to guests until [`Self::go_alone`] or [`Self::yield_to`]: this node may have lost the right to
    /// serve. For the primary of a protection whose backup is lost, or whose process has started again; then before
    /// the first request. Has no effect on a node that does not serve.
    pub fn hold(&mut self, now: Time) {
        self.cx.now = now;
        if self.cx.authority.may_serve() {
            self.requests.answers = Answers::Held;
        }
    }

    /// Goes on without the destination: a migration of a disk that stays ends, and held requests are answered. The
    /// caller knows that no other node takes the disk.
    pub fn go_alone(&mut self, now: Time) {
        self.cx.now = now;
        if let Some(source) = &mut self.outgoing.source
            && source.options.switchover.is_never()
        {
            source.peer.follower = Follower::Behind;
            self.abort_source(AbortReason::Cancelled);
        }
        self.activity.end(&mut self.cx);
        if self.requests.answers == Answers::Held {
            self.requests.answers = Answers::Flow;
        }
        self.answer_done();
        self.release_held();
        self.run_ready();
    }

    /// Gives up a disk that the destination has taken, and serves in this epoch. The record is stored first; no request
    /// that was held ever succeeds. Returns false if this node does not durably own the disk, or in a later epoch.
    pub fn yield_to(&mut self, now: Time, epoch: Epoch) -> bool {
        self.cx.now = now;
        let effects = self.cx.authority.yield_to(epoch);
        let yields = !effects.is_empty();
        if yields {
            self.activity.leave();
            self.requests.answers = Answers::Held;
        }
        self.apply(effects);
        yields
    }

    /// Ends the part of a source that has durably yielded: the migration is over, and waiting requests fail.
    pub(in crate::controller) fn yielded(&mut self) {
        self.requests.answers = Answers::Fail;
        self.differences.written = None;
        self.outgoing.give_up_source(&mut self.cx);
        for tag in self.cx.slots.select(|slot| slot.is_at_destination()) {
            self.give_up_double_write(tag);
        }
        self.answer_done();
        self.release_held();
    }

    /// Returns true if a read that the local disk has finished may have seen a later write that a follower has not
    /// acknowledged: a lost write must not have been read. Such a read waits for the write, and is then repeated.
    #[inline]
    pub(in crate::controller) fn saw_unacknowledged(&mut self, tag: RequestTag) -> bool {
        if !self.awaits_follower() || self.cx.has_bug(PlantedBug::ReadUnfollowed) {
            return false;
        }
        let slots = &self.cx.slots;
        let Some(extent) = slots[tag].extent.filter(|_| !slots[tag].is_write()) else {
            return false;
        };
        let blocker = self
            .cx
            .table
            .find(extent, |entry| slots[entry.tag].is_at_destination());
        if let Some(blocker) = blocker {
            self.cx.slots[tag].stage = WorkStage::Waiting;
            self.cx.slots.wait_for(blocker, tag);
        }
        blocker.is_some()
    }

    /// Answers the requests that were finished while answers were held.
    fn answer_done(&mut self) {
        let mut done = core::mem::replace(&mut self.requests.done, TagList::EMPTY);
        while let Some(tag) = self.cx.slots.pop(&mut done) {
            self.finish(tag);
        }
    }

    /// Returns true while requests of a disk that was yielded are under way, or its log is being stored: neither may land
    /// on a copy of the disk.
    pub(in crate::controller) fn is_failing_requests(&self) -> bool {
        let fails = self.requests.answers == Answers::Fail && self.requests.admitted > 0;
        fails || self.activity.is_busy()
    }

    /// Returns the result that a finished request may be answered with now; `None` while answers are held.
    #[inline]
    pub(in crate::controller) fn answer_to(
        &self,
        result: Result<(), RequestError>,
    ) -> Option<Result<(), RequestError>> {
        match self.requests.answers {
            Answers::Flow => Some(result),
            Answers::Held => None,
            Answers::Fail if self.cx.has_bug(PlantedBug::AnswerYielded) => Some(result),
            Answers::Fail => Some(Err(RequestError::NotServing)),
        }
    }
}
