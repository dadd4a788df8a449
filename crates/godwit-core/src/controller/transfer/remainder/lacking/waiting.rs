//! Requests that wait for missing blocks: their resumption and their timeout.

use core::time::Duration;

use crate::controller::Controller;
use crate::controller::requests::slots::WorkStage;
use crate::controller::transfer::remainder::lacking::Lacking;
use crate::request::{RequestError, RequestTag};
use crate::units::{Extent, Time};

impl Lacking {
    /// Returns the time at which the longest wait reaches the bound.
    pub(super) fn wait_ends(&self, longest: Option<Duration>) -> Option<Time> {
        let (_, since) = self.waiting.front()?;
        Some(since.after(longest?))
    }

    /// Removes and returns the waiting requests that `which` selects.
    fn take_waiting(&mut self, mut which: impl FnMut(RequestTag, Time) -> bool) -> Vec<RequestTag> {
        let mut taken = Vec::new();
        self.waiting.retain(|&(tag, since)| {
            let takes = which(tag, since);
            if takes {
                taken.push(tag);
            }
            !takes
        });
        taken
    }
}

impl Controller {
    /// Sets the maximum wait of a request for missing blocks. Such a request then fails, and the disk goes on. Without
    /// a maximum, requests wait until the blocks are here.
    pub const fn fail_missing_after(&mut self, longest_wait: Duration) {
        self.longest_missing_wait = Some(longest_wait);
    }

    /// Returns the start of the longest current wait for missing blocks.
    pub fn missing_waits_since(&self) -> Option<Time> {
        let (_, since) = self.lacking.as_ref()?.waiting.front()?;
        Some(*since)
    }

    /// Answers the selected requests that wait for missing blocks with [`RequestError::NotServing`]: their sender keeps
    /// the requests, and repeats them later. The blocks are pulled as if the requests still waited.
    pub fn give_back_missing(&mut self, now: Time, which: impl Fn(RequestTag) -> bool) {
        self.cx.now = now;
        let most = self.cx.limits.requests as usize;
        let slots = &self.cx.slots;
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        let given = lacking.take_waiting(|tag, _| which(tag));
        for tag in &given {
            let slot = &slots[*tag];
            if let Some(wanted) = slot.extent.map(|extent| (extent, slot.is_write()))
                && lacking.wanted.len() < most
                && !lacking.wanted.contains(&wanted)
            {
                lacking.wanted.push(wanted);
            }
        }
        self.fail_missing(given, RequestError::NotServing);
        self.run_ready();
    }

    /// Returns true if blocks of requests given back are still missing.
    pub fn wants_missing(&self) -> bool {
        (self.lacking.as_ref()).is_some_and(|lacking| !lacking.wanted.is_empty())
    }

    /// Forgets the blocks of requests given back: their sender is gone.
    pub fn forget_wanted(&mut self) {
        if let Some(lacking) = &mut self.lacking {
            lacking.wanted.clear();
        }
    }

    /// Wakes requests that no longer need missing blocks, or whose clients are gone.
    pub(in crate::controller) fn wake_for_missing(&mut self) {
        let Some(lacking) = &mut self.lacking else {
            return;
        };
        let Lacking {
            waiting,
            missing,
            wanted,
            ..
        } = &mut **lacking;
        wanted.retain(|(extent, writes)| missing.is_needed(*extent, *writes));
        let (slots, ready) = (&self.cx.slots, &mut self.cx.ready);
        waiting.retain(|&(tag, _)| {
            let slot = &slots[tag];
            let needs = |extent| missing.is_needed(extent, slot.is_write());
            let waits = !slot.abandoned && slot.extent.is_some_and(needs);
            if !waits {
                ready.push_back(tag);
            }
            waits
        });
    }

    /// Fails requests that wait for blocks of this extent, which cannot be pulled.
    pub(super) fn fail_waiting(&mut self, extent: Extent, error: RequestError) {
        let slots = &self.cx.slots;
        let hit = self.lacking.as_mut().map(|lacking| {
            lacking.take_waiting(|tag, _| {
                let wanted = slots[tag].extent;
                wanted.is_some_and(|wanted| wanted.overlaps(extent))
            })
        });
        self.fail_missing(hit.unwrap_or_default(), error);
    }

    /// Fails requests that have waited for too long. Their blocks are pulled all the same.
    pub(super) fn end_long_waits(&mut self) {
        let (now, Some(longest)) = (self.cx.now, self.longest_missing_wait) else {
            return;
        };
        let late = self
            .lacking
            .as_mut()
            .map(|lacking| lacking.take_waiting(|_, since| since.after(longest) <= now));
        self.fail_missing(late.unwrap_or_default(), RequestError::Io);
    }

    fn fail_missing(&mut self, tags: Vec<RequestTag>, error: RequestError) {
        for tag in tags {
            self.cx.slots[tag].stage = WorkStage::Done;
            self.cx.slots[tag].result = Err(error);
            self.finish(tag);
        }
    }
}
