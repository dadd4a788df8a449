//! The client itself: one thread sends, one takes replies, and the model is shared by both.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::model::{Model, ReadTicket, WriteTicket};
use super::workload::{Step, Steps, Workload};
use crate::SECTOR;
use crate::nbd::{Command, NbdConnection, NbdReader, NbdTarget, NbdWriter, Reply, Request};

/// Problems kept in words; the rest is only counted.
const KEPT: usize = 20;

#[derive(Clone, Debug, Default)]
pub struct ClientStats {
    /// Requests answered without an error.
    pub completed: u64,
    /// Writes, trims and write-zeroes among them.
    pub writes: u64,
    /// Reads among them, all checked.
    pub reads: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Reads with forbidden content.
    pub violations: u64,
    /// Descriptions of the first twenty errors and violations.
    pub problems: Vec<String>,
    /// Longest latency of a request.
    pub longest: Duration,
}

/// The end of a client's session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The client was stopped, with every request answered.
    Stopped,
    /// The server went away or broke the protocol.
    Disconnected(String),
}

/// The result of a client's session.
#[derive(Debug)]
pub struct Outcome {
    /// The reference. Writes in flight at a disconnect are settled as "happened or not".
    pub model: Model,
    pub stats: ClientStats,
    pub end: End,
}

impl Outcome {
    /// Returns the model if no request failed and no read was wrong.
    pub fn clean(self) -> Result<Model, String> {
        if self.stats.errors == 0 && self.stats.violations == 0 {
            return Ok(self.model);
        }
        Err(format!(
            "{} errors and {} wrong reads in {} requests:\n  {}",
            self.stats.errors,
            self.stats.violations,
            self.stats.completed,
            self.stats.problems.join("\n  ")
        ))
    }
}

/// A guest that checks every read against the model.
#[derive(Debug)]
pub struct VerifyingClient {
    shared: Arc<Shared>,
    socket: NbdWriter,
    sender: JoinHandle<()>,
    receiver: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    model: Model,
    pending: HashMap<u64, Pending>,
    stats: ClientStats,
    paused: bool,
    stopping: bool,
    end: Option<End>,
}

#[derive(Debug)]
struct Pending {
    sent: Instant,
    step: Step,
    ticket: Ticket,
}

#[derive(Debug)]
enum Ticket {
    Write(WriteTicket),
    Read(ReadTicket),
    Flush,
}

impl VerifyingClient {
    /// Connects and starts the load.
    pub fn start(target: &NbdTarget, workload: &Workload, mut model: Model) -> io::Result<Self> {
        let connection = NbdConnection::connect(target)?;
        if connection.size() != model.sectors() * SECTOR as u64 {
            return Err(io::Error::other(format!(
                "{} has {} bytes, the model {} sectors",
                target.uri(),
                connection.size(),
                model.sectors()
            )));
        }
        model.settle();
        let steps = Steps::new(workload, model.sectors());
        let state = State {
            model,
            pending: HashMap::new(),
            stats: ClientStats::default(),
            paused: false,
            stopping: false,
            end: None,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let (reader, writer) = connection.split();
        let socket = writer.try_clone()?;
        let sender = std::thread::spawn({
            let (shared, workload) = (Arc::clone(&shared), workload.clone());
            move || shared.send_all(writer, steps, &workload)
        });
        let receiver = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.receive_all(reader)
        });
        Ok(Self {
            shared,
            socket,
            sender,
            receiver,
        })
    }

    /// Returns the counters so far.
    pub fn stats(&self) -> ClientStats {
        self.shared.lock().stats.clone()
    }

    /// Returns true if the session is over, as when the server went away.
    pub fn disconnected(&self) -> bool {
        self.shared.lock().end.is_some()
    }

    /// Stops sending and waits until every request is answered; returns false on timeout.
    pub fn pause(&self, timeout: Duration) -> bool {
        self.shared.lock().paused = true;
        self.shared.wait(timeout, |state| state.pending.is_empty())
    }

    /// Resumes sending after a pause.
    pub fn resume(&self) {
        self.shared.lock().paused = false;
        self.shared.changed.notify_all();
    }

    /// Waits until this many more requests are answered; returns false on timeout or if the session ends.
    pub fn progress(&self, requests: u64, timeout: Duration) -> bool {
        let goal = self.shared.lock().stats.completed + requests;
        self.shared.wait(timeout, |state| {
            state.stats.completed >= goal || state.end.is_some()
        }) && self.shared.lock().stats.completed >= goal
    }

    /// Waits until the server goes away; returns false on timeout.
    pub fn wait_disconnected(&self, timeout: Duration) -> bool {
        self.shared.wait(timeout, |state| state.end.is_some())
    }

    /// Ends the session: waits at most `timeout` for requests in flight, then closes.
    pub fn stop(mut self, timeout: Duration) -> Outcome {
        self.shared.lock().stopping = true;
        self.shared.changed.notify_all();
        let over = |state: &State| state.pending.is_empty() || state.end.is_some();
        let answered = self.shared.wait(timeout, over);
        if answered && self.shared.lock().end.is_none() {
            self.shared.finish(End::Stopped);
            self.socket.disconnect();
        }
        self.socket.shutdown();
        for thread in [self.sender, self.receiver] {
            if thread.join().is_err() {
                self.shared
                    .finish(End::Disconnected("a client thread panicked".to_owned()));
            }
        }
        let mut state = self.shared.lock();
        if !answered {
            let open = state.pending.len();
            state.stats.errors += open as u64;
            state.keep(format!("{open} requests were not answered in {timeout:?}"));
        }
        state.model.settle();
        let empty = Model::new(0, 0, super::Initial::Zero);
        Outcome {
            model: std::mem::replace(&mut state.model, empty),
            stats: state.stats.clone(),
            end: state.end.clone().unwrap_or(End::Stopped),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, timeout: Duration, done: impl Fn(&State) -> bool) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        while !done(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }

    fn finish(&self, end: End) {
        self.lock().end.get_or_insert(end);
        self.changed.notify_all();
    }

    fn send_all(&self, mut writer: NbdWriter, mut steps: Steps, workload: &Workload) {
        let pace = workload
            .rate
            .map(|rate| Duration::from_secs(1) / rate.max(1));
        let mut due = Instant::now();
        let mut cookie = 0;
        loop {
            let ready = |state: &State| {
                state.stopping
                    || state.end.is_some()
                    || (!state.paused && state.pending.len() < workload.depth)
            };
            while !self.wait(Duration::from_secs(1), ready) {}
            if let Some(pace) = pace {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                // A delayed load does not catch up in a burst.
                due = (due + pace).max(Instant::now() - pace * 32);
            }
            cookie += 1;
            let Some((request, data)) = self.lock().begin(steps.next_step(), cookie) else {
                return;
            };
            if let Err(error) = writer.send(&request, &data) {
                return self.finish(End::Disconnected(format!("cannot send: {error}")));
            }
        }
    }

    fn receive_all(&self, mut reader: NbdReader) {
        let mut buffer = Vec::new();
        loop {
            match self.receive(&mut reader, &mut buffer) {
                Ok(()) => self.changed.notify_all(),
                Err(error) => {
                    return self.finish(End::Disconnected(format!("cannot receive: {error}")));
                }
            }
        }
    }

    fn receive(&self, reader: &mut NbdReader, buffer: &mut Vec<u8>) -> io::Result<()> {
        let reply = reader.reply()?;
        let length = {
            let state = self.lock();
            let pending = state.pending.get(&reply.cookie).ok_or_else(|| {
                io::Error::other(format!("reply to {}, which was not asked", reply.cookie))
            })?;
            match pending.ticket {
                Ticket::Read(_) if reply.error == 0 => pending.step.bytes(),
                _ => 0,
            }
        };
        buffer.resize(length, 0);
        reader.data(buffer)?;
        self.lock().complete(&reply, buffer);
        Ok(())
    }
}

impl State {
    /// Registers the request; returns `None` if no more are to be sent.
    fn begin(&mut self, step: Step, cookie: u64) -> Option<(Request, Vec<u8>)> {
        if self.stopping || self.end.is_some() {
            return None;
        }
        let request = Request {
            command: step.command,
            fua: step.fua,
            cookie,
            offset: step.range.start * SECTOR as u64,
            length: step.bytes() as u32,
        };
        let mut data = Vec::new();
        let ticket = match step.command {
            Command::Read => Ticket::Read(self.model.begin_read(step.range.start)),
            Command::Flush | Command::Disconnect => Ticket::Flush,
            Command::Write => {
                let ticket = self.model.begin_write(step.range.clone(), false);
                data = self.model.data(&ticket, step.range.clone());
                Ticket::Write(ticket)
            }
            Command::Trim | Command::WriteZeroes => {
                Ticket::Write(self.model.begin_write(step.range.clone(), true))
            }
        };
        self.pending.insert(
            cookie,
            Pending {
                sent: Instant::now(),
                step,
                ticket,
            },
        );
        Some((request, data))
    }

    fn complete(&mut self, reply: &Reply, data: &[u8]) {
        let Some(pending) = self.pending.remove(&reply.cookie) else {
            return;
        };
        self.stats.longest = self.stats.longest.max(pending.sent.elapsed());
        if reply.error != 0 {
            self.stats.errors += 1;
            self.keep(format!(
                "{:?} answered with error {}",
                pending.step, reply.error
            ));
            match pending.ticket {
                Ticket::Write(ticket) => self.model.lose_write(&ticket),
                Ticket::Read(ticket) => self.model.drop_read(&ticket),
                Ticket::Flush => {}
            }
            return;
        }
        self.stats.completed += 1;
        match pending.ticket {
            Ticket::Write(ticket) => {
                self.stats.writes += 1;
                self.model.end_write(&ticket);
            }
            Ticket::Read(ticket) => {
                self.stats.reads += 1;
                if let Err(violation) = self.model.end_read(&ticket, data) {
                    self.stats.violations += 1;
                    self.keep(violation.0);
                }
            }
            Ticket::Flush => {}
        }
    }

    fn keep(&mut self, problem: String) {
        if self.stats.problems.len() < KEPT {
            self.stats.problems.push(problem);
        }
    }
}

impl Step {
    const fn bytes(&self) -> usize {
        (self.range.end - self.range.start) as usize * SECTOR
    }
}
