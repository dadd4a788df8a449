//! A ring that is being served.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use godwit_vhost::memory::GuestRam;
use godwit_vhost::memory::dirty_log::{OutsideLog, WriteLog};
use godwit_vhost::protocol::session::OpenedRing;
use godwit_vhost::rings::chain::{Chain, ChainError};
use godwit_vhost::rings::inflight::InflightRing;
use godwit_vhost::rings::split::{RingError, SplitRing};

use crate::device::wake::Wake;

/// Grace period before offers in a disabled ring are dropped: a front end may enable a ring only after its start.
const STARTS: Duration = Duration::from_millis(100);

/// The reason why a ring cannot be served any further.
#[derive(Debug, thiserror::Error)]
pub(in crate::device) enum Broken {
    /// The ring itself is invalid.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The descriptors of a packet are invalid.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// The dirty log is too short.
    #[error(transparent)]
    Log(#[from] OutsideLog),
    /// A chain starts at a descriptor that does not exist or is in use.
    #[error("a packet starts at descriptor {0}, which does not exist or is in use")]
    Head(u16),
    /// A buffer is outside of guest memory.
    #[error("a buffer is not guest memory")]
    Buffer,
}

/// The guest memory that holds a ring, and the logs of writes to the memory.
#[derive(Clone, Copy)]
pub(in crate::device) struct Guest<'a> {
    pub(in crate::device) ram: &'a GuestRam,
    pub(in crate::device) log: WriteLog<'a>,
    /// Features that the driver has accepted.
    pub(in crate::device) features: u64,
}

pub(in crate::device) struct NetRing {
    pub(in crate::device) split: SplitRing,
    pub(in crate::device) inflight: Option<InflightRing>,
    /// Chains that an earlier server took and did not complete.
    again: VecDeque<u16>,
    /// Time from which offers of the guest are dropped; `None` while the ring is enabled.
    pub(in crate::device) discards_from: Option<Instant>,
    pub(in crate::device) broken: bool,
    /// True if the ring may hold new chains: the guest has notified, or was not asked to notify.
    pub(in crate::device) ready: bool,
    pub(in crate::device) kick: Wake,
    pub(in crate::device) call: Option<Wake>,
    pub(in crate::device) error: Option<Wake>,
}

fn discards_from(enabled: bool) -> Option<Instant> {
    (!enabled).then(|| Instant::now() + STARTS)
}

/// The origin of a chain, for putting the chain back.
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

    pub(in crate::device) fn enable(&mut self, enabled: bool) {
        self.discards_from = discards_from(enabled);
        self.ready = true;
    }

    /// Returns true if packets pass through the ring.
    pub(in crate::device) const fn is_enabled(&self) -> bool {
        self.discards_from.is_none()
    }

    /// Takes the next chain, and walks the descriptors.
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

    /// Puts back the chains that were taken last, given in the order of taking.
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

    /// Returns a chain to the guest with the number of bytes written into the chain.
    pub(in crate::device) fn answer(&mut self, taken: Taken, written: u32) {
        if !taken.is_again
            && let Some(inflight) = &mut self.inflight
        {
            inflight.taken(taken.head);
        }
        self.split.answer(taken.head, written);
    }

    /// Asks the guest to notify of new chains. Returns true if the ring has more already.
    pub(in crate::device) fn rest(&mut self, guest: Guest<'_>) -> Result<bool, Broken> {
        self.ready = self.split.listen(guest.ram.memory(), guest.log)?;
        Ok(self.ready)
    }

    /// Asks the guest not to notify of chains for which there is no room, once some are offered. The ring stays ready, and
    /// is looked at when there is room. An empty ring stays untouched: a write would change the guest's memory.
    pub(in crate::device) fn ignore_waiting(&mut self, guest: Guest<'_>) -> Result<(), Broken> {
        let memory = guest.ram.memory();
        if self.split.available(memory)? != self.split.base() {
            self.split.ignore(memory, guest.log)?;
        }
        Ok(())
    }

    /// Asks the guest to notify of chains beyond the offered ones, some of which may not be taken yet. Returns true if
    /// the guest has offered more already.
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

    /// Publishes the completed chains, and signals the guest if the guest asked for a signal.
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
