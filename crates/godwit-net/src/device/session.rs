//! The state of the front end's protocol session.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use godwit_vhost::features::LOG_ALL;
use godwit_vhost::memory::GuestRam;
use godwit_vhost::memory::dirty_log::{DirtyLog, WriteLog};
use godwit_vhost::memory::written::WrittenPages;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError, RingSetup};
use godwit_vhost::rings::inflight::InflightRing;

use crate::device::queues::ring::{Guest, NetRing};
use crate::device::wake::Wake;

/// Returns the index of a pair's receive ring.
pub(super) const fn receive_ring(pair: usize) -> usize {
    2 * pair
}

/// Returns the index of a pair's transmit ring.
pub(super) const fn transmit_ring(pair: usize) -> usize {
    2 * pair + 1
}

/// Returns the pair of a receive ring; `None` for a transmit ring.
pub(super) fn pair_received_by(ring: usize) -> Option<usize> {
    ring.is_multiple_of(2).then_some(ring / 2)
}

/// An attached VM.
pub(super) struct Session {
    socket: UnixStream,
    ram: Option<Arc<GuestRam>>,
    log: Option<Arc<DirtyLog>>,
    /// The node's log of pages written here, while on.
    pub(super) written: Option<Arc<WrittenPages>>,
    pub(super) features: u64,
    /// True while all rings rest until the guest's memory changes.
    still: bool,
    pub(super) rings: Vec<Option<Box<NetRing>>>,
    /// Position at which this front end last stopped each ring.
    stopped_at: Vec<Option<u16>>,
}

impl Session {
    /// Creates a session with the rings of this many pairs.
    pub(super) fn new(
        socket: UnixStream,
        pairs: usize,
        written: Option<Arc<WrittenPages>>,
    ) -> Self {
        Self {
            socket,
            ram: None,
            log: None,
            written,
            features: 0,
            still: false,
            rings: (0..2 * pairs).map(|_| None).collect(),
            stopped_at: vec![None; 2 * pairs],
        }
    }

    /// Returns a ring and the guest's memory if the ring may be served.
    pub(super) fn serve(&mut self, index: usize) -> Option<(&mut NetRing, Guest<'_>)> {
        match self.may_serve(index) {
            true => self.open(index),
            false => None,
        }
    }

    /// Returns a disabled ring and the guest's memory once offers in the ring are to be dropped.
    pub(super) fn discard(&mut self, index: usize) -> Option<(&mut NetRing, Guest<'_>)> {
        let discards = |ring: &NetRing| {
            ring.discards_from
                .is_some_and(|from| from <= Instant::now())
        };
        match self.is_usable(index, discards) {
            true => self.open(index),
            false => None,
        }
    }

    /// Returns the next time at which offers in a disabled ring are to be dropped.
    pub(super) fn discards_at(&self, now: Instant) -> Option<Instant> {
        let rings = self.rings.iter().flatten();
        let coming = rings.filter_map(|ring| ring.discards_from.filter(|from| *from > now));
        coming.min()
    }

    fn open(&mut self, index: usize) -> Option<(&mut NetRing, Guest<'_>)> {
        let ram = self.ram.as_deref()?;
        let front_end = self.log.as_deref().filter(|_| self.logs());
        let ring = self.rings[index].as_deref_mut()?;
        let guest = Guest {
            ram,
            log: WriteLog::new(ram, front_end, self.written.as_deref()),
            features: self.features,
        };
        Some((ring, guest))
    }

    /// Returns true if the ring may be served.
    pub(super) fn may_serve(&self, index: usize) -> bool {
        self.is_usable(index, NetRing::is_enabled)
    }

    fn is_usable(&self, index: usize, wanted: impl Fn(&NetRing) -> bool) -> bool {
        let is_there = self.ram.as_deref().is_some_and(|ram| !ram.is_lost());
        let ring = self.rings.get(index).and_then(Option::as_deref);
        is_there && !self.still && ring.is_some_and(|ring| !ring.broken && wanted(ring))
    }

    /// Returns true if a ring that starts at `base` continues where this front end stopped the ring, as far as is
    /// known. A new driver begins with the first buffer.
    pub(super) fn goes_on_at(&self, index: usize, base: u16) -> bool {
        let stopped = self.stopped_at.get(index).copied().flatten();
        stopped.is_none_or(|stopped| stopped == base)
    }

    /// Returns true if the front end has writes to the guest's memory logged, which is so while the memory moves.
    pub(super) const fn logs(&self) -> bool {
        self.features & LOG_ALL != 0
    }

    /// Returns true if any memory shared by the VM has lost pages.
    pub(super) fn has_lost_pages(&self) -> bool {
        let mut rings = self.rings.iter().flatten();
        self.ram.as_ref().is_some_and(|ram| ram.has_lost_pages())
            || self.log.as_ref().is_some_and(|log| log.has_lost_pages())
            || rings.any(|ring| {
                ring.inflight
                    .as_ref()
                    .is_some_and(InflightRing::has_lost_pages)
            })
    }

    /// Returns true if a ring is out of service because of invalid entries.
    pub(super) fn is_broken(&self) -> bool {
        self.rings.iter().flatten().any(|ring| ring.broken)
    }

    /// Disconnects the VM.
    pub(super) fn hang_up(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// Carries out a step of the session alone. The step takes effect at once: between two turns, no chain is in
    /// flight.
    pub(super) fn change(&mut self, command: FrontEndCommand) -> Result<u16, FrontEndError> {
        match command {
            FrontEndCommand::Memory { ram } => {
                let rings = self.rings.iter().flatten();
                let lost = rings
                    .filter_map(|ring| ring.split.check(ram.memory()).err())
                    .next();
                self.ram = Some(ram);
                self.go_on();
                if let Some(error) = lost {
                    return Err(error.into());
                }
            }
            FrontEndCommand::Still => self.still = true,
            FrontEndCommand::GoOn => self.go_on(),
            FrontEndCommand::Log { log } => self.log = Some(log),
            FrontEndCommand::Features { features } => self.features = features,
            FrontEndCommand::Start { ring, setup } => self.start(ring, *setup)?,
            FrontEndCommand::Stop { ring } => {
                let stopped = self.slot(ring)?.take().ok_or(FrontEndError::Left)?;
                // The ring's next server looks at the ring without a kick.
                stopped.kick.clear();
                let base = stopped.split.base();
                self.stopped_at[usize::from(ring)] = Some(base);
                return Ok(base);
            }
            FrontEndCommand::Enable { ring, enabled } => {
                if let Some(ring) = self.slot(ring)? {
                    ring.enable(enabled);
                }
            }
            FrontEndCommand::Call { ring, call } => {
                let call = call.and_then(|counter| Wake::adopt(counter).ok());
                if let Some(ring) = self.slot(ring)? {
                    // A signal on the old eventfd may have come too late to be seen.
                    call.iter().for_each(Wake::signal);
                    ring.call = call;
                }
            }
            FrontEndCommand::Error { ring, error } => {
                let error = error.and_then(|counter| Wake::adopt(counter).ok());
                if let Some(ring) = self.slot(ring)? {
                    ring.error = error;
                }
            }
            FrontEndCommand::RingLog { ring, log } => {
                if let Some(ring) = self.slot(ring)? {
                    ring.split.log = log;
                }
            }
            FrontEndCommand::Attach { .. }
            | FrontEndCommand::Detach
            | FrontEndCommand::Announce { .. } => {}
        }
        Ok(0)
    }

    /// Serves the rings again, and looks at each without a kick.
    fn go_on(&mut self) {
        self.still = false;
        for ring in self.rings.iter_mut().flatten() {
            ring.ready = true;
        }
    }

    fn slot(&mut self, index: u16) -> Result<&mut Option<Box<NetRing>>, FrontEndError> {
        let slot = self.rings.get_mut(usize::from(index));
        slot.ok_or(FrontEndError::Ring(
            godwit_vhost::rings::split::RingError::Layout,
        ))
    }

    fn start(&mut self, index: u16, setup: RingSetup) -> Result<(), FrontEndError> {
        if self.slot(index)?.is_some() {
            return Err(FrontEndError::Running);
        }
        let ram = self.ram.as_ref().ok_or(FrontEndError::NoMemory)?;
        let opened = setup.open(ram, index)?;
        let counters = [Some(setup.kick), setup.call, setup.error]
            .map(|counter| counter.and_then(|counter| Wake::adopt(counter).ok()));
        let ring =
            NetRing::new(opened, setup.enabled, counters).ok_or(FrontEndError::NotEventfd)?;
        // The previous server may have ended between a completion and the signal.
        ring.call.iter().for_each(Wake::signal);
        *self.slot(index)? = Some(Box::new(ring));
        Ok(())
    }
}
