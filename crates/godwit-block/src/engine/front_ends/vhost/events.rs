//! The signals between a guest and the engine: event counters for the guest's new requests and for the engine's
//! answers.

use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{opcode, types};

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
    sending: bool,
    /// True if another signal is due: the one on its way may be too early for the latest event.
    again: bool,
    /// True once unused, until the kernel has let go of the descriptor.
    retired: bool,
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
        let index = match self.bells.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.bells.push(None);
                self.bells.len() - 1
            }
        };
        self.bells[index] = Some(Bell {
            counter,
            sending: false,
            again: false,
            retired: false,
        });
        BellId(index as u32)
    }

    /// Returns true if all signals of a bell were sent.
    pub(in crate::engine) fn are_sent(&self, bell: Option<BellId>) -> bool {
        let bell = bell.and_then(|id| self.bells[id.0 as usize].as_ref());
        bell.is_none_or(|bell| !bell.sending)
    }

    /// Sends a signal with this turn's operations.
    pub(in crate::engine) fn signal(&mut self, uring: &mut Ring, id: BellId) {
        if let Some(bell) = &mut self.bells[id.0 as usize] {
            if std::mem::replace(&mut bell.sending, true) {
                bell.again = true;
                return;
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
            Some(bell) if bell.sending => {
                bell.retired = true;
                uring.cancel(Token::Signal(id.0));
            }
            _ => *place = None,
        }
    }

    /// Waits for a ring's kicks.
    pub(in crate::engine) fn watch(&mut self, uring: &mut Ring, kick: OwnedFd, ring: u16) -> u32 {
        let index = match self.watches.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.watches.push(None);
                self.watches.len() - 1
            }
        };
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
            if bell.as_ref().is_some_and(|bell| bell.sending) {
                uring.cancel(Token::Signal(index as u32));
            }
        }
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
    let mut buffers = [std::io::IoSliceMut::new(&mut count)];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    // The counter may be zero already.
    let _ = rustix::io::preadv2(counter, &mut buffers, u64::MAX, flags);
}

impl Engine {
    /// Handles a signal that was sent, or cancelled.
    pub(in crate::engine) fn signalled(&mut self, index: u32) {
        let place = &mut self.vhost.events.bells[index as usize];
        let Some(bell) = place else { return };
        bell.sending = false;
        if bell.retired {
            *place = None;
        } else if std::mem::take(&mut bell.again) {
            self.vhost.events.signal(&mut self.ring, BellId(index));
        } else {
            self.settle_front_end();
        }
    }

    /// Handles a guest's notification of new requests, or the end of a watch.
    pub(in crate::engine) fn kicked(&mut self, index: u32, completion: Completion) {
        let Some(watch) = &self.vhost.events.watches[index as usize] else {
            return;
        };
        match watch.ring {
            None if completion.more => {}
            None => self.vhost.events.watches[index as usize] = None,
            Some(ring) => {
                self.vhost.ready |= 1 << ring;
                if completion.more {
                    return;
                }
                match completion.result {
                    0.. => self.vhost.events.arm(&mut self.ring, index),
                    errno => {
                        let error = std::io::Error::from_raw_os_error(-errno);
                        self.vhost.events.watches[index as usize] = None;
                        self.break_ring(
                            ring,
                            &format_args!("its kicks cannot be waited for: {error}"),
                        );
                    }
                }
            }
        }
    }
}
