//! Order of pulls: first blocks with waiting requests, then the blocks written most often (Alg. 3 and 4 of the hybrid
//! storage-transfer paper).

use core::num::NonZeroU64;
use core::time::Duration;

use crate::action::{Action, DiskOperation, DiskTag, PULL_SLOTS, PullSlot};
use crate::authority::Effect;
use crate::controller::Controller;
use crate::controller::governor::token_bucket::TokenBucket;
use crate::controller::requests::slots::{Work, WorkStage};
use crate::controller::transfer::remainder::lacking::Lacking;
use crate::controller::transfer::remainder::missing::HOTTEST;
use crate::controller::transfer::remainder::{PullLink, SILENT_AFTER};
use crate::planted::PlantedBug;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Lba, MigrationId, Time};
use crate::wire::{Message, TrafficClass};

/// Slots reserved for blocks with waiting requests.
const FOR_WAITING: usize = 4;

/// Rest after a failed read, send, write or flush, during which nothing is pulled.
pub(super) const REST: Duration = Duration::from_millis(500);

/// Time for which a part is put off that the other end could not get.
const PUT_OFF: Duration = Duration::from_secs(1);

/// Maximum number of parts put off at once. With more, all pulling rests for a while.
const MOST_PUT_OFF: usize = 64;

/// Parts that the other end could not get; the rest is pulled in the meantime.
#[derive(Debug, Default)]
pub(super) struct PutOff(Vec<(Extent, Time)>);

impl PutOff {
    /// Returns the time at which the first of these parts may be asked for again.
    pub(super) fn next(&self) -> Option<Time> {
        self.0.iter().map(|(_, until)| *until).min()
    }

    /// Advances the clock.
    fn pass_time(&mut self, now: Time) {
        self.0.retain(|(_, until)| *until > now);
    }

    /// Puts a part off. Returns false if too many parts are put off already.
    fn add(&mut self, extent: Extent, until: Time) -> bool {
        let fits = self.0.len() < MOST_PUT_OFF;
        if fits {
            self.0.push((extent, until));
        }
        fits
    }

    fn touches(&self, extent: Extent) -> bool {
        self.0.iter().any(|(other, _)| other.overlaps(extent))
    }
}

/// State of a pull slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pull {
    Free,
    /// The part was asked for.
    Asked(Extent),
    /// The part has arrived, and waits for its turn or is being written.
    Writing(Extent),
}

impl Pull {
    const fn extent(self) -> Option<Extent> {
        match self {
            Self::Free => None,
            Self::Asked(extent) | Self::Writing(extent) => Some(extent),
        }
    }
}

/// Position of the prefetch, which pulls blocks without waiting requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefetch {
    heat: u8,
    from: Lba,
}

impl Prefetch {
    pub(super) const fn new() -> Self {
        Self {
            heat: HOTTEST,
            from: Lba(0),
        }
    }
}

impl Lacking {
    fn is_on_its_way(&self, extent: Extent) -> bool {
        self.pulls
            .iter()
            .filter_map(|pull| pull.extent())
            .any(|other| other.overlaps(extent))
    }

    /// Returns true if no pull is under way.
    pub(super) fn nothing_comes(&self) -> bool {
        self.free_slots() == usize::from(PULL_SLOTS)
    }

    fn free_slots(&self) -> usize {
        self.pulls
            .iter()
            .filter(|pull| **pull == Pull::Free)
            .count()
    }

    /// Asks for a part. Returns `None` if all slots are taken, or the bound allows no pull now.
    fn ask(&mut self, extent: Extent, now: Time) -> Option<Action> {
        let at = self.pulls.iter().position(|pull| *pull == Pull::Free)?;
        let (_, class) = self.missing.place(extent);
        if let Some(bound) = self.bound.as_mut().filter(|_| class == TrafficClass::Pull) {
            if let Err(next) = bound.ready(now) {
                self.paced_until = Some(next);
                return None;
            }
            bound.spend(extent.bytes());
        }
        self.pulls[at] = Pull::Asked(extent);
        let slot = PullSlot(at as u16);
        Some(Action::Send {
            class,
            message: Message::Pull { slot, extent },
        })
    }

    /// Returns the first missing part of the extent that can be pulled now, is not under way and is not put off. The
    /// flag is true if another part is under way.
    fn part_for(&self, extent: Extent) -> (Option<Extent>, bool) {
        let mut from = Lba(0);
        let mut comes = false;
        while let Some(part) = self.missing.part_for(extent, from) {
            let (part, class) = self.missing.place(part);
            let is_on_its_way = self.is_on_its_way(part);
            if !is_on_its_way && !self.put_off.touches(part) && self.can_come(class) {
                return (Some(part), comes);
            }
            comes |= is_on_its_way;
            from = part.end();
        }
        (None, comes)
    }

    /// Returns true if blocks without waiting requests are pulled: only blocks in an image may stay where they are.
    const fn prefetches(&self) -> bool {
        !self.on_demand_only || self.needs_source()
    }

    /// Returns the next part to prefetch, hottest first.
    fn next_prefetch(&mut self) -> Option<Extent> {
        loop {
            let Prefetch { heat, from } = self.prefetch;
            match self.missing.next_of(heat, from) {
                Some(part) => {
                    let (part, class) = self.missing.place(part);
                    self.prefetch.from = part.end();
                    if !self.is_on_its_way(part)
                        && !self.put_off.touches(part)
                        && self.can_come(class)
                        && (class == TrafficClass::Pull || !self.on_demand_only)
                    {
                        return Some(part);
                    }
                }
                None if heat > 0 => {
                    self.prefetch = Prefetch {
                        heat: heat - 1,
                        from: Lba(0),
                    };
                }
                None => return None,
            }
        }
    }

    /// Gives up the pulls of a connection of this class; their parts are asked for again.
    fn nothing_comes_on(&mut self, class: TrafficClass) {
        let missing = &self.missing;
        self.put_off
            .0
            .retain(|(part, _)| missing.place(*part).1 != class);
        for pull in &mut self.pulls {
            if let Pull::Asked(extent) = pull
                && missing.place(*extent).1 == class
            {
                *pull = Pull::Free;
            }
        }
        self.begin_again();
    }

    /// Restarts the prefetch, because a part asked for has not become part of the disk.
    const fn begin_again(&mut self) {
        self.prefetch = Prefetch::new();
    }
}

impl Controller {
    /// Handles time: asks for missing blocks, and fails requests that have waited for too long.
    pub(in crate::controller) fn lacking_timer(&mut self) {
        let now = self.cx.now;
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        let is_due = lacking
            .deadline(self.longest_missing_wait)
            .is_some_and(|at| at <= now);
        lacking.is_silent |= lacking.is_owed && lacking.heard.after(SILENT_AFTER) <= now;
        if is_due {
            self.end_long_waits();
            self.pull();
        }
    }

    /// Asks for missing blocks.
    pub(in crate::controller) fn pull(&mut self) {
        let serves = self.cx.authority.may_serve();
        let now = self.cx.now;
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        lacking.resumes.take_if(|at| *at <= now);
        lacking.paced_until = None;
        lacking.put_off.pass_time(now);
        if serves && lacking.resumes.is_none() {
            self.checkpoint_if_due();
        }
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        if !serves || !lacking.is_somewhere() || lacking.resumes.is_some() {
            return;
        }
        // Parts that were asked for in vain lie behind.
        if lacking.nothing_comes() {
            lacking.begin_again();
        }
        let mut somebody_waits = false;
        let waiting = lacking.waiting.len();
        for at in 0..waiting + lacking.wanted.len() {
            let extent = match at.checked_sub(waiting) {
                None => self.cx.slots[lacking.waiting[at].0].extent,
                Some(at) => Some(lacking.wanted[at].0),
            };
            let Some(extent) = extent else {
                continue;
            };
            loop {
                let (part, comes) = lacking.part_for(extent);
                somebody_waits |= comes || part.is_some();
                let Some(asks) = part.and_then(|part| lacking.ask(part, now)) else {
                    break;
                };
                self.cx.actions.push_back(asks);
            }
        }
        while !somebody_waits
            && lacking.prefetches()
            && lacking.free_slots() > FOR_WAITING
            && let Some(part) = lacking.next_prefetch()
        {
            let Some(asks) = lacking.ask(part, now) else {
                lacking.prefetch.from = part.start();
                break;
            };
            self.cx.actions.push_back(asks);
        }
    }

    /// Notes, at either end, that the connection is up on which the owner pulls from an owing node. The end that
    /// `dialled` owes, and only this end says so. At a node that owes, an accepted connection must not replace the
    /// dialled one: the accepted connection leads to another node. Frames of an older connection must not reach
    /// [`Self::handle_message`] and [`Self::handle_pulled`] any more.
    pub fn handle_pull_up(&mut self, now: Time, dialled: bool) {
        self.handle_pull_lost(now);
        self.pull_link = match dialled {
            true => PullLink::Dialled,
            false => PullLink::Accepted { shows_life: false },
        };
        if !self.cx.has_bug(PlantedBug::ForgetDebt) {
            self.tell_of_debt();
        }
        self.run_ready();
    }

    /// Notes that the node at the other end of the pull connection takes signs of life
    /// ([`Features::OWNER_BEATS`](crate::wire::Features::OWNER_BEATS)).
    pub const fn show_life(&mut self) {
        if let PullLink::Accepted { shows_life } = &mut self.pull_link {
            *shows_life = true;
        }
    }

    /// Notes the loss of the pull connection. Unanswered pulls are repeated on the next connection.
    pub fn handle_pull_lost(&mut self, now: Time) {
        self.cx.now = now;
        self.pull_link = PullLink::Down;
        self.owing.tell_at = None;
        self.owing.link_lost();
        if let Some(lacking) = &mut self.lacking {
            lacking.is_owed = false;
            lacking.nothing_comes_on(TrafficClass::Pull);
        }
        self.pull();
        self.store_that_it_is_whole();
    }

    /// Notes that the connection to the disk's image is up, if [another node owes a part](Self::lacks_in_two_places) of
    /// the missing blocks. The image announces itself with [`Message::Owes`].
    pub fn handle_image_up(&mut self, now: Time) {
        self.handle_image_lost(now);
        self.image_is_up = true;
    }

    /// Notes the loss of the connection to the image.
    pub fn handle_image_lost(&mut self, now: Time) {
        self.cx.now = now;
        self.image_is_up = false;
        if let Some(lacking) = &mut self.lacking {
            lacking.is_in_image = false;
            lacking.nothing_comes_on(TrafficClass::Image);
        }
        // The other place may have blocks without waiting requests.
        self.pull();
        self.store_that_it_is_whole();
    }

    /// Handles the claim of the node that gave the disk away, or of the image, to have the missing blocks.
    pub(in crate::controller) fn owed(
        &mut self,
        class: TrafficClass,
        migration: MigrationId,
        max_bandwidth: Option<NonZeroU64>,
    ) {
        if class == TrafficClass::Image {
            if let Some(lacking) = &mut self.lacking
                && lacking.migration() == migration
                && !lacking.is_in_image
            {
                lacking.is_in_image = true;
                // Blocks of the image were skipped until now.
                lacking.begin_again();
                self.pull();
            }
            return;
        }
        if self.pull_link == PullLink::Dialled {
            // An answer would be taken for the owner's message that nothing is missing.
            return;
        }
        self.tell_of_repayment();
        for effect in self.cx.authority.handle(&Message::Owes {
            migration,
            max_bandwidth,
        }) {
            if let Effect::Send(message) = effect {
                self.cx.send(TrafficClass::Pull, message);
            }
        }
        if self.pull_link == (PullLink::Accepted { shows_life: true }) {
            self.cx.send(TrafficClass::Pull, Message::Ping);
        }
        let now = self.cx.now;
        self.source_heard();
        if let Some(lacking) = &mut self.lacking
            && lacking.migration() == migration
            && !lacking.is_owed
        {
            lacking.is_owed = true;
            lacking.bound = max_bandwidth.map(|limit| TokenBucket::new(limit.get(), now));
            lacking.begin_again();
            self.pull();
        }
    }

    /// Returns true if data for this slot's buffer is expected on a connection of this class. The body asks before
    /// receiving the data.
    pub fn expects_pulled(&self, class: TrafficClass, slot: PullSlot, extent: Extent) -> bool {
        self.lacking.as_ref().is_some_and(|lacking| {
            lacking.pulls.get(usize::from(slot.0)) == Some(&Pull::Asked(extent))
                && lacking.missing.place(extent).1 == class
        })
    }

    /// Handles a pulled part ([`Message::Pulled`]) from a connection of this class; any data is in the slot's buffer.
    /// Returns false if the part was not asked for there: the connection is then useless.
    pub fn handle_pulled(&mut self, now: Time, class: TrafficClass, message: Message) -> bool {
        self.cx.now = now;
        let Message::Pulled {
            slot,
            extent,
            zeroes,
            result,
        } = message
        else {
            return false;
        };
        if !self.expects_pulled(class, slot, extent) {
            return false;
        }
        if class == TrafficClass::Pull {
            self.source_heard();
        }
        if let Some(bound) = self.lacking.as_mut().and_then(|it| it.bound.as_mut())
            && class == TrafficClass::Pull
            && (zeroes || result.is_err())
        {
            bound.give_back(extent.bytes());
        }
        match result {
            Ok(()) => self.write_pulled(slot, extent, zeroes),
            Err(error) => self.pull_failed(slot, extent, error),
        }
        self.run_ready();
        true
    }

    fn write_pulled(&mut self, slot: PullSlot, extent: Extent, zeroes: bool) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        lacking.pulls[usize::from(slot.0)] = Pull::Writing(extent);
        let tag = self
            .cx
            .slots
            .occupy_pull(slot, Work::Pulled { slot, zeroes }, extent);
        self.cx.join(tag);
        self.advance(tag);
    }

    /// Writes pulled data, with no overlapping write under way, unless some of its blocks are here already.
    pub(in crate::controller) fn issue_pulled(
        &mut self,
        tag: RequestTag,
        slot: PullSlot,
        zeroes: bool,
    ) {
        let overwrites = self.cx.has_bug(PlantedBug::PullOverNewer);
        let extent = self.cx.slots[tag].extent;
        let (Some(lacking), Some(extent)) = (&mut self.lacking, extent) else {
            return;
        };
        if !overwrites && !lacking.missing.blocks().covers(extent) {
            return self.end_pull(tag, slot);
        }
        self.cx.slots[tag].stage = WorkStage::Here {
            at_disk: true,
            at_destination: false,
        };
        let fua = false;
        let operation = if zeroes {
            let unmap = true;
            DiskOperation::WriteZeroes { extent, fua, unmap }
        } else {
            DiskOperation::Write { extent, fua }
        };
        self.cx.act(Action::Disk {
            tag: DiskTag::Pulled(slot),
            operation,
        });
    }

    /// Handles the end of the write of pulled data.
    pub(in crate::controller) fn pulled_written(
        &mut self,
        slot: PullSlot,
        result: Result<(), RequestError>,
    ) {
        let tag = self.cx.slots.pull_tag(slot);
        let Some(extent) = self.cx.slots.get(tag).and_then(|slot| slot.extent) else {
            return;
        };
        match result {
            Ok(()) => {
                if let Some(lacking) = &mut self.lacking {
                    lacking.trouble = None;
                }
                self.is_here(extent);
                self.end_pull(tag, slot);
            }
            Err(error) => {
                self.outgoing.leave(&mut self.cx, tag);
                self.cx.slots.release(tag);
                self.pull_failed(slot, extent, error);
            }
        }
    }

    fn end_pull(&mut self, tag: RequestTag, slot: PullSlot) {
        self.cx.slots[tag].stage = WorkStage::Done;
        self.outgoing.leave(&mut self.cx, tag);
        self.cx.slots.release(tag);
        self.cx.act(Action::ReleasePulled { slot });
        if let Some(lacking) = &mut self.lacking {
            lacking.pulls[usize::from(slot.0)] = Pull::Free;
        }
        self.pull();
        self.store_that_it_is_whole();
    }

    /// Handles a part that could not be read there, or written here. A lack of space here is temporary. The other end's
    /// answer [`NotServing`](RequestError::NotServing) is temporary too; other parts are then pulled in the meantime.
    fn pull_failed(&mut self, slot: PullSlot, extent: Extent, error: RequestError) {
        let now = self.cx.now;
        self.cx.act(Action::ReleasePulled { slot });
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        lacking.pulls[usize::from(slot.0)] = Pull::Free;
        lacking.trouble = Some(error).filter(|error| *error != RequestError::NotServing);
        let is_put_off =
            error == RequestError::NotServing && lacking.put_off.add(extent, now.after(PUT_OFF));
        if !is_put_off {
            lacking.resumes = Some(now.after(REST));
            lacking.begin_again();
        }
        match error {
            RequestError::NotServing => self.pull(),
            RequestError::NoSpace => {}
            _ => {
                // The senders of requests given back repeat the requests, and learn of the error then.
                lacking
                    .wanted
                    .retain(|(wanted, _)| !wanted.overlaps(extent));
                self.fail_waiting(extent, error);
            }
        }
        self.store_that_it_is_whole();
    }
}
