//! The commands of the handle, and those that wait until an earlier migration has left the disk alone.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use godwit_core::units::Time;
use godwit_io::page_buffers::Staging;
use godwit_io::ring::{Ring, Token};
use io_uring::{opcode, types};

use crate::engine::handle::Command;

/// Most commands that wait at once.
const MOST_DEFERRED: usize = 4;

/// Longest wait of a starting migration for the reads of an earlier migration.
const READS_WAIT: Duration = Duration::from_secs(5);

/// A command that waits.
pub(super) struct Deferred {
    pub(super) command: Command,
    /// Time at which the command is carried out regardless.
    pub(super) until: Option<Time>,
}

/// The commands to carry out.
pub(super) struct CommandQueue {
    commands: mpsc::Receiver<Command>,
    deferred: Vec<Deferred>,
    /// Event counter that announces commands.
    wake: Arc<OwnedFd>,
    /// Memory for the counter's value.
    wake_count: Staging,
}

impl CommandQueue {
    pub(super) const fn new(
        commands: mpsc::Receiver<Command>,
        wake: Arc<OwnedFd>,
        wake_count: Staging,
    ) -> Self {
        Self {
            commands,
            deferred: Vec::new(),
            wake,
            wake_count,
        }
    }

    /// Waits for the next command.
    pub(super) fn listen(&mut self, ring: &mut Ring) {
        let fd = types::Fd(self.wake.as_raw_fd());
        let (pointer, _) = self.wake_count.room();
        let entry = opcode::Read::new(fd, pointer, 8).build();
        // SAFETY: the counter's memory belongs to the engine, which waits for all operations before the drop; nothing
        // else uses the memory.
        unsafe { ring.push(entry, Token::Wake) };
    }

    /// Returns the next command.
    ///
    /// # Errors
    /// No command is queued, or no handle is left.
    pub(super) fn next(&self) -> Result<Command, mpsc::TryRecvError> {
        self.commands.try_recv()
    }

    /// Returns true if no more commands may wait.
    pub(super) const fn is_full(&self) -> bool {
        self.deferred.len() >= MOST_DEFERRED
    }

    /// Returns true if commands wait.
    pub(super) const fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Lets a command wait.
    pub(super) fn defer(&mut self, command: Command, now: Time) {
        let until = match command {
            Command::StartSource { .. } => Some(now.after(READS_WAIT)),
            _ => None,
        };
        self.put_back(Deferred { command, until });
    }

    /// Lets a command wait on.
    pub(super) fn put_back(&mut self, deferred: Deferred) {
        self.deferred.push(deferred);
    }

    /// Takes the waiting commands.
    pub(super) fn take_deferred(&mut self) -> Vec<Deferred> {
        std::mem::take(&mut self.deferred)
    }

    /// Refuses all commands: the engine has ended.
    pub(super) fn refuse(&mut self) {
        let commands = self.commands.try_iter();
        let deferred = self.deferred.drain(..).map(|deferred| deferred.command);
        commands.chain(deferred).for_each(Command::refuse);
    }
}
