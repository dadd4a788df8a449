//! The signals between a guest and the engine: event counters for the guest's new requests and for the engine's
//! answers.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{opcode, types};

use crate::engine::connections::empty_place;
use crate::engine::run::Engine;
use godwit_io::ring::{Completion, Ring, Token};

/// The value that signals an event counter.
static ONE: u64 = 1;

/// The watch on a ring's kick descriptor.
struct Watch {
    kick: OwnedFd,
    /// Ring of the watch; `None` once the ring has stopped, until the kernel has let go of the descriptor.
    ring: Option<u16>,
}

/// An event counter that signals the other side. At most one signal is on its way: the other side may let its counter
/// grow until it takes no more.
struct Bell {
    counter: OwnedFd,
    signal: Signal,
}

/// The signal of a [`Bell`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Signal {
    /// All signals were sent.
    Sent,
    /// A signal is on its way.
    Sending,
    /// Another signal is due: the one on its way may be too early for the latest event.
    Again,
    /// The bell is not used any more, but the kernel has not let go of the descriptor.
    Retired,
}

/// The index of a [`Bell`].
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct BellId(u32);

/// The event counters in use.
#[derive(Default)]
pub(in crate::engine) struct EventCounters {
    watches: Vec<Option<Watch>>,
    bells: Vec<Option<Bell>>,
}

impl EventCounters {
    /// Adds an event counter to signal.
    pub(in crate::engine) fn install(&mut self, counter: OwnedFd) -> BellId {
        let index = empty_place(&mut self.bells);
        self.bells[index] = Some(Bell {
            counter,
            signal: Signal::Sent,
        });
        BellId(index as u32)
    }

    /// Returns true if all signals of a bell were sent.
    pub(in crate::engine) fn are_sent(&self, bell: Option<BellId>) -> bool {
        let bell = bell.and_then(|id| self.bells[id.0 as usize].as_ref());
        bell.is_none_or(|bell| bell.signal == Signal::Sent)
    }

    /// Sends a signal with this turn's operations.
    pub(in crate::engine) fn signal(&mut self, uring: &mut Ring, id: BellId) {
        if let Some(bell) = &mut self.bells[id.0 as usize] {
            match bell.signal {
                Signal::Sent => bell.signal = Signal::Sending,
                Signal::Sending | Signal::Again => return bell.signal = Signal::Again,
                Signal::Retired => return,
            }
            let fd = types::Fd(bell.counter.as_raw_fd());
            let entry = opcode::Write::new(fd, (&raw const ONE).cast(), 8).build();
            // SAFETY: the kernel only reads the number, which is static; the descriptor stays open until the write has
            // ended.
            unsafe { uring.push(entry, Token::Signal(id.0)) };
        }
    }

    /// Removes an event counter. A signal on its way may not arrive.
    pub(in crate::engine) fn retire(&mut self, uring: &mut Ring, id: Option<BellId>) {
        let Some(id) = id else { return };
        let place = &mut self.bells[id.0 as usize];
        match place {
            Some(bell) if bell.signal != Signal::Sent => {
                bell.signal = Signal::Retired;
                uring.cancel(Token::Signal(id.0));
            }
            _ => *place = None,
        }
    }

    /// Waits for a ring's kicks.
    pub(in crate::engine) fn watch(&mut self, uring: &mut Ring, kick: OwnedFd, ring: u16) -> u32 {
        let index = empty_place(&mut self.watches);
        self.watches[index] = Some(Watch {
            kick,
            ring: Some(ring),
        });
        self.arm(uring, index as u32);
        index as u32
    }

    fn arm(&self, uring: &mut Ring, index: u32) {
        if let Some(watch) = &self.watches[index as usize] {
            let fd = types::Fd(watch.kick.as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true);
            // SAFETY: polling uses no memory; the descriptor stays open until the poll has ended.
            unsafe { uring.push(entry.build(), Token::Kick(index)) };
        }
    }

    /// Ends all watches.
    pub(in crate::engine) fn stop_watching(&mut self, uring: &mut Ring) {
        for index in 0..self.watches.len() {
            if self.watches[index].is_some() {
                uring.cancel(Token::Kick(index as u32));
            }
        }
        for (index, bell) in self.bells.iter().enumerate() {
            if bell.as_ref().is_some_and(|it| it.signal != Signal::Sent) {
                uring.cancel(Token::Signal(index as u32));
            }
        }
    }

    /// Handles a signal that was sent, or cancelled. Returns true if all signals of a bell in use were sent.
    fn signalled(&mut self, uring: &mut Ring, id: BellId) -> bool {
        let place = &mut self.bells[id.0 as usize];
        let Some(bell) = place else { return false };
        match std::mem::replace(&mut bell.signal, Signal::Sent) {
            Signal::Retired => *place = None,
            Signal::Again => self.signal(uring, id),
            Signal::Sent | Signal::Sending => return true,
        }
        false
    }

    /// Handles a kick, or the end of a watch. Returns the kicked ring, and the failure of its watch.
    fn kicked(
        &mut self,
        uring: &mut Ring,
        index: u32,
        completion: Completion,
    ) -> Option<(u16, io::Result<()>)> {
        let place = &mut self.watches[index as usize];
        let ring = place.as_ref()?.ring;
        let result = match completion.result {
            _ if completion.more => Ok(()),
            0.. if ring.is_some() => {
                self.arm(uring, index);
                Ok(())
            }
            result => {
                *place = None;
                Err(io::Error::from_raw_os_error(-result))
            }
        };
        Some((ring?, result))
    }

    /// Stops waiting for the ring's kicks.
    pub(in crate::engine) fn unwatch(&mut self, uring: &mut Ring, watch: u32, ring: u16) {
        let state = self.watches[watch as usize].as_mut();
        // A watch that failed may be another ring's by now.
        let Some(state) = state.filter(|state| state.ring == Some(ring)) else {
            return;
        };
        state.ring = None;
        // The ring's next server looks for requests itself; the front end would take a signal left here for a new one.
        drain(&state.kick);
        uring.cancel(Token::Kick(watch));
    }
}

/// Sets an event counter to zero without waiting.
fn drain(counter: &OwnedFd) {
    let mut count = [0; 8];
    let mut buffers = [io::IoSliceMut::new(&mut count)];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    // The counter may be zero already.
    let _ = rustix::io::preadv2(counter, &mut buffers, u64::MAX, flags);
}

impl Engine {
    /// Handles a signal that was sent, or cancelled.
    pub(in crate::engine) fn signalled(&mut self, index: u32) {
        let events = &mut self.vhost.events;
        if events.signalled(&mut self.ring, BellId(index)) {
            self.settle_front_end();
        }
    }

    /// Handles a guest's notification of new requests, or the end of a watch.
    pub(in crate::engine) fn kicked(&mut self, index: u32, completion: Completion) {
        let events = &mut self.vhost.events;
        if let Some((ring, result)) = events.kicked(&mut self.ring, index, completion) {
            self.vhost.ready |= 1 << ring;
            if let Err(error) = result {
                let why = format_args!("its kicks cannot be waited for: {error}");
                self.break_ring(ring, &why);
            }
        }
    }
}
