//! The table of migrations: migrations under way, and the last ended ones.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use godwit_block::engine::{LatencyBaseline, Snapshot};
use godwit_core::Progress;
use godwit_core::auto::Pace;
use godwit_core::event::Obstacle;
use godwit_core::units::MigrationId;
use godwit_core::wire::Features;
use tokio::sync::Notify;

use super::choice::auto;
use super::choice::pace::{LatelySent, Sent};
use super::recent_rate::{RecentRate, Sample};
use crate::disks::Disks;
use crate::disks::disk::Disk;
use crate::disks::view;
use crate::images::Images;
use crate::migrations::incoming::admission::Arrivals;
use crate::migrations::incoming::gatherings::Gatherings;
use godwit_api::{
    Direction, ErrorBody, ErrorCode, Migration, MigrationPhase, MigrationProgress,
    MigrationSettings,
};
use godwit_context::Context;
use godwit_peers::clock;

/// Most ended migrations remembered.
const MAX_ENDED: usize = 1000;

/// Time between two measurements of the migrations under way.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_millis(500);

/// Time limit for the engine to publish the end of a migration.
const FINAL_PROGRESS_WAIT: Duration = Duration::from_millis(500);

/// Migrations under way and ended.
#[derive(Debug)]
pub struct Migrations {
    /// Configuration, store and connections of the node.
    pub context: Arc<Context>,
    /// The disks that move.
    pub disks: Arc<Disks>,
    /// The images of disks that move with a part in an image.
    pub images: Arc<Images>,
    /// Incoming migrations whose connections are not complete.
    pub gatherings: Gatherings,
    /// Disks being received, with their senders.
    pub arrivals: Arrivals,
    table: Mutex<Table>,
    /// Notified whenever a migration has ended.
    ended: Notify,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    /// Oldest first. Only ended ones are dropped.
    all: VecDeque<Tracked>,
}

#[derive(Debug)]
struct Tracked {
    number: u64,
    id: MigrationId,
    view: Migration,
    /// The time when the offer was accepted.
    accepted: Option<Instant>,
    /// The features known to both nodes, once the engine has the migration.
    agreed: Option<Features>,
    /// Stops the task of the offer.
    cancelled: Arc<Notify>,
    recent_rate: RecentRate,
    /// The current obstacle, and the start of the obstruction.
    obstructed: Option<(Obstacle, Instant)>,
    /// Bytes of the disk without its holes, as far as known.
    data: u64,
    /// The guest's latency before, until the migration has ended.
    baseline: Option<LatencyBaseline>,
    lately: LatelySent,
}

/// A migration whose policy the node chose.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) view: Migration,
    /// The current obstacle, and how long the migration has been obstructed.
    pub(super) obstacle: Option<(Obstacle, Duration)>,
    pub(super) pace: Option<Pace>,
}

/// The facts of a new migration.
#[derive(Debug)]
pub struct Begin {
    pub id: MigrationId,
    pub disk: String,
    pub from: String,
    pub to: String,
    pub direction: Direction,
    pub phase: MigrationPhase,
    pub options: Option<MigrationSettings>,
    pub bytes_total: u64,
    /// Bytes of the disk without its holes, as far as known.
    pub data: u64,
    /// The guest's latency before.
    pub(crate) baseline: Option<LatencyBaseline>,
    pub warnings: Vec<String>,
}

impl Migrations {
    /// Creates the empty table.
    pub fn new(images: Arc<Images>) -> Self {
        Self {
            context: Arc::clone(&images.disks.context),
            disks: Arc::clone(&images.disks),
            images,
            gatherings: Gatherings::default(),
            arrivals: Arrivals::default(),
            table: Mutex::default(),
            ended: Notify::new(),
        }
    }

    /// Takes the stored migrations. Aborts unfinished ones, which ended with the node, unless `open` reports that the
    /// disk still waits for the outcome. Returns the aborted migrations, to be stored.
    pub fn restore(
        &self,
        stored: Vec<(u64, Migration)>,
        open: impl Fn(MigrationId) -> bool,
    ) -> Vec<(u64, Migration)> {
        let mut table = self.lock();
        let mut changed = Vec::new();
        for (number, mut view) in stored {
            let Ok(id) = view.id.parse::<MigrationId>() else {
                continue;
            };
            if !view.phase.ended() {
                if open(id) {
                    view.phase = match view.direction {
                        Direction::Outgoing => MigrationPhase::Committing,
                        Direction::Incoming => MigrationPhase::Accepted,
                    };
                } else {
                    view.phase = MigrationPhase::Aborted;
                    view.ended_at = Some(clock::now_text());
                    view.error = Some(
                        ErrorBody::new(
                            ErrorCode::ShuttingDown,
                            format!("the node ended while disk {} was migrating", view.disk),
                        )
                        .hint("start the migration again"),
                    );
                    changed.push((number, view.clone()));
                }
            }
            table.next = table.next.max(number + 1);
            table.all.push_back(Tracked {
                number,
                id,
                view,
                accepted: None,
                agreed: None,
                cancelled: Arc::default(),
                recent_rate: RecentRate::default(),
                obstructed: None,
                data: 0,
                baseline: None,
                lately: LatelySent::default(),
            });
        }
        changed
    }

    /// Adds a migration. Returns its number in the store, the view to store, and the notifier to stop its task.
    pub fn begin(&self, begin: Begin) -> (u64, Migration, Arc<Notify>) {
        let mut table = self.lock();
        let number = table.next;
        table.next += 1;
        let view = Migration {
            id: begin.id.to_string(),
            disk: begin.disk,
            from: begin.from,
            to: begin.to,
            direction: begin.direction,
            phase: begin.phase,
            options: begin.options,
            progress: MigrationProgress {
                bytes_total: begin.bytes_total,
                ..MigrationProgress::default()
            },
            promise: None,
            rate_bytes_per_second: None,
            eta_seconds: None,
            guest: None,
            started_at: clock::now_text(),
            ended_at: None,
            lm_seconds: None,
            error: None,
            verified: false,
            source_needed: false,
            missing_bytes: None,
            warnings: begin.warnings,
        };
        let cancelled = Arc::new(Notify::new());
        table.all.push_back(Tracked {
            number,
            id: begin.id,
            view: view.clone(),
            accepted: None,
            agreed: None,
            cancelled: Arc::clone(&cancelled),
            recent_rate: RecentRate::default(),
            obstructed: None,
            data: begin.data,
            baseline: begin.baseline,
            lately: LatelySent::default(),
        });
        while table.all.len() > MAX_ENDED
            && let Some(oldest) = table
                .all
                .iter()
                .position(|tracked| tracked.view.phase.ended())
        {
            table.all.remove(oldest);
        }
        (number, view, cancelled)
    }

    /// Records the acceptance of a migration's offer.
    pub fn accepted(&self, id: MigrationId) {
        self.change(id, |tracked| tracked.accepted = Some(Instant::now()));
    }

    /// Records that an engine runs the migration, between nodes with these features.
    pub fn goes_on(&self, id: MigrationId, agreed: Features) {
        self.change(id, |tracked| tracked.agreed = Some(agreed));
    }

    /// Returns the features known to both nodes of a migration; nothing before an engine runs the migration.
    pub fn agreed(&self, id: MigrationId) -> Option<Features> {
        let table = self.lock();
        table.all.iter().find(|tracked| tracked.id == id)?.agreed
    }

    /// Returns the guest's latency from before a migration under way.
    pub(super) fn baseline(&self, id: &str) -> Option<LatencyBaseline> {
        let table = self.lock();
        let mut all = table.all.iter();
        all.find(|tracked| tracked.view.id == id)?.baseline.clone()
    }

    /// Sets other options. Returns the migration's number and the view to store.
    pub(crate) fn set_options(
        &self,
        id: MigrationId,
        options: MigrationSettings,
        warnings: Vec<String>,
    ) -> Option<(u64, Migration)> {
        let mut table = self.lock();
        let tracked = table.all.iter_mut().find(|tracked| tracked.id == id)?;
        tracked.view.options = Some(options);
        tracked.view.warnings.extend(warnings);
        Some((tracked.number, tracked.view.clone()))
    }

    /// Records a migration's new phase.
    pub fn enter(&self, id: MigrationId, phase: MigrationPhase) {
        self.change(id, |tracked| {
            if !tracked.view.phase.ended() {
                tracked.view.phase = phase;
            }
        });
    }

    /// Stops the task of a migration's offer.
    pub(crate) fn cancel_offer(&self, id: MigrationId) {
        self.change(id, |tracked| tracked.cancelled.notify_one());
    }

    /// Ends a migration, once. Returns its number and the view to store.
    pub fn end(
        &self,
        id: MigrationId,
        result: Result<(), ErrorBody>,
        progress: Option<Progress>,
    ) -> Option<(u64, Migration)> {
        let mut table = self.lock();
        let tracked = table.all.iter_mut().find(|tracked| tracked.id == id)?;
        if tracked.view.phase.ended() {
            return None;
        }
        if let Some(progress) = progress {
            adopt(&mut tracked.view, &progress);
        }
        tracked.baseline = None;
        let view = &mut tracked.view;
        view.lm_seconds = tracked.accepted.map(|at| at.elapsed().as_secs_f64());
        view.ended_at = Some(clock::now_text());
        view.eta_seconds = None;
        view.rate_bytes_per_second = None;
        match result {
            Ok(()) => view.phase = MigrationPhase::Completed,
            Err(error) => {
                view.phase = MigrationPhase::Aborted;
                view.error = Some(error);
            }
        }
        let ended = (tracked.number, view.clone());
        drop(table);
        self.ended.notify_waiters();
        Some(ended)
    }

    /// Returns all migrations in the table, oldest first.
    pub fn all(&self) -> Vec<Migration> {
        self.lock().all.iter().map(Tracked::view).collect()
    }

    /// Returns a migration from the table.
    ///
    /// # Errors
    /// [`ErrorCode::Invalid`] if the id cannot be parsed, [`ErrorCode::NotFound`].
    pub fn get(&self, id: &str) -> Result<(MigrationId, Migration), ErrorBody> {
        let shown: String = id.chars().take(64).collect();
        let parsed = id.parse::<MigrationId>().map_err(|error| {
            ErrorBody::new(ErrorCode::Invalid, format!("{shown:?}: {error}"))
                .hint("see 'godwit migration list'")
        })?;
        let table = self.lock();
        let tracked = table
            .all
            .iter()
            .find(|tracked| tracked.id == parsed)
            .ok_or_else(|| {
                ErrorBody::new(
                    ErrorCode::NotFound,
                    format!("this node knows no migration {shown}"),
                )
                .hint("see 'godwit migration list'")
            })?;
        Ok((parsed, tracked.view()))
    }

    /// Returns a migration once ended, or after `wait` in any case.
    ///
    /// # Errors
    /// The errors of [`Self::get`].
    pub async fn get_within(
        &self,
        id: &str,
        wait: Duration,
    ) -> Result<(MigrationId, Migration), ErrorBody> {
        let over = tokio::time::sleep(wait);
        tokio::pin!(over);
        loop {
            // Registered before the look: a migration ending after the look wakes this task.
            let ended = self.ended.notified();
            let known = self.get(id)?;
            if known.1.phase.ended() || over.is_elapsed() {
                return Ok(known);
            }
            tokio::select! {
                () = ended => {}
                () = &mut over => {}
            }
        }
    }

    /// Returns the migrations under way, with their disks.
    pub fn under_way(&self) -> Vec<(MigrationId, String)> {
        self.lock()
            .all
            .iter()
            .filter(|tracked| !tracked.view.phase.ended())
            .map(|tracked| (tracked.id, tracked.view.disk.clone()))
            .collect()
    }

    /// Returns the migrations under way whose policy the node chose, with the facts for a review.
    pub(super) fn chosen_by_node(&self) -> Vec<Chosen> {
        let chosen = |tracked: &&Tracked| {
            let options = tracked.view.options.as_ref();
            !tracked.view.phase.ended() && options.is_some_and(|it| it.policy_reason.is_some())
        };
        let table = self.lock();
        let chosen = table.all.iter().filter(chosen);
        chosen
            .map(|tracked| {
                // Without the blocks of the destination's older copy.
                let progress = &tracked.view.progress;
                let data = tracked.data.min(progress.bytes_total);
                let in_pass = progress.bytes_total.saturating_sub(progress.bytes_done);
                Chosen {
                    view: tracked.view(),
                    obstacle: tracked.obstructed.map(|(what, at)| (what, at.elapsed())),
                    pace: tracked.lately.pace(data, in_pass),
                }
            })
            .collect()
    }

    /// Takes a measurement of a migration under way from the values published by its engine.
    fn sample(&self, id: MigrationId, progress: &Progress, engine: &Snapshot) {
        self.change(id, |tracked| {
            if tracked.view.phase.ended() {
                return;
            }
            adopt(&mut tracked.view, progress);
            let (promise, left) = (&progress.promise, progress.bytes_total);
            tracked.recent_rate.add(Sample {
                at: Instant::now(),
                phase: tracked.view.phase,
                done: progress.bytes_done,
                left: left.saturating_sub(progress.bytes_done) + promise.delayed_bytes,
            });
            tracked.lately.add(Sent {
                at: Instant::now(),
                // Bytes copied, before compression.
                copies: progress.copy_bytes_sent + engine.copies_saved,
                doubled: progress.double_write_bytes_sent,
                written: engine.counters.written_bytes,
            });
            tracked.obstructed = match (promise.obstacle, tracked.obstructed) {
                (None, _) => None,
                (Some(what), before) => {
                    Some((what, before.map_or_else(Instant::now, |(_, since)| since)))
                }
            };
            tracked.view.rate_bytes_per_second = tracked.recent_rate.rate();
            tracked.view.eta_seconds = match promise.obstacle {
                Some(_) => None,
                None => tracked.recent_rate.seconds_left(),
            };
        });
    }

    fn change(&self, id: MigrationId, change: impl FnOnce(&mut Tracked)) {
        if let Some(tracked) = self.lock().all.iter_mut().find(|tracked| tracked.id == id) {
            change(tracked);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tracked {
    fn view(&self) -> Migration {
        let mut view = self.view.clone();
        if !view.phase.ended() {
            view.lm_seconds = self.accepted.map(|at| at.elapsed().as_secs_f64());
        }
        view
    }
}

fn adopt(view: &mut Migration, progress: &Progress) {
    view.progress = MigrationProgress {
        bytes_total: progress.bytes_total,
        bytes_done: progress.bytes_done,
        bytes_copied: progress.bytes_copied,
        bytes_sent: progress.copy_bytes_sent,
        double_write_bytes: progress.double_write_bytes_sent,
        bytes_verified: progress.bytes_verified,
        bytes_owed: progress.bytes_owed,
        delta: progress.delta.map(view::delta),
    };
    view.verified = progress.verified;
    view.promise = Some(view::promise(progress));
    auto::tell_of_delta(view);
}

/// Returns the migration with the engine's current values.
pub fn live(migrations: &Migrations, id: MigrationId, mut view: Migration) -> Migration {
    let Some(disk) = migrations.disks.find(&view.disk) else {
        return view;
    };
    let (record, fetches) = {
        let inner = disk.lock();
        let fetches = inner.entry.fetches(&inner.record).is_some();
        (inner.record, fetches)
    };
    // Parts in an image are not at the source. Without an engine, some may be.
    let told = disk.engine().filter(|_| fetches);
    let needs_source = told.is_none_or(|engine| engine.snapshot().needs_source);
    view.source_needed = record.remainder == Some(id) && needs_source;
    if view.phase.ended() && !view.source_needed {
        return view;
    }
    let Some(engine) = disk.engine() else {
        return view;
    };
    let snapshot = engine.snapshot();
    view.missing_bytes = (snapshot.missing_at_source)
        .or(snapshot.missing)
        .filter(|_| record.lacks() == Some(id))
        .map(|missing| missing.0);
    if view.phase.ended() {
        return view;
    }
    if let Some(progress) = snapshot
        .progress
        .filter(|progress| progress.migration == id)
    {
        adopt(&mut view, &progress);
        // The obstacle may have come since the last sample.
        view.eta_seconds = view
            .eta_seconds
            .filter(|_| progress.promise.obstacle.is_none());
    }
    view.guest = Some(view::latency(&snapshot.latency));
    view
}

/// Measures the rate of migrations under way until the node ends.
pub async fn sample_rates(migrations: Arc<Migrations>) {
    let mut ticks = tokio::time::interval(SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = migrations.context.closed() => return,
        }
        for (id, disk) in migrations.under_way() {
            let snapshot = migrations
                .disks
                .find(&disk)
                .and_then(|disk| disk.engine())
                .map(|engine| engine.snapshot());
            let Some(snapshot) = snapshot else { continue };
            if let Some(progress) = snapshot.progress.filter(|it| it.migration == id) {
                migrations.sample(id, &progress, &snapshot);
            }
        }
        auto::reconsider_all(&migrations).await;
    }
}

/// Stores a new or changed migration. A failure leaves a gap in the history and does not stop the migration.
pub(crate) async fn store(migrations: &Migrations, number: u64, view: &Migration) {
    if let Err(error) = migrations.context.store.put_migration(number, view).await {
        tracing::error!(migration = view.id, %error, "cannot store the migration's history");
    }
}

/// Ends a migration. The engine may take a moment to publish the last progress.
pub(crate) async fn end(
    migrations: &Arc<Migrations>,
    disk: &Arc<Disk>,
    id: MigrationId,
    result: Result<(), ErrorBody>,
) {
    match &result {
        Ok(()) => tracing::info!(disk = disk.name, migration = %id, "the migration is complete"),
        Err(error) => {
            tracing::warn!(disk = disk.name, migration = %id, %error, "the migration ended");
        }
    }
    let outgoing = migrations
        .get(&id.to_string())
        .is_ok_and(|(_, view)| view.direction == Direction::Outgoing);
    let engine = disk.engine().filter(|_| outgoing);
    let migrations = Arc::clone(migrations);
    let finish = async move {
        let mut progress = None;
        let deadline = Instant::now() + FINAL_PROGRESS_WAIT;
        if let Some(engine) = engine {
            loop {
                progress = engine
                    .snapshot()
                    .progress
                    .filter(|progress| progress.migration == id);
                let over = progress.is_none_or(|progress| {
                    use godwit_core::event::Phase;
                    matches!(progress.phase, Phase::Completed | Phase::Aborted)
                });
                if over || Instant::now() >= deadline {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        if let Some((number, view)) = migrations.end(id, result, progress) {
            store(&migrations, number, &view).await;
        }
    };
    // Spawned: the disk's next event (often a record to store) must not wait for this.
    tokio::spawn(finish);
}
