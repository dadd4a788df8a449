//! The engine's thread: its state and its loop.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};

use godwit_core::action::{Forwarder, PULL_SLOTS};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::request::RequestTag;
use godwit_core::units::{MigrationId, Time};
use godwit_core::{Controller, Missing, Written};
use io_uring::{opcode, types};

use crate::engine::config::{EngineConfig, EngineError, EngineEvent, Restored};
use crate::engine::connections::streams::ClientStream;
use crate::engine::connections::{ConnectionKey, Connections, Life};
use crate::engine::deferred::Deferred;
use crate::engine::disk::Disk;
use crate::engine::front_ends::nbd::parts::Wholes;
use crate::engine::front_ends::vhost::Vhost;
use crate::engine::front_ends::vhost::no_space::Room;
use crate::engine::handle::{Command, Published};
use crate::engine::peers::compression::Compression;
use crate::engine::peers::link_signal::LinkWatch;
use crate::engine::peers::links::{Links, MOST_SERVED};
use crate::engine::priority::Priority;
use crate::engine::slots::Slots;
use crate::engine::slots::chunks::Chunks;
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

/// The state of an engine's thread.
pub(super) struct Engine {
    pub(super) config: EngineConfig,
    pub(super) core: Controller,
    pub(super) disk: Disk,
    pub(super) slots: Slots,
    /// Clients' requests that are carried out in pieces.
    pub(super) wholes: Wholes,
    pub(super) chunks: Chunks,
    pub(super) connections: Connections,
    /// Buffers for the parts that an owner pulls after the disk was given away.
    pub(super) owed: Chunks,
    /// Connection for pulls, at either end.
    pub(super) pulling: Option<ConnectionKey>,
    /// Connection to the image, if another node owes some of the missing parts.
    pub(super) fetching: Option<ConnectionKey>,
    /// Pulled pieces that are not yet written, by slot.
    pub(super) pulled: [Option<RequestTag>; PULL_SLOTS as usize],
    /// Notes of the missing parts that have arrived.
    pub(super) notes: Option<MissingNotes>,
    /// Failure that ends the engine.
    pub(super) broken: Option<EngineError>,
    /// Connections of the current or last migration.
    pub(super) links: Option<Links>,
    /// Compressor of a migration's data, if the other node accepts compression.
    pub(super) compression: Option<Compression>,
    /// Bytes saved by compression in the copies of the current or last migration.
    pub(super) copies_saved: u64,
    /// Watch on the sync connection while a migration leaves this node.
    pub(super) link_watch: Option<LinkWatch>,
    /// Control connections of migrations to be decided after a crash.
    pub(super) resolving: Vec<(MigrationId, ConnectionKey)>,
    /// Control connections of decided migrations, with the time to close each.
    pub(super) decided: Vec<(Time, MigrationId, ConnectionKey)>,
    /// Connection that carries the requests of this node's clients to the owner.
    pub(super) forwarding: Option<ConnectionKey>,
    /// True if the forwarding connection leads to a node that is no longer the owner.
    pub(super) close_forwarding: bool,
    /// True if this node may have to forward now.
    pub(super) check_forward: bool,
    /// True after a request to dial, until the engine's owner answers.
    pub(super) forward_asked: bool,
    /// Names of nodes that forwarded here, by the controller's numbers for them.
    pub(super) forwarders: Vec<String>,
    /// Connections of the forwarding nodes.
    pub(super) served: Vec<(Forwarder, ConnectionKey)>,
    pub(super) clients: u32,
    /// Virtual machine that uses the disk.
    pub(super) vhost: Vhost,
    /// Place of the data of the starting operation, if in guest memory; empty between operations.
    pub(super) pieces: Vec<libc::iovec>,
    /// Clients that came while the disk's owner could not be reached.
    pub(super) waiting_clients: Vec<ClientStream>,
    /// Commands that wait for reads or writes of the last migration.
    pub(super) deferred: Vec<Deferred>,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) stats: Stats,
    priority: Priority,
    pub(super) now: Time,
    /// Latest time of the engine's end.
    pub(super) shutdown: Option<Time>,
    events: Box<dyn Fn(EngineEvent) + Send>,
    published: Published,
    started: Instant,
    tick_at: Option<Time>,
    wake: Arc<OwnedFd>,
    wake_count: Staging,
    pub(super) ring: Ring,
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
        let name = config.disk.clone();
        let refused = |action: &'static str| {
            let disk = name.clone();
            move |source: io::Error| EngineError::Start {
                disk,
                action,
                source,
            }
        };
        let ring = Ring::new().map_err(refused("set up io_uring"))?;
        let limits = &config.limits;
        let chunks = usize::from(limits.window_chunks) + usize::from(limits.delayed_chunks);
        let pulls = 2 * usize::from(PULL_SLOTS);
        let operations = limits.requests as usize + chunks + pulls;
        let capacity = image.capacity;
        let requests = limits.requests as usize;
        let disk = Disk::new(image, config.disk.clone(), operations)
            .map_err(refused("prepare the image"))?;
        let slots = Slots::new(
            config.limits.requests,
            config.memory.0 as usize,
            config.max_clients as usize,
            // The forwarding nodes, and one that replaces another.
            MOST_SERVED + 1,
        )
        .map_err(refused("map memory for requests"))?;
        let wake_count = Staging::new(8).map_err(refused("map memory for commands"))?;
        let stats = Stats::new(Time(0))
            .map_err(|error| refused("set up its histogram")(io::Error::other(error)))?;
        let mut core = Controller::new(config.limits, capacity, record);
        // The standard library's hashers have random keys, which differ each time.
        let session = RandomState::new().build_hasher().finish();
        core.resume_forwarding(config.shared, session);
        if let Some(longest) = config.longest_missing_wait {
            core.fail_missing_after(longest);
        }
        if config.surpassed {
            core.surpass(Time(0));
        }
        core.bound_owed(config.owed_bandwidth);
        if config.on_image && record.owes().is_some() {
            core.is_no_base();
        }
        let Restored {
            missing,
            written,
            compared,
        } = restored;
        if let Some(written) = written {
            core.restore_written(written);
        }
        let notes = missing.map(|(missing, notes)| {
            core.restore_missing(missing);
            if config.pull_on_demand_only {
                core.pull_on_demand_only();
            }
            notes
        });
        if let Some(words) = compared.map(|it| it.map(|blocks| blocks.words().collect::<Vec<_>>()))
            && core.begin_comparison().is_ok()
        {
            core.end_comparison(&words[0], &words[1]);
        }
        Ok(Self {
            core,
            config,
            disk,
            slots,
            wholes: Wholes::default(),
            chunks: Chunks::default(),
            owed: Chunks::default(),
            pulling: None,
            fetching: None,
            pulled: [None; PULL_SLOTS as usize],
            notes,
            broken: None,
            connections: Connections::default(),
            links: None,
            compression: None,
            copies_saved: 0,
            link_watch: None,
            resolving: Vec::new(),
            decided: Vec::new(),
            forwarding: None,
            close_forwarding: false,
            check_forward: false,
            forward_asked: false,
            forwarders: Vec::new(),
            served: Vec::new(),
            clients: 0,
            vhost: Vhost::new(requests),
            pieces: Vec::new(),
            waiting_clients: Vec::new(),
            deferred: Vec::new(),
            commands,
            stats,
            priority: Priority::default(),
            now: Time(0),
            shutdown: None,
            events,
            published,
            started: Instant::now(),
            tick_at: None,
            wake,
            wake_count,
            ring,
        })
    }

    /// Runs until the engine shuts down.
    pub(super) fn run(&mut self) -> Result<(), EngineError> {
        let mut batch = [Completion {
            token: Token::Wake,
            result: 0,
            more: false,
        }; BATCH];
        self.listen();
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
            let timeout = if self.compress_waiting() {
                Some(Duration::ZERO)
            } else {
                self.timeout()
            };
            self.ring
                .wait(timeout)
                .map_err(|source| self.failure("wait for I/O", &source))?;
            self.now = Time(self.started.elapsed().as_nanos() as u64);
            loop {
                let count = self.ring.completions(&mut batch);
                self.completed_batch(&batch[..count]);
                if count < BATCH {
                    break;
                }
            }
            if self
                .link_watch
                .as_ref()
                .is_some_and(|watch| watch.next() <= self.now)
            {
                self.sample_link();
            }
            if self.core.next_deadline().is_some_and(|at| at <= self.now) {
                self.core.handle_timer(self.now);
                self.drain();
            }
            if self.tick_at.is_some_and(|at| at <= self.now) {
                self.tick();
            }
            self.send_gathered();
        }
        self.publish();
        rustix::fs::fdatasync(self.disk.file()).map_err(|errno| EngineError::Flush {
            disk: self.config.disk.clone(),
            source: errno.into(),
        })?;
        if self.core.record().ownership == Ownership::Serving && self.core.serves() {
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
                let disk = &self.config.disk;
                tracing::warn!(disk, %error, "cannot store what was written to the disk");
            }
        };
        if let (Some(path), Some(written)) = (&self.config.written, self.core.written()) {
            store(path, written);
        }
        let compared = self.core.compared_words();
        for (path, words) in self
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

    pub(super) fn failure(&self, action: &str, source: &io::Error) -> EngineError {
        let disk = self.config.disk.clone();
        EngineError::Failed {
            disk,
            cause: format!("cannot {action}: {source}"),
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
                self.listen();
                self.run_commands();
            }
            Token::Kick(watch) => self.kicked(watch, completion),
            Token::Signal(bell) => self.signalled(bell),
            Token::Cancel => {}
        }
        if self.tick_at.is_none() {
            self.tick_at = Some(self.now.after(TICK));
        }
    }

    /// Waits for the next command.
    fn listen(&mut self) {
        let fd = types::Fd(self.wake.as_raw_fd());
        let (pointer, _) = self.wake_count.room();
        let entry = opcode::Read::new(fd, pointer, 8).build();
        // SAFETY: the counter's memory belongs to the engine, which waits for all operations before the drop; nothing
        // else uses the memory.
        unsafe { self.ring.push(entry, Token::Wake) };
    }

    /// Does the work that is due once per turn, after all events since the last wait.
    fn end_turn(&mut self) {
        self.run_deferred();
        if std::mem::take(&mut self.close_forwarding) {
            self.stop_forwarding();
            self.check_forward = true;
        }
        if std::mem::take(&mut self.check_forward) {
            self.ask_forward();
        }
        if !self.waiting_clients.is_empty() && self.core.serves() {
            self.attach_waiting();
        }
        self.resume_served();
        self.retry_waiting();
        self.pump_rings();
        self.send_answers();
        self.look_for_lost_pages();
        self.run_deferred_reads();
    }

    fn timeout(&self) -> Option<Duration> {
        if self.vhost.is_eager() {
            return Some(Duration::ZERO);
        }
        let deadline = self
            .core
            .next_deadline()
            .into_iter()
            .chain(self.tick_at)
            .chain(self.link_watch.as_ref().map(LinkWatch::next))
            .chain(self.gathering().map(|(_, until)| until))
            .min()?;
        let now = Time(self.started.elapsed().as_nanos() as u64);
        Some(deadline.since(now))
    }

    /// Publishes the state, and handles delays.
    fn tick(&mut self) {
        self.publish();
        let watch = self.drop_stalled();
        let retiring = self.retire_old();
        self.retry_for_room();
        let waits = self.look_for_long_waits();
        let busy = watch
            || waits
            || retiring
            || self.shutdown.is_some()
            || !self.deferred.is_empty()
            || self.link_watch.is_some()
            || matches!(self.vhost.room, Room::Until(_))
            || self.stats.is_moving();
        self.tick_at = busy.then(|| self.now.after(TICK));
    }

    /// Adapts the thread's priority: higher while the disk leaves.
    pub(super) fn follow_priority(&mut self) {
        if let Err(error) = self.priority.follow(self.core.is_leaving()) {
            let disk = &self.config.disk;
            tracing::debug!(disk, "moves while it runs like other threads: {error}");
        }
    }

    fn is_finished(&self) -> bool {
        let Some(deadline) = self.shutdown else {
            return false;
        };
        let sending = |c: &crate::engine::connections::Connection| {
            c.life == Life::Open && (c.stream.is_sending() || c.stream.wants_send())
        };
        let idle = self.clients == 0
            && self.slots.used() == 0
            && self.disk.in_flight() == 0
            && !self.connections.iter().any(sending);
        idle || deadline <= self.now
    }

    /// Publishes the state.
    pub(super) fn publish(&mut self) {
        // The controller counts the bytes before compression.
        let progress = self.core.progress().map(|mut progress| {
            let sent = &mut progress.copy_bytes_sent;
            *sent = sent.saturating_sub(self.copies_saved);
            progress
        });
        let snapshot = Snapshot {
            record: self.core.record(),
            serves: self.core.serves(),
            progress,
            copies_saved: self.copies_saved,
            clients: self.clients,
            front_end: self.vhost.state(),
            missing: self.core.missing().map(Missing::bytes),
            missing_at_source: self.core.missing().and_then(Missing::bytes_at_source),
            needs_source: self.core.needs_source(),
            missing_is_owed: self.core.missing_is_owed(),
            owner_is_there: self.core.owner_is_there(),
            missing_trouble: self.core.missing_trouble(),
            lacks_room: self.vhost.room != Room::Enough,
            lost_pages: self.vhost.lost_pages,
            waits_long: self.waits_long(),
            requests_in_flight: self.core.requests_in_flight(),
            counters: self.stats.counters,
            latency: self.stats.summary(self.now),
            latencies: self.stats.latencies,
            cpu_seconds: thread_cpu_time().as_secs_f64(),
        };
        *self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = snapshot;
    }

    /// Calls the owner's callback.
    pub(super) fn tell(&self, event: EngineEvent) {
        (self.events)(event);
    }

    /// Ends all operations, so that the kernel uses none of the engine's memory. Returns false after the time limit:
    /// then the engine must be leaked instead of dropped.
    pub(super) fn release(&mut self) -> bool {
        let keys: Vec<_> = self
            .connections
            .iter()
            .map(|connection| connection.key)
            .collect();
        for key in keys {
            if let Some(connection) = self.connections.get_mut(key) {
                let (receive, send) = (Token::Receive(key.index), Token::Send(key.index));
                connection.stream.abort(&mut self.ring, receive, send);
            }
        }
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
        while let Ok(command) = self.commands.try_recv() {
            command.refuse();
        }
        self.deferred
            .drain(..)
            .for_each(|deferred| deferred.command.refuse());
        self.ring.in_flight() == 0
    }
}
