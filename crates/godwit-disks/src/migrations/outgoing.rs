//! Moves disks away.

use std::sync::Arc;
use std::time::Duration;

use godwit_block::engine::{ChunkMemory, InterfaceCounter, PeerStreams};
use godwit_core::authority::AuthorityRecord;
use godwit_core::units::{MigrationId, Sectors};
use godwit_core::wire::{
    Features, Greeting, Offer, OfferedImage, Place, Purpose, RefusalCode, Reply, TrafficClass,
};
use godwit_core::{MigrationOptions, OlderCopy, Switchover};
use tokio::sync::{Notify, oneshot};

use super::choice::base::Refused;
use super::choice::{auto, base};
use super::options::{self, Circumstances, InFlight};
use super::promise::{self, Asked, Promise};
use super::table::{self, Begin};
use crate::disks::disk::{Activity, ActivityGuard, Disk};
use crate::disks::following;
use crate::disks::group::SwitchGroup;
use crate::disks::storage::image;
use crate::images::comparison;
use crate::migrations::Migrations;
use godwit_api::{
    DiskState, ErrorBody, ErrorCode, MigrateRequest, Migration, MigrationPhase, MigrationSettings,
    Policy,
};
use godwit_context::blocking;
use godwit_context::failpoint;
use godwit_context::ids;
use godwit_context::store::BaseImage;
use godwit_peers::config::PeerConfig;
use godwit_peers::dial::{Agreed, DialError, refused};
use godwit_peers::{PeerConnection, greeting, into_stream};

/// Connections for bulk copies.
const COPY_CONNECTIONS: u8 = 2;

/// Longest wait for the answer to an offer: the destination makes an image meanwhile.
const OFFER_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait of a request for copying to begin.
const ANSWER_AFTER: Duration = Duration::from_millis(1500);

/// Time limit for a cancelled migration to end.
const CANCEL_WAIT: Duration = Duration::from_secs(5);

/// Starts to move a disk. Returns once copying has begun, or after [`ANSWER_AFTER`] while the other node has not
/// answered the offer.
///
/// # Errors
/// The request is invalid, the peer cannot be reached, or the peer refused.
pub async fn start(
    migrations: &Arc<Migrations>,
    request: MigrateRequest,
) -> Result<Migration, ErrorBody> {
    if let Some(vm) = migrations.disks.machine_with(&request.disk) {
        return Err(ErrorBody::new(
            ErrorCode::Conflict,
            format!("disk {} is used by VM {vm}", request.disk),
        )
        .hint(format!(
            "move the machine with its disks: godwit migrate vm/{vm} --to {}",
            request.to
        )));
    }
    start_in(migrations, request, End::Leaves(None)).await
}

/// The end of a migration.
pub enum End {
    /// The disk leaves, together with its group if there is one.
    Leaves(Option<Arc<SwitchGroup>>),
    /// The disk stays here, and is followed at the other node: every acknowledged write is there, too.
    Stays {
        /// True if that node keeps the writes behind each checkpoint apart ([`following::mark_checkpoint`]).
        checkpoints: bool,
    },
}

impl End {
    const fn stays(&self) -> bool {
        matches!(self, Self::Stays { .. })
    }
}

/// As [`start`], for a disk of a machine. A disk of a moving machine waits for the order to switch over, and switches
/// over together with its group.
///
/// # Errors
/// As [`start`].
pub async fn start_in(
    migrations: &Arc<Migrations>,
    request: MigrateRequest,
    end: End,
) -> Result<Migration, ErrorBody> {
    migrations.context.check_open()?;
    let asked = Asked::parse(&request.disk, request.options.sla.as_deref())?;
    let mut settings = options::settings(&request, asked)?;
    let place = options::place(&request)?;
    let disk = migrations.disks.get(&request.disk)?;
    if request.to == migrations.context.config.name {
        return Err(ErrorBody::new(
            ErrorCode::Invalid,
            format!("disk {} is on node '{}' already", disk.name, request.to),
        )
        .hint("name another node"));
    }
    let peer = migrations.context.peer(&request.to)?.clone();
    let id = ids::new_id()?;
    let mut capacity = Sectors(0);
    let mut record = AuthorityRecord::vacant();
    let guard = disk.begin(Activity::Outgoing(id), |inner| {
        capacity = Sectors(inner.entry.sectors);
        record = inner.record;
        let state = inner.state();
        if state == DiskState::Serving && inner.engine.is_some() {
            return match end.stays() {
                true => inner.is_whole(&disk.name, "followed"),
                false => inner.may_leave(&disk.name),
            };
        }
        let error = ErrorBody::new(
            ErrorCode::Conflict,
            format!(
                "disk {} cannot be moved from here: it is {}",
                disk.name,
                state.name()
            ),
        );
        Err(match &inner.entry.moved_to {
            Some(owner) => error.hint(format!("node '{owner}' serves it: ask that node")),
            None => error.hint("see 'godwit disk show'"),
        })
    })?;
    let on_image = match end.stays() {
        true => None,
        false => base::choose(migrations, &disk, &peer, &request.options).await?,
    };
    options::check_size(&disk.name, &settings, capacity.bytes())?;
    let taken = taken(&disk, capacity).await?;
    if request.options.policy.is_some() || settings.verify {
        options::check_deadline(&disk.name, &settings, taken)?;
    }
    if request.options.policy.is_none() {
        settings.policy_reason = Some(auto::first_reason(taken, &migrations.context.config.name));
    }
    let as_whole = settings.clone();
    if let Some(on_image) = &on_image {
        base::adapt(&mut settings, on_image, request.options.policy.is_some());
    }
    let interface = options::open_interface(&disk.name, &settings)?;
    let baseline = promise::measure(disk.engine()).await;
    let promise = promise::settle(&disk.name, asked, baseline.as_ref())?;
    settings.sla = promise.target.map(|target| target.to_string());
    for warning in &promise.warnings {
        tracing::warn!(migration = %id, "{warning}");
    }
    let begin = Begin {
        id,
        disk: disk.name.clone(),
        peer: peer.name.clone(),
        options: Some(settings.clone()),
        by_node: request.options.policy.is_none(),
        bytes_total: capacity.bytes().0,
        data: taken,
        baseline,
        warnings: promise.warnings.clone(),
    };
    let cancelled = migrations.begin(begin).await;
    tracing::info!(
        disk = disk.name,
        to = peer.name,
        migration = %id,
        promise = settings.sla,
        guest_load = ?promise.guest_load,
        "offering the disk"
    );
    let attempt = Attempt {
        migrations: Arc::clone(migrations),
        disk,
        peer,
        id,
        settings,
        place,
        promise,
        end,
        on_image,
        as_whole,
    };
    let mut attempt =
        godwit_context::spawn(attempt.run(guard, cancelled, (capacity, record), interface));
    match tokio::time::timeout(ANSWER_AFTER, &mut attempt).await {
        // The other node takes its time; the migration's view shows the rest.
        Err(_) => {}
        Ok(Ok(started)) => started?,
        Ok(Err(error)) => {
            return Err(ErrorBody::new(
                ErrorCode::Internal,
                format!("the task that offers disk {} failed: {error}", request.disk),
            ));
        }
    }
    let (_, view) = migrations.get(&id.to_string())?;
    Ok(table::live(migrations, id, view))
}

fn given_up(disk: &Disk, code: ErrorCode, how: &str) -> ErrorBody {
    ErrorBody::new(
        code,
        format!("the migration of disk {} {how} before it began", disk.name),
    )
}

/// Returns the bytes occupied by the disk's image, or the disk's size if unknown.
async fn taken(disk: &Disk, capacity: Sectors) -> Result<u64, ErrorBody> {
    let path = disk.lock().entry.path.clone();
    let allocated = blocking(move || image::allocated(&path)).await?;
    Ok(allocated.unwrap_or(capacity.bytes().0))
}

/// The result of an accepted offer.
struct Connected {
    streams: PeerStreams,
    /// The features used by both nodes.
    agreed: Features,
    /// The destination's older copy of the disk.
    older_copy: OlderCopy,
}

/// A migration about to start.
struct Attempt {
    migrations: Arc<Migrations>,
    disk: Arc<Disk>,
    peer: PeerConfig,
    id: MigrationId,
    settings: MigrationSettings,
    /// The requested place at the destination.
    place: Option<Place>,
    promise: Promise,
    end: End,
    /// The base image that the disk leaves behind.
    on_image: Option<BaseImage>,
    /// The settings for a move of the whole disk after all.
    as_whole: MigrationSettings,
}

impl Attempt {
    /// Brings the migration to the start of the engine's part, or ends the migration.
    async fn run(
        mut self,
        guard: ActivityGuard,
        cancelled: Arc<Notify>,
        (capacity, record): (Sectors, AuthorityRecord),
        interface: Option<InterfaceCounter>,
    ) -> Result<(), ErrorBody> {
        let (disk, migrations) = (Arc::clone(&self.disk), Arc::clone(&self.migrations));
        let prepared = tokio::select! {
            prepared = self.prepare(capacity, record) => prepared,
            () = cancelled.notified() => {
                Err(given_up(&disk, ErrorCode::Conflict, "was cancelled"))
            }
            () = migrations.context.closed() => {
                Err(given_up(&disk, ErrorCode::ShuttingDown, "ended with the node"))
            }
        };
        let started = match prepared {
            Ok((connected, memory)) => self.start(connected, memory, interface).await,
            Err(error) => Err(error),
        };
        if let Err(error) = started {
            let id = self.id;
            tracing::warn!(disk = self.disk.name, migration = %id, %error, "did not start");
            drop(guard);
            self.migrations.end(id, Err(error.clone()), None).await;
            return Err(error);
        }
        guard.keep();
        // A cancellation may have come between the offer and the engine's start.
        tokio::select! {
            biased;
            () = cancelled.notified() => {
                following::give_up(&self.disk).await;
            }
            () = std::future::ready(()) => {}
        }
        Ok(())
    }

    /// Gets the offer accepted and prepares the chunk memory. If the destination cannot reach the base image, a disk
    /// that fetches nothing more from the image is offered as a whole.
    async fn prepare(
        &mut self,
        capacity: Sectors,
        record: AuthorityRecord,
    ) -> Result<(Connected, ChunkMemory), ErrorBody> {
        let why = match self.connect(capacity, record).await {
            Ok(connected) => return Ok((connected, self.memory().await?)),
            Err(Refused::Otherwise(error)) => return Err(error),
            Err(Refused::Image(why)) => why,
        };
        let fetches = {
            let inner = self.disk.lock();
            inner.entry.fetches(&inner.record).is_some()
        };
        if fetches {
            return Err(why);
        }
        self.settings = MigrationSettings {
            sla: self.settings.sla.take(),
            ..self.as_whole.clone()
        };
        if let Some(on_image) = self.on_image.take() {
            base::goes_as_a_whole(&mut self.settings, &on_image, &self.peer.name);
        }
        tracing::warn!(disk = self.disk.name, migration = %self.id, %why, "the disk moves as a whole");
        let told = vec![format!("the disk moves without its image: {why}")];
        let settings = self.settings.clone();
        self.migrations.set_options(self.id, settings, told).await;
        match self.connect(capacity, record).await {
            Ok(connected) => Ok((connected, self.memory().await?)),
            Err(Refused::Otherwise(error) | Refused::Image(error)) => Err(error),
        }
    }

    /// Opens the connections and makes the offer.
    async fn connect(
        &self,
        capacity: Sectors,
        record: AuthorityRecord,
    ) -> Result<Connected, Refused> {
        let attempted = format!("migrate disk {}", self.disk.name);
        let body = |error: DialError| error.into_body(&self.peer.name, &attempted);
        let allocated = match &self.on_image {
            Some(on_image) => {
                let found =
                    comparison::compare(&self.migrations.images, &self.disk, on_image).await?;
                tracing::info!(
                    disk = self.disk.name,
                    migration = %self.id,
                    image = on_image.image,
                    differs = found.different.0,
                    same = found.same.0,
                    "compared with its image"
                );
                found.different.0 + found.same.0
            }
            None => taken(&self.disk, capacity).await?,
        };
        let (mut control, knows) = self.dial(TrafficClass::Control).await.map_err(body)?;
        let policy = self.settings.policy;
        for (needed, feature, does, hint) in [
            (
                self.place.is_some(),
                Features::PLACES,
                String::from("puts disks in its data directory only"),
                "leave out where the disk is to be put",
            ),
            (
                policy.needs.contain(Features::POLICIES),
                Features::POLICIES,
                format!("takes disks by the policy {} only", Policy::default().name),
                "leave out --policy",
            ),
            (
                policy.needs.contain(Features::PULLS),
                Features::PULLS,
                String::from("serves no disk before all of it is there"),
                "choose another --policy",
            ),
            (
                self.end.stays(),
                Features::FOLLOWS,
                String::from("follows no disk"),
                "choose another backup",
            ),
            (
                matches!(self.end, End::Stays { checkpoints: true }),
                Features::CHECKPOINTS,
                String::from("keeps no writes apart until their checkpoint is whole"),
                "choose another backup",
            ),
        ] {
            if needed && !knows.features.contain(feature) {
                let peer = &self.peer.name;
                let text = format!("cannot {attempted}: node '{peer}' is older and {does}");
                return Err(ErrorBody::new(ErrorCode::Conflict, text)
                    .hint(format!("update that node, or {hint}"))
                    .into());
            }
        }
        let flight = InFlight::of(&self.settings);
        let offer = Greeting::Offer(Offer {
            epoch: record.epoch.next(),
            capacity,
            allocated,
            chunk_sectors: flight.chunk_sectors,
            window_chunks: flight.window_chunks,
            copy_connections: COPY_CONNECTIONS,
            place: self.place.clone(),
            policy: policy.0,
            image: self.on_image.as_ref().map(|on_image| OfferedImage {
                image: on_image.image.clone(),
                manifest: on_image.manifest.clone(),
                prefetch: on_image.prefetch,
            }),
            id: self.disk.id_for(knows.features),
        });
        let lost = |why: &dyn std::fmt::Display| {
            ErrorBody::new(
                ErrorCode::PeerUnreachable,
                format!(
                    "cannot {attempted}: node '{}' did not answer the offer: {why}",
                    self.peer.name
                ),
            )
            .hint("see the log of the other node, and start the migration again")
        };
        greeting::write(&mut control, &offer)
            .await
            .map_err(|error| lost(&error))?;
        failpoint::reach(String::from("offer::sent")).await;
        let older_copy = match greeting::read_within(&mut control, OFFER_TIMEOUT).await {
            Ok(Greeting::Reply(Reply::Accepted(older))) => match older {
                OlderCopy::Since(_) | OlderCopy::Unknown if self.settings.whole => OlderCopy::None,
                older => older,
            },
            Ok(Greeting::Reply(Reply::AcceptedBut(_))) if self.settings.whole => OlderCopy::None,
            Ok(Greeting::Reply(Reply::AcceptedBut(log))) => {
                let since = OlderCopy::Since(log.of);
                let engine = self.disk.engine();
                engine.iter().for_each(|it| it.may_differ(log.clone()));
                since
            }
            Ok(Greeting::Reply(Reply::Refused(refusal))) => {
                let error = refused(&refusal, &self.peer.name, &attempted);
                return Err(match refusal.code {
                    RefusalCode::Unknown if self.on_image.is_some() => Refused::Image(error),
                    _ => Refused::Otherwise(error),
                });
            }
            Ok(_) => return Err(lost(&"it answered something else").into()),
            Err(error) => return Err(lost(&error).into()),
        };
        self.migrations.accepted(self.id);
        let (sync, agreed) = self.dial(TrafficClass::Sync).await.map_err(body)?;
        let mut copies = Vec::with_capacity(usize::from(COPY_CONNECTIONS));
        for _ in 0..COPY_CONNECTIONS {
            let (copy, _) = self.dial(TrafficClass::Copy).await.map_err(body)?;
            copies.push(into_stream(copy).await.map_err(|error| lost(&error))?);
        }
        let streams = PeerStreams {
            peer: self.peer.name.clone(),
            control: into_stream(control).await.map_err(|error| lost(&error))?,
            sync: into_stream(sync).await.map_err(|error| lost(&error))?,
            copies,
            compression: agreed.features.contain(Features::COMPRESSION),
        };
        Ok(Connected {
            streams,
            agreed: agreed.features,
            older_copy,
        })
    }

    async fn dial(&self, class: TrafficClass) -> Result<(PeerConnection, Agreed), DialError> {
        let name = &self.migrations.context.config.name;
        let hello = greeting::hello(name, &self.disk.name, class, Purpose::Migrate, self.id);
        self.migrations.context.dialer.dial(&self.peer, hello).await
    }

    /// Returns the engine's options for a node with these features and this older copy.
    fn options(&self, agreed: Features, older_copy: OlderCopy) -> MigrationOptions {
        let of = Circumstances {
            migration: self.id,
            promise: &self.promise,
            agreed,
            older_copy,
            on_image: self.on_image.is_some(),
            governor: self.migrations.context.config.governor,
        };
        let mut options = options::engine(&self.settings, &of);
        if let End::Stays { checkpoints } = self.end {
            options.switchover = Switchover::Never { checkpoints };
        }
        options
    }

    /// Allocates the memory for the chunks.
    async fn memory(&self) -> Result<ChunkMemory, ErrorBody> {
        let engine = self.disk.engine().ok_or_else(|| self.engine_ended())?;
        let options = self.options(Features::default(), OlderCopy::None);
        blocking(move || engine.chunk_memory(&options))
            .await?
            .map_err(|error| {
                let disk = &self.disk.name;
                let text = format!("cannot migrate disk {disk}: no memory for its chunks: {error}");
                ErrorBody::new(ErrorCode::Internal, text).hint("ask for a smaller window")
            })
    }

    fn failed(&self, why: &dyn std::fmt::Display) -> ErrorBody {
        let text = format!("cannot migrate disk {}: {why}", self.disk.name);
        ErrorBody::new(ErrorCode::Conflict, text).hint("see 'godwit disk show'")
    }

    fn engine_ended(&self) -> ErrorBody {
        self.failed(&"it is not served any more")
    }

    /// Hands the connections to the engine.
    async fn start(
        &self,
        Connected {
            streams,
            agreed,
            older_copy,
        }: Connected,
        memory: ChunkMemory,
        interface: Option<InterfaceCounter>,
    ) -> Result<(), ErrorBody> {
        let engine = {
            let mut inner = self.disk.lock();
            // Stored together with the record by which the disk is given away.
            inner.entry.counterpart = Some(self.peer.name.clone());
            inner.entry.max_bandwidth = self.settings.max_bandwidth;
            inner.group = match &self.end {
                End::Leaves(group) => group.clone(),
                End::Stays { .. } => None,
            };
            inner.engine.as_ref().map(|engine| engine.handle.clone())
        }
        .ok_or_else(|| self.engine_ended())?;
        if self.on_image.is_none() {
            // An earlier attempt may have left a comparison.
            engine.forget_comparison();
        }
        let (reply, answer) = oneshot::channel();
        let reply = move |result| {
            // The waiting request may be gone.
            let _ = reply.send(result);
        };
        engine.start_source(
            self.options(agreed, older_copy),
            memory,
            streams,
            interface,
            Box::new(reply),
        );
        match answer.await {
            Ok(Ok(())) => {
                self.migrations.goes_on(self.id, agreed);
                Ok(())
            }
            Ok(Err(error)) => Err(self.failed(&error)),
            Err(_) => Err(self.engine_ended()),
        }
    }
}

/// Cancels a migration of either direction.
///
/// # Errors
/// The migration does not exist or has ended, or the disk is already given away.
pub async fn cancel(migrations: &Arc<Migrations>, id: &str) -> Result<Migration, ErrorBody> {
    let deadline = tokio::time::Instant::now() + CANCEL_WAIT;
    let (id, view) = migrations.get(id)?;
    if view.phase.ended() {
        return Err(ErrorBody::new(
            ErrorCode::Conflict,
            format!("migration {id} has ended: it is {}", view.phase.name()),
        ));
    }
    let disk = migrations.disks.get(&view.disk)?;
    migrations.cancel_offer(id);
    let mut stopped = view.phase == MigrationPhase::Offering;
    if !stopped && disk.lock().activity.migration() == Some(id) {
        stopped = following::give_up(&disk).await;
    }
    loop {
        let (_, view) = migrations.get(&id.to_string())?;
        if view.phase.ended() {
            return Ok(view);
        }
        if !stopped || tokio::time::Instant::now() >= deadline {
            return Err(ErrorBody::new(
                ErrorCode::Conflict,
                format!(
                    "migration {id} of disk {} is {}: it cannot be cancelled any more",
                    view.disk,
                    view.phase.name()
                ),
            )
            .hint("let it end, then migrate the disk back"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
