//! The table of migrations: migrations under way, and the last ended ones.

use std::sync::Arc;
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
use godwit_context::moves::{self, MoveTable, end_with_node};
use godwit_peers::clock;

/// Time between two measurements of the migrations under way.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_millis(500);

/// Time limit for the engine to publish the end of a migration.
const FINAL_PROGRESS_WAIT: Duration = Duration::from_millis(500);

type Tracked = moves::Tracked<Migration, State>;

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
    table: MoveTable<Migration, State>,
    /// Notified whenever a migration has ended.
    ended: Notify,
}

/// The state of a migration that the API does not show.
#[derive(Debug, Default)]
struct State {
    /// The time when the offer was accepted.
    accepted: Option<Instant>,
    /// The features known to both nodes, once the engine has the migration.
    agreed: Option<Features>,
    /// True if the user named no policy.
    by_node: bool,
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
    /// The other node.
    pub peer: String,
    /// The options of an outgoing migration; absent for an incoming one.
    pub options: Option<MigrationSettings>,
    /// True for an outgoing migration without a policy named by the user.
    pub by_node: bool,
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
            table: MoveTable::default(),
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
        let settle = |view: &mut Migration| match view.direction {
            _ if !view.id.parse().is_ok_and(&open) => {
                end_with_node(&format!("disk {}", view.disk), view);
            }
            Direction::Outgoing => view.phase = MigrationPhase::Committing,
            Direction::Incoming => view.phase = MigrationPhase::Accepted,
        };
        self.table.lock().restore(stored, settle)
    }

    /// Adds a migration and stores its view. Returns the notifier to stop its task.
    pub async fn begin(&self, begin: Begin) -> Arc<Notify> {
        let own = self.context.config.name.clone();
        let (direction, phase) = match begin.options {
            Some(_) => (Direction::Outgoing, MigrationPhase::Offering),
            None => (Direction::Incoming, MigrationPhase::Receiving),
        };
        let (from, to) = match direction {
            Direction::Outgoing => (own, begin.peer),
            Direction::Incoming => (begin.peer, own),
        };
        let view = Migration {
            id: begin.id.to_string(),
            disk: begin.disk,
            from,
            to,
            direction,
            phase,
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
        let state = State {
            by_node: begin.by_node,
            data: begin.data,
            baseline: begin.baseline,
            ..State::default()
        };
        let cancelled = Arc::clone(&state.cancelled);
        let number = self.table.lock().add(view.clone(), state);
        self.context.remember(number, &view).await;
        cancelled
    }

    /// Records the acceptance of a migration's offer.
    pub fn accepted(&self, id: MigrationId) {
        self.with(id, |tracked| tracked.state.accepted = Some(Instant::now()));
    }

    /// Records that an engine runs the migration, between nodes with these features.
    pub fn goes_on(&self, id: MigrationId, agreed: Features) {
        self.with(id, |tracked| tracked.state.agreed = Some(agreed));
    }

    /// Returns the features known to both nodes of a migration; nothing before an engine runs the migration.
    pub fn agreed(&self, id: MigrationId) -> Option<Features> {
        self.with(id, |tracked| tracked.state.agreed)?
    }

    /// Returns the guest's latency from before a migration under way.
    pub(super) fn baseline(&self, id: &str) -> Option<LatencyBaseline> {
        self.table.lock().find(id)?.state.baseline.clone()
    }

    /// Sets and stores other options.
    pub(super) async fn set_options(
        &self,
        id: MigrationId,
        options: MigrationSettings,
        warnings: Vec<String>,
    ) {
        let changed = self.with(id, |tracked| {
            tracked.view.options = Some(options);
            tracked.view.warnings.extend(warnings);
            (tracked.number, tracked.view.clone())
        });
        if let Some((number, view)) = changed {
            self.context.remember(number, &view).await;
        }
    }

    /// Records a migration's new phase.
    pub fn enter(&self, id: MigrationId, phase: MigrationPhase) {
        self.table
            .change(&id.to_string(), |view| view.phase = phase);
    }

    /// Stops the task of a migration's offer.
    pub(crate) fn cancel_offer(&self, id: MigrationId) {
        self.with(id, |tracked| tracked.state.cancelled.notify_one());
    }

    /// Ends a migration, once, and stores its end.
    pub(super) async fn end(
        &self,
        id: MigrationId,
        result: Result<(), ErrorBody>,
        progress: Option<Progress>,
    ) {
        let last = |Tracked { view, state, .. }: &mut Tracked| {
            if let Some(progress) = progress {
                adopt(view, &progress);
            }
            state.baseline = None;
            view.lm_seconds = state.accepted.map(|at| at.elapsed().as_secs_f64());
            view.eta_seconds = None;
            view.rate_bytes_per_second = None;
        };
        if let Some((number, view)) = self.table.end(&id.to_string(), result.err(), last) {
            self.ended.notify_waiters();
            self.context.remember(number, &view).await;
        }
    }

    /// Returns all migrations in the table, oldest first.
    pub fn all(&self) -> Vec<Migration> {
        self.table.lock().all().map(shown).collect()
    }

    /// Returns a migration from the table.
    ///
    /// # Errors
    /// [`ErrorCode::Invalid`] if the id cannot be parsed, [`ErrorCode::NotFound`].
    pub fn get(&self, id: &str) -> Result<(MigrationId, Migration), ErrorBody> {
        let parsed = id.parse::<MigrationId>().map_err(|error| {
            let shown: String = id.chars().take(64).collect();
            ErrorBody::new(ErrorCode::Invalid, format!("{shown:?}: {error}"))
                .hint("see 'godwit migration list'")
        })?;
        let mut moves = self.table.lock();
        Ok((parsed, shown(moves.get(&parsed.to_string())?)))
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
        let moves = self.table.lock();
        let under_way = moves.all().filter(|tracked| !tracked.view.phase.ended());
        under_way
            .filter_map(|Tracked { view, .. }| Some((view.id.parse().ok()?, view.disk.clone())))
            .collect()
    }

    /// Returns the migrations under way whose policy the node chose, with the facts for a review.
    pub(super) fn chosen_by_node(&self) -> Vec<Chosen> {
        let moves = self.table.lock();
        let chosen = moves.all().filter(|tracked| is_chosen_by_node(tracked));
        chosen
            .map(|tracked| {
                // Without the blocks of the destination's older copy.
                let (progress, state) = (&tracked.view.progress, &tracked.state);
                let data = state.data.min(progress.bytes_total);
                let in_pass = progress.bytes_total.saturating_sub(progress.bytes_done);
                Chosen {
                    view: shown(tracked),
                    obstacle: state.obstructed.map(|(what, at)| (what, at.elapsed())),
                    pace: state.lately.pace(data, in_pass),
                }
            })
            .collect()
    }

    /// Takes a measurement of a migration under way from the values published by its engine.
    fn sample(&self, id: MigrationId, progress: &Progress, engine: &Snapshot) {
        let mut moves = self.table.lock();
        let Some(Tracked { view, state, .. }) = moves.under_way(&id.to_string()) else {
            return;
        };
        adopt(view, progress);
        let (promise, left) = (&progress.promise, progress.bytes_total);
        state.recent_rate.add(Sample {
            at: Instant::now(),
            phase: view.phase,
            done: progress.bytes_done,
            left: left.saturating_sub(progress.bytes_done) + promise.delayed_bytes,
        });
        state.lately.add(Sent {
            at: Instant::now(),
            // Bytes copied, before compression.
            copies: progress.copy_bytes_sent + engine.copies_saved,
            doubled: progress.double_write_bytes_sent,
            written: engine.counters.written_bytes,
        });
        state.obstructed = promise.obstacle.map(|what| {
            let since = state.obstructed.map(|(_, since)| since);
            (what, since.unwrap_or_else(Instant::now))
        });
        view.rate_bytes_per_second = state.recent_rate.rate();
        view.eta_seconds = match promise.obstacle {
            Some(_) => None,
            None => state.recent_rate.seconds_left(),
        };
    }

    fn with<T>(&self, id: MigrationId, of: impl FnOnce(&mut Tracked) -> T) -> Option<T> {
        self.table.lock().find(&id.to_string()).map(of)
    }
}

fn shown(Tracked { view, state, .. }: &Tracked) -> Migration {
    let mut view = view.clone();
    if !view.phase.ended() {
        view.lm_seconds = state.accepted.map(|at| at.elapsed().as_secs_f64());
    }
    view
}

/// Returns true if the node chose the policy of a migration under way. A named policy has a reason, too, if the disk
/// moves without its image; a policy that the user changed to has none.
fn is_chosen_by_node(Tracked { view, state, .. }: &Tracked) -> bool {
    let options = view.options.as_ref();
    let has_reason = options.is_some_and(|options| options.policy_reason.is_some());
    state.by_node && has_reason && !view.phase.ended()
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
        migrations.end(id, result, progress).await;
    };
    // Spawned: the disk's next event (often a record to store) must not wait for this.
    godwit_context::spawn(finish);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_policy_stays_though_the_move_without_an_image_has_a_reason() {
        let view = serde_json::json!({
            "id": "x", "disk": "root", "from": "a", "to": "b", "direction": "outgoing", "phase": "copying",
            "progress": MigrationProgress::default(), "started_at": "", "verified": true,
            "options": {
                "policy": "pre-copy", "policy_reason": "only what differs is sent", "verify": false, "window_bytes": 1,
                "chunk_bytes": 1, "max_bandwidth": null,
            },
        });
        let view: Migration = serde_json::from_value(view).expect("a migration");
        for (by_node, phase, is_chosen) in [
            (true, MigrationPhase::Copying, true),
            (false, MigrationPhase::Copying, false),
            (true, MigrationPhase::Completed, false),
        ] {
            let tracked = Tracked {
                number: 1,
                view: Migration {
                    phase,
                    ..view.clone()
                },
                state: State {
                    by_node,
                    ..State::default()
                },
            };
            assert_eq!(
                is_chosen_by_node(&tracked),
                is_chosen,
                "{by_node} {phase:?}"
            );
        }
    }
}
