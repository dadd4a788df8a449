//! How a guest and the engine wake each other: event counters on which the guest tells of new
//! requests and the engine of answers.

use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{opcode, types};

use super::run::Engine;
use crate::ring::{Completion, Ring, Token};

/// What is written to an event counter to signal it.
static ONE: u64 = 1;

/// The watch on a ring's kick descriptor.
struct Watch {
    kick: OwnedFd,
    /// `None` when the ring has stopped, and the kernel has yet to let go of the descriptor.
    ring: Option<u16>,
}

/// The event counters in use.
#[derive(Default)]
pub(super) struct EventCounters {
    watches: Vec<Option<Watch>>,
    /// Signals that the kernel has not sent.
    signals: u32,
    /// Descriptors that those may still use.
    retired: Vec<OwnedFd>,
}

impl EventCounters {
    /// Whether all signals were sent.
    pub(super) const fn are_sent(&self) -> bool {
        self.signals == 0
    }

    /// Signals an event counter when this turn's operations are submitted.
    pub(super) fn signal(&mut self, uring: &mut Ring, fd: i32) {
        self.signals += 1;
        let entry = opcode::Write::new(types::Fd(fd), (&raw const ONE).cast(), 8).build();
        // SAFETY: the kernel only reads the number, which is static.
        unsafe { uring.push(entry, Token::Signal) };
    }

    /// Keeps a descriptor open until no signal can use it any more.
    pub(super) fn retire(&mut self, fd: Option<OwnedFd>) {
        if self.signals > 0 {
            self.retired.extend(fd);
        }
    }

    /// Waits for a ring's kicks.
    pub(super) fn watch(&mut self, uring: &mut Ring, kick: OwnedFd, ring: u16) -> u32 {
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
            // SAFETY: polling uses no memory; the descriptor stays open until it has ended.
            unsafe { uring.push(entry.build(), Token::Kick(index)) };
        }
    }

    /// Ends all watches.
    pub(super) fn stop_watching(&mut self, uring: &mut Ring) {
        for index in 0..self.watches.len() {
            if self.watches[index].is_some() {
                uring.cancel(Token::Kick(index as u32));
            }
        }
        uring.cancel(Token::Signal);
    }

    /// Waits for the ring's kicks no more.
    pub(super) fn unwatch(&mut self, uring: &mut Ring, watch: u32, ring: u16) {
        let state = self.watches[watch as usize].as_mut();
        // A watch that failed may be another ring's by now.
        let Some(state) = state.filter(|state| state.ring == Some(ring)) else {
            return;
        };
        state.ring = None;
        // What the guest signalled is the ring's next server's to see for itself; left there, the
        // front end would take it for new.
        drain(&state.kick);
        uring.cancel(Token::Kick(watch));
    }
}

/// Sets an event counter to zero without waiting.
fn drain(counter: &OwnedFd) {
    let mut count = [0; 8];
    let mut buffers = [std::io::IoSliceMut::new(&mut count)];
    let flags = rustix::io::ReadWriteFlags::NOWAIT;
    // It may be zero already.
    let _ = rustix::io::preadv2(counter, &mut buffers, u64::MAX, flags);
}

impl Engine {
    /// A signal was sent.
    pub(super) fn signalled(&mut self) {
        let events = &mut self.vhost.events;
        events.signals -= 1;
        if events.signals == 0 {
            events.retired.clear();
            self.settle_front_end();
        }
    }

    /// A guest told of new requests, or a watch ended.
    pub(super) fn kicked(&mut self, index: u32, completion: Completion) {
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
