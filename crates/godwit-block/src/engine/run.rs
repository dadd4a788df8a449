//! The engine's thread: its state and its loop.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};

use godwit_core::action::PULL_SLOTS;
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{MigrationId, Sectors, Time};
use godwit_core::{Controller, Missing, Written};

use crate::engine::config::{EngineConfig, EngineError, EngineEvent, Restored};
use crate::engine::connections::{Connections, Life};
use crate::engine::context::Context;
use crate::engine::disk::Disk;
use crate::engine::front_ends::nbd::Nbd;
use crate::engine::front_ends::vhost::Vhost;
use crate::engine::handle::{Command, Published};
use crate::engine::kept::Kept;
use crate::engine::peers::forwarding::{Forwarding, MOST_SERVED, Served};
use crate::engine::peers::links::Moves;
use crate::engine::peers::pulling::Pulls;
use crate::engine::priority::Priority;
use crate::engine::queue::CommandQueue;
use crate::engine::slots::Slots;
use crate::engine::slots::chunks::Chunks;
use crate::engine::slots::memory::Memory;
use crate::engine::stats::snapshot::Snapshot;
use crate::engine::stats::{Stats, thread_cpu_time};
use crate::image::Image;
use crate::image::notes::missing::MissingNotes;
use crate::image::notes::written;
use godwit_io::page_buffers::Staging;
use godwit_io::ring::{Completion, Ring, Token};

/// Interval at which a busy engine publishes its state and looks for delays.
const TICK: Duration = Duration::from_millis(100);

/// Time limit for the kernel to release the engine's memory at its end.
const RELEASE: Duration = Duration::from_secs(5);

/// Completions handled before the next look at the ring.
const BATCH: usize = 256;

/// An engine's thread: its parts, between which it passes events.
///
/// A part owns its state. A method of the engine takes an event to its parts, then carries out the controller's
/// actions.
pub(super) struct Engine {
    pub(super) cx: Context,
    pub(super) ring: Ring,
    pub(super) queue: CommandQueue,
    pub(super) memory: Memory,
    pub(super) disk: Disk,
    pub(super) kept: Kept,
    pub(super) connections: Connections,
    pub(super) nbd: Nbd,
    pub(super) vhost: Vhost,
    pub(super) moves: Moves,
    pub(super) forwarding: Forwarding,
    pub(super) served: Served,
    pub(super) pulls: Pulls,
    /// Failure that ends the engine.
    pub(super) broken: Option<EngineError>,
    clock: Clock,
    published: Published,
}

/// The time of the engine's thread.
struct Clock {
    started: Instant,
    /// Time of the next tick, while the engine is busy.
    tick_at: Option<Time>,
}

impl Clock {
    fn now(&self) -> Time {
        Time(self.started.elapsed().as_nanos() as u64)
    }
}

/// The parameters of an engine's thread.
pub(super) struct Parts {
    pub(super) config: EngineConfig,
    pub(super) image: Image,
    pub(super) record: AuthorityRecord,
    pub(super) restored: Restored,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) wake: Arc<OwnedFd>,
    pub(super) published: Published,
    pub(super) events: Box<dyn Fn(EngineEvent) + Send>,
}

impl EngineConfig {
    /// Returns the controller of the disk, as the record and the stored state have it, and the notes of missing parts.
    fn controller(
        &self,
        record: AuthorityRecord,
        restored: Restored,
        capacity: Sectors,
    ) -> (Controller, Option<MissingNotes>) {
        let mut core = Controller::new(self.limits, capacity, record);
        // The standard library's hashers have random keys, which differ each time.
        let session = RandomState::new().build_hasher().finish();
        core.resume_forwarding(self.shared, session);
        if let Some(longest) = self.longest_missing_wait {
            core.fail_missing_after(longest);
        }
        if self.surpassed {
            core.surpass(Time(0));
        }
        core.bound_owed(self.owed_bandwidth);
        if self.on_image && record.owes().is_some() {
            core.is_no_base();
        }
        let Restored {
            missing,
            written,
            compared,
            activity,
        } = restored;
        if let Some(log) = activity {
            core.restore_activity(&log);
        }
        if let Some(written) = written {
            core.restore_written(written);
        }
        let notes = missing.map(|(missing, notes)| {
            core.restore_missing(missing);
            if self.pull_on_demand_only {
                core.pull_on_demand_only();
            }
            notes
        });
        if let Some(words) = compared.map(|it| it.map(|blocks| blocks.words().collect::<Vec<_>>()))
            && core.begin_comparison().is_ok()
        {
            core.end_comparison(&words[0], &words[1]);
        }
        (core, notes)
    }

    /// Maps the memory for data.
    fn memory(&self) -> io::Result<Memory> {
        let slots = Slots::new(
            self.limits.requests,
            self.memory.0 as usize,
            self.max_clients as usize,
            // The forwarding nodes, and one that replaces another.
            MOST_SERVED + 1,
        )?;
        Ok(Memory {
            slots,
            chunks: Chunks::default(),
            owed: Chunks::default(),
        })
    }

    /// Returns the usual maximum of disk operations in flight.
    fn operations(&self) -> usize {
        let limits = &self.limits;
        let chunks = usize::from(limits.window_chunks) + usize::from(limits.delayed_chunks);
        let pulls = 2 * usize::from(PULL_SLOTS);
        limits.requests as usize + chunks + pulls
    }
}

impl Engine {
    /// Builds the engine on its own thread, which the ring belongs to.
    pub(super) fn new(parts: Parts) -> Result<Self, EngineError> {
        let Parts {
            config,
            image,
            record,
            restored,
            commands,
            wake,
            published,
            events,
        } = parts;
        let refused = |action: &'static str| {
            let disk = config.disk.clone();
            move |source: io::Error| EngineError::Start {
                disk,
                action,
                source,
            }
        };
        let ring = Ring::new().map_err(refused("set up io_uring"))?;
        let capacity = image.capacity;
        let beside = image.path.parent().unwrap_or(Path::new("/"));
        let kept = Kept::new(config.kept_in.as_deref().unwrap_or(beside).to_owned());
        let disk = Disk::new(image, config.disk.clone(), config.operations())
            .map_err(refused("prepare the image"))?;
        let memory = config
            .memory()
            .map_err(refused("map memory for requests"))?;
        let wake_count = Staging::new(8).map_err(refused("map memory for commands"))?;
        let stats = Stats::new(Time(0)).map_err(io::Error::other);
        let stats = stats.map_err(refused("set up its histogram"))?;
        let (core, notes) = config.controller(record, restored, capacity);
        Ok(Self {
            ring,
            queue: CommandQueue::new(commands, wake, wake_count),
            memory,
            disk,
            kept,
            connections: Connections::default(),
            nbd: Nbd::default(),
            vhost: Vhost::new(config.limits.requests as usize),
            moves: Moves::default(),
            forwarding: Forwarding::default(),
            served: Served::default(),
            pulls: Pulls::new(notes),
            broken: None,
            cx: Context {
                config,
                core,
                stats,
                priority: Priority::default(),
                now: Time(0),
                shutdown: None,
                events,
            },
            clock: Clock {
                started: Instant::now(),
                tick_at: None,
            },
            published,
        })
    }

    /// Runs until the engine shuts down.
    pub(super) fn run(&mut self) -> Result<(), EngineError> {
        let mut batch = [Completion {
            token: Token::Wake,
            result: 0,
            more: false,
        }; BATCH];
        self.queue.listen(&mut self.ring);
        self.run_commands();
        self.drain();
        loop {
            self.end_turn();
            if let Some(error) = self.broken.take() {
                return Err(error);
            }
            if self.is_finished() {
                break;
            }
            let counters = &mut self.cx.stats.counters;
            let (connections, memory) = (&mut self.connections, &mut self.memory);
            let timeout = if self.moves.compress_waiting(connections, memory, counters) {
                Some(Duration::ZERO)
            } else {
                self.timeout()
            };
            self.ring
                .wait(timeout)
                .map_err(|source| self.cx.failure("wait for I/O", &source))?;
            self.cx.now = self.clock.now();
            loop {
                let count = self.ring.completions(&mut batch);
                self.completed_batch(&batch[..count]);
                if count < BATCH {
                    break;
                }
            }
            self.sample_link();
            if self
                .cx
                .core
                .next_deadline()
                .is_some_and(|at| at <= self.cx.now)
            {
                self.cx.core.handle_timer(self.cx.now);
                self.drain();
            }
            if self.clock.tick_at.is_some_and(|at| at <= self.cx.now) {
                self.tick();
            }
            self.send_gathered();
        }
        self.publish();
        rustix::fs::fdatasync(self.disk.file()).map_err(|errno| EngineError::Flush {
            disk: self.cx.config.disk.clone(),
            source: errno.into(),
        })?;
        if self.cx.core.record().ownership == Ownership::Serving && self.cx.core.serves() {
            self.store_written();
        }
        Ok(())
    }

    /// Stores for the next process the blocks written since the disk arrived, and the differences from its image.
    /// Without them the next move costs more.
    fn store_written(&self) {
        let Some(fingerprint) = self.disk.fingerprint() else {
            return;
        };
        let capacity = self.disk.capacity();
        let store = |path: &Path, written: &Written| {
            if let Err(error) = written::store(path, capacity, fingerprint, written) {
                let disk = &self.cx.config.disk;
                tracing::warn!(disk, %error, "cannot store what was written to the disk");
            }
        };
        if let (Some(path), Some(written)) = (&self.cx.config.written, self.cx.core.written()) {
            store(path, written);
        }
        let compared = self.cx.core.compared_words();
        for (path, words) in self
            .cx
            .config
            .compared
            .iter()
            .flatten()
            .zip(compared.iter().flatten())
        {
            if let Some(blocks) = Written::from_words(MigrationId::default(), capacity, words) {
                store(path, &blocks);
            }
        }
    }

    /// Handles the completions that bring answers, and starts to send the answers, before it reads new requests: a
    /// guest gets the former while the kernel still takes the latter.
    fn completed_batch(&mut self, batch: &[Completion]) {
        let brings_requests =
            |completion: &Completion| matches!(completion.token, Token::Receive(_));
        for completion in batch.iter().filter(|c| !brings_requests(c)) {
            self.completed(*completion);
        }
        self.send_answers();
        for completion in batch.iter().filter(|c| brings_requests(c)) {
            self.completed(*completion);
        }
    }

    /// Starts to send everything that is ready for guests and peers.
    fn send_answers(&mut self) {
        self.publish_rings();
        self.flush_marked();
    }

    fn completed(&mut self, completion: Completion) {
        match completion.token {
            Token::Disk(index) => self.disk_done(index, completion.result),
            Token::Receive(index) => self.received(index, completion.result),
            Token::Send(index) => self.sent(index, completion.result),
            Token::Wake => {
                self.queue.listen(&mut self.ring);
                self.run_commands();
            }
            Token::Kick(watch) => self.kicked(watch, completion),
            Token::Signal(bell) => self.signalled(bell),
            Token::Cancel => {}
        }
        if self.clock.tick_at.is_none() {
            self.clock.tick_at = Some(self.cx.now.after(TICK));
        }
    }

    /// Does the work that is due once per turn, after all events since the last wait.
    fn end_turn(&mut self) {
        self.run_deferred();
        self.forwarding_due();
        if !self.nbd.waiting.is_empty() && self.cx.core.serves() {
            self.attach_waiting();
        }
        self.resume_served();
        self.retry_waiting();
        self.pump_rings();
        self.send_answers();
        if self.vhost.look_for_lost_pages(&self.cx.config.disk) {
            self.publish();
        }
        self.run_deferred_reads();
    }

    fn timeout(&self) -> Option<Duration> {
        if self.vhost.is_eager() {
            return Some(Duration::ZERO);
        }
        let deadline = [
            self.cx.core.next_deadline(),
            self.clock.tick_at,
            self.moves.next_look(),
            self.gathering().map(|(_, until)| until),
        ];
        let deadline = deadline.into_iter().flatten().min()?;
        Some(deadline.since(self.clock.now()))
    }

    /// Publishes the state, and handles delays.
    fn tick(&mut self) {
        self.publish();
        let watch = self.drop_stalled();
        let (connections, memory) = (&mut self.connections, &mut self.memory);
        let retiring = self.moves.retire_old(self.cx.now, connections, memory);
        self.retry_for_room();
        let waits = self.look_for_long_waits();
        let busy = watch
            || waits
            || retiring
            || self.cx.is_ending()
            || self.queue.has_deferred()
            || self.moves.is_watching()
            || self.vhost.is_retrying()
            || self.cx.stats.is_moving();
        self.clock.tick_at = busy.then(|| self.cx.now.after(TICK));
    }

    fn is_finished(&self) -> bool {
        let Some(deadline) = self.cx.shutdown else {
            return false;
        };
        let sending = |c: &crate::engine::connections::Connection| {
            c.life == Life::Open && (c.stream.is_sending() || c.stream.wants_send())
        };
        let idle = self.clients() == 0
            && self.memory.slots.used() == 0
            && self.disk.in_flight() == 0
            && !self.connections.iter().any(sending);
        idle || deadline <= self.cx.now
    }

    /// Publishes the state.
    pub(super) fn publish(&mut self) {
        // The controller counts the bytes before compression.
        let progress = self.cx.core.progress().map(|mut progress| {
            let sent = &mut progress.copy_bytes_sent;
            *sent = sent.saturating_sub(self.moves.copies_saved);
            progress
        });
        let snapshot = Snapshot {
            record: self.cx.core.record(),
            serves: self.cx.core.serves(),
            progress,
            copies_saved: self.moves.copies_saved,
            clients: self.clients(),
            front_end: self.vhost.state(),
            missing: self.cx.core.missing().map(Missing::bytes),
            missing_at_source: self.cx.core.missing().and_then(Missing::bytes_at_source),
            needs_source: self.cx.core.needs_source(),
            missing_is_owed: self.cx.core.missing_is_owed(),
            owner_is_there: self.cx.core.owner_is_there(),
            missing_trouble: self.cx.core.missing_trouble(),
            lacks_room: self.vhost.lacks_room(),
            lost_pages: self.vhost.lost_pages,
            waits_long: self.cx.waits_long(),
            requests_in_flight: self.cx.core.requests_in_flight(),
            counters: self.cx.stats.counters,
            latency: self.cx.stats.summary(self.cx.now),
            latencies: self.cx.stats.latencies,
            cpu_seconds: thread_cpu_time().as_secs_f64(),
        };
        *self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = snapshot;
    }

    /// Ends all operations, so that the kernel uses none of the engine's memory. Returns false after the time limit:
    /// then the engine must be leaked instead of dropped.
    pub(super) fn release(&mut self) -> bool {
        self.connections.abort(&mut self.ring);
        self.ring.cancel(Token::Wake);
        self.vhost.events.stop_watching(&mut self.ring);
        let mut batch = [Completion {
            token: Token::Wake,
            result: 0,
            more: false,
        }; BATCH];
        let deadline = Instant::now() + RELEASE;
        while self.ring.in_flight() > 0 && Instant::now() < deadline {
            if self.ring.wait(Some(TICK)).is_err() {
                break;
            }
            self.ring.completions(&mut batch);
        }
        self.queue.refuse();
        self.ring.in_flight() == 0
    }
}
