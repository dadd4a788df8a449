//! A ring being served.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use godwit_vhost::memory::GuestRam;
use godwit_vhost::memory::dirty_log::{DirtyLog, OutsideLog};
use godwit_vhost::protocol::session::OpenedRing;
use godwit_vhost::rings::chain::{Chain, ChainError};
use godwit_vhost::rings::inflight::InflightRing;
use godwit_vhost::rings::split::{RingError, SplitRing};

use crate::device::wake::Wake;

/// How long a ring is left alone that is not enabled: a front end may enable it only after it has started it.
const STARTS: Duration = Duration::from_millis(100);

/// Why a ring cannot be served any further.
#[derive(Debug, thiserror::Error)]
pub(in crate::device) enum Broken {
    /// The ring itself.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A packet's descriptors.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// The log of written pages is too short.
    #[error(transparent)]
    Log(#[from] OutsideLog),
    /// A packet starts where none may.
    #[error("a packet starts at descriptor {0}, which does not exist or is in use")]
    Head(u16),
    /// A buffer is not memory.
    #[error("a buffer is not guest memory")]
    Buffer,
}

/// Where a ring's memory is, and what is recorded of what is written there.
#[derive(Clone, Copy)]
pub(in crate::device) struct Guest<'a> {
    pub(in crate::device) ram: &'a GuestRam,
    pub(in crate::device) log: Option<&'a DirtyLog>,
    /// Features that the driver took.
    pub(in crate::device) features: u64,
}

/// A ring.
pub(in crate::device) struct NetRing {
    pub(in crate::device) split: SplitRing,
    pub(in crate::device) inflight: Option<InflightRing>,
    /// Chains that an earlier server took and did not answer.
    again: VecDeque<u16>,
    /// From when on what the guest offers is dropped; nothing while the ring is enabled.
    pub(in crate::device) discards_from: Option<Instant>,
    pub(in crate::device) broken: bool,
    /// Whether anything may be there: the guest has told of it, or was not asked to.
    pub(in crate::device) ready: bool,
    pub(in crate::device) kick: Wake,
    pub(in crate::device) call: Option<Wake>,
    pub(in crate::device) error: Option<Wake>,
}

fn discards_from(enabled: bool) -> Option<Instant> {
    (!enabled).then(|| Instant::now() + STARTS)
}

/// Where a chain came from, to be put back there.
#[derive(Clone, Copy, Debug)]
pub(in crate::device) struct Taken {
    pub(in crate::device) head: u16,
    is_again: bool,
}

impl NetRing {
    pub(in crate::device) fn new(
        opened: OpenedRing,
        enabled: bool,
        [kick, call, error]: [Option<Wake>; 3],
    ) -> Option<Self> {
        Some(Self {
            split: opened.split,
            inflight: opened.inflight,
            again: opened.again.into(),
            discards_from: discards_from(enabled),
            broken: false,
            ready: true,
            kick: kick?,
            call,
            error,
        })
    }

    /// Enables the ring, or disables it.
    pub(in crate::device) fn enable(&mut self, enabled: bool) {
        self.discards_from = discards_from(enabled);
        self.ready = true;
    }

    /// Whether packets go through it.
    pub(in crate::device) const fn is_enabled(&self) -> bool {
        self.discards_from.is_none()
    }

    /// Takes the next chain, and follows it.
    pub(in crate::device) fn take(
        &mut self,
        guest: Guest<'_>,
        chain: &mut Chain,
    ) -> Result<Option<Taken>, Broken> {
        let memory = guest.ram.memory();
        let again = self.again.front().copied();
        let head = match again {
            Some(head) => head,
            None => match self.split.peek(memory)? {
                Some(head) => head,
                None => return Ok(None),
            },
        };
        if !self.split.may_start_at(head) {
            return Err(Broken::Head(head));
        }
        let layout = self.split.layout();
        chain.follow(memory, layout.descriptors, layout.size, head)?;
        if again.is_some() {
            self.again.pop_front();
        } else {
            self.split.take();
        }
        self.split.begin(head);
        Ok(Some(Taken {
            head,
            is_again: again.is_some(),
        }))
    }

    /// Puts chains back that were the last to be taken, given in the order in which they were.
    pub(in crate::device) fn put_back(&mut self, taken: &[Taken]) {
        for chain in taken.iter().rev() {
            self.split.put_back(chain.head);
            if chain.is_again {
                self.again.push_front(chain.head);
            } else {
                self.split.set_base(self.split.base().wrapping_sub(1));
            }
        }
    }

    /// The guest gets a chain back, into which so many bytes were written.
    pub(in crate::device) fn answer(&mut self, taken: Taken, written: u32) {
        if !taken.is_again
            && let Some(inflight) = &mut self.inflight
        {
            inflight.taken(taken.head);
        }
        self.split.answer(taken.head, written);
    }

    /// Asks the guest to tell when there is more; true when there is already.
    pub(in crate::device) fn rest(&mut self, guest: Guest<'_>) -> Result<bool, Broken> {
        self.ready = self.split.listen(guest.ram.memory(), guest.log)?;
        Ok(self.ready)
    }

    /// Asks the guest to tell when it offers more than it has offered so far, which is not all taken; true when it did
    /// already.
    pub(in crate::device) fn rest_behind(
        &mut self,
        guest: Guest<'_>,
        offered: u16,
    ) -> Result<bool, Broken> {
        let base = self.split.base();
        self.split.set_base(offered);
        let more = self.rest(guest);
        self.split.set_base(base);
        more
    }

    /// Shows the guest what it got back, and wakes it if it wants that.
    pub(in crate::device) fn publish(&mut self, guest: Guest<'_>) -> Result<(), Broken> {
        let memory = guest.ram.memory();
        let wants = self
            .split
            .publish(memory, guest.log, self.inflight.as_ref())?;
        if let Some(call) = self.call.as_ref().filter(|_| wants) {
            call.signal();
        }
        Ok(())
    }
}
