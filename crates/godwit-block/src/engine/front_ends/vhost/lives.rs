//! The lives of a front end and of its rings.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use crate::engine::config::EngineEvent;
use crate::engine::front_ends::vhost::no_space::Room;
use crate::engine::front_ends::vhost::{FrontEnd, Replies, Settled};
use crate::engine::run::Engine;
use godwit_vhost::protocol::device::FrontEndReply;
use godwit_vhost::protocol::session::{FrontEndCommand, FrontEndError, RingSetup};

impl Engine {
    /// Carries out a step of the vhost-user protocol.
    pub(in crate::engine) fn front_end_command(
        &mut self,
        command: FrontEndCommand,
        reply: FrontEndReply,
    ) {
        let result = match command {
            FrontEndCommand::Attach { socket } => {
                return self.attach_front_end(socket, reply);
            }
            FrontEndCommand::Detach => return self.detach_front_end(reply),
            FrontEndCommand::Stop { ring } => {
                if self.vhost.stop_ring(ring, reply) {
                    self.give_back_missing();
                    self.settle_front_end();
                }
                return;
            }
            FrontEndCommand::Still => {
                self.vhost.still(reply);
                return self.settle_front_end();
            }
            FrontEndCommand::Start { ring, setup } => self.start_ring(ring, *setup),
            command => self.vhost.change(command, &mut self.ring),
        };
        reply(result.map(|()| 0));
    }

    fn attach_front_end(&mut self, socket: UnixStream, reply: FrontEndReply) {
        if self.cx.is_ending() {
            return reply(Err(FrontEndError::Ended));
        }
        if self.vhost.front_end.is_some() {
            match self.vhost.next {
                Some(_) => reply(Err(FrontEndError::Taken)),
                None => self.vhost.next = Some((socket, reply)),
            }
            return;
        }
        self.vhost.front_end = Some(FrontEnd::new(socket));
        self.publish();
        self.cx.tell(EngineEvent::Clients(self.clients()));
        self.client_attaches();
        reply(Ok(0));
    }

    fn start_ring(&mut self, index: u16, setup: RingSetup) -> Result<(), FrontEndError> {
        let ring = &mut self.ring;
        self.vhost.start_ring(index, setup, &self.cx, ring)?;
        // A hypervisor starts rings only where the machine runs, and stops the machine elsewhere first.
        self.cx.core.handle_guest_here(self.cx.now);
        self.drain();
        Ok(())
    }

    /// Prepares for a machine that is about to stand still: its rings may stop at once.
    pub(in crate::engine) fn machine_stands_still(&mut self) {
        if let Some(front_end) = &mut self.vhost.front_end {
            front_end.machine_still = true;
            self.give_back_missing();
            self.settle_front_end();
        }
    }

    /// Detaches a front end that has left: its memory may be gone or given to another.
    fn detach_front_end(&mut self, reply: FrontEndReply) {
        if self.vhost.front_end.is_none() {
            return reply(Ok(0));
        }
        self.vhost.drop_rings(Some(reply), &mut self.ring);
        self.front_end_left();
        self.settle_front_end();
    }

    /// Disconnects the front end at the engine's end.
    pub(in crate::engine) fn hang_up(&mut self) {
        if let Some(front_end) = &self.vhost.front_end {
            let _ = front_end.socket.shutdown(Shutdown::Both);
            self.vhost.drop_rings(None, &mut self.ring);
            self.settle_front_end();
        }
    }

    /// Reports rings that have stopped, and a front end whose last request has ended.
    pub(in crate::engine) fn settle_front_end(&mut self) {
        let mut stopped = match self.vhost.settle() {
            Settled::Gone(replies) => return self.front_end_gone(replies),
            Settled::Stopped(rings) => rings,
        };
        while stopped != 0 {
            let index = stopped.trailing_zeros() as u16;
            stopped &= stopped - 1;
            if let Some(ring) = self.vhost.remove(&mut self.ring, index)
                && let Some(reply) = ring.stopping
            {
                if ring.broken {
                    self.publish();
                } else if !ring.without_room.is_empty() {
                    self.vhost.room = Room::LeftBehind;
                }
                reply(Ok(ring.split.base()));
            }
        }
    }

    fn front_end_gone(&mut self, replies: Replies) {
        self.cx.core.forget_wanted();
        self.room_again();
        self.publish();
        self.cx.tell(EngineEvent::Clients(self.clients()));
        if let Some(stilled) = replies.stilled {
            stilled(Err(FrontEndError::Left));
        }
        if let Some(left) = replies.left {
            left(Ok(0));
        }
        if let Some((socket, reply)) = self.vhost.next.take() {
            self.attach_front_end(socket, reply);
        }
    }

    /// Stops serving a ring, until the guest resets the device.
    pub(in crate::engine) fn break_ring(&mut self, index: u16, why: &dyn std::fmt::Display) {
        let (disk, ring) = (&self.cx.config.disk, &mut self.ring);
        if self.vhost.break_ring(index, why, disk, ring) {
            self.publish();
        }
    }
}
