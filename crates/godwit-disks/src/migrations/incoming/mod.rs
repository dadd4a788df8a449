//! Receives disks.

pub mod admission;
pub mod gatherings;
mod images;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use godwit_block::engine::{PeerStream, PeerStreams};
use godwit_core::OlderCopy;
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::units::{DiskId, MigrationId, Sectors};
use godwit_core::wire::{Features, Greeting, Hello, Offer, Refusal, RefusalCode, TrafficClass};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use self::images::{open_device, open_new_image, replace_image};
use super::table::{self, Begin};
use crate::disks::disk::{Activity, Disk};
use crate::disks::lifecycle::{older_copy, remove, run};
use crate::disks::storage::{image, placement};
use crate::images::arrival;
use crate::migrations::Migrations;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::failpoint;
use godwit_context::ids::random_id;
use godwit_context::store::{BaseImage, DiskEntry, Mark};
use godwit_context::{PEER_TIMEOUT, blocking};
use godwit_peers::names;
use godwit_peers::{PeerConnection, greeting, into_stream};

/// Longest wait for the connections after an accepted offer.
const GATHER_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest wait of an offer for the disk's current activity here: the end of an earlier migration, or its cleanup.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(3);

/// Most incoming migrations whose connections are not complete.
const MAX_GATHERINGS: usize = 16;

/// Most copy connections of one migration.
const MAX_COPY_CONNECTIONS: u8 = 16;

/// Takes a control connection whose hello was welcomed: an offer follows.
pub async fn take_offer(migrations: Arc<Migrations>, mut control: PeerConnection, hello: Hello) {
    let offer = match greeting::read(&mut control).await {
        Ok(Greeting::Offer(offer)) => offer,
        other => {
            tracing::debug!(peer = hello.node, ?other, "no offer followed the hello");
            return;
        }
    };
    tracing::info!(peer = hello.node, disk = hello.disk, migration = %hello.migration, policy = offer.policy.name, "offered");
    let admitted = async {
        let bytes = offer.capacity.0.saturating_mul(Sectors(1).bytes().0);
        let place = migrations.arrivals.admit(
            (
                &migrations.context.config.name,
                migrations.context.config.incoming,
            ),
            (&hello.node, hello.migration, bytes),
            || {
                let all = migrations.under_way();
                all.into_iter().map(|(id, _)| id).collect()
            },
        )?;
        let (disk, older_copy) = prepare(&migrations, &hello, &offer).await?;
        Ok((disk, older_copy, place))
    };
    let (disk, older_copy, place) = match admitted.await {
        Ok(admitted) => admitted,
        Err(refusal) => {
            tracing::warn!(peer = hello.node, disk = hello.disk, %refusal, "refused the offer");
            greeting::refuse(&mut control, refusal).await;
            return;
        }
    };
    let begin = Begin {
        id: hello.migration,
        disk: disk.name.clone(),
        peer: hello.node.clone(),
        options: None,
        by_node: false,
        bytes_total: offer.capacity.bytes().0,
        data: offer.allocated,
        baseline: None,
        warnings: Vec::new(),
    };
    migrations.begin(begin).await;
    place.keep();
    failpoint::reach(String::from("offer::received")).await;
    let needed = match older_copy {
        OlderCopy::Zeroes => Features::ZEROES,
        _ => Features::DELTAS,
    };
    let older_copy = match hello.features.contain(needed) {
        true => older_copy,
        false => OlderCopy::None,
    };
    if let Err(error) = receive(&migrations, &disk, control, (&hello, &offer, older_copy)).await {
        table::end(&migrations, &disk, hello.migration, Err(error)).await;
        discard(migrations, disk, hello.migration).await;
    }
}

/// Accepts the offer, waits for the other connections, and starts the engine's part.
async fn receive(
    migrations: &Arc<Migrations>,
    disk: &Arc<Disk>,
    mut control: PeerConnection,
    (hello, offer, older_copy): (&Hello, &Offer, OlderCopy),
) -> Result<(), ErrorBody> {
    let failed = |why: &dyn std::fmt::Display| {
        ErrorBody::new(
            ErrorCode::PeerUnreachable,
            format!(
                "cannot receive disk {} from node '{}': {why}",
                disk.name, hello.node
            ),
        )
        .hint("start the migration again")
    };
    let (sender, mut arrivals) = mpsc::channel(usize::from(MAX_COPY_CONNECTIONS) + 1);
    let _listed = migrations.gatherings.begin(hello, &disk.name, sender);
    let accepted =
        older_copy::accepted(&migrations.context, disk, hello.features, older_copy).await;
    greeting::write(&mut control, &Greeting::Reply(accepted))
        .await
        .map_err(|error| failed(&error))?;
    migrations.accepted(hello.migration);
    let gather = gather(&mut arrivals, usize::from(offer.copy_connections));
    let (sync, copies) = tokio::select! {
        gathered = tokio::time::timeout(GATHER_TIMEOUT, gather) => match gathered {
            Ok(Ok(streams)) => streams,
            Ok(Err(error)) => return Err(failed(&error)),
            Err(_) => return Err(failed(&"its connections did not arrive in time")),
        },
        () = control.closed() => return Err(failed(&"it gave the migration up")),
        () = migrations.context.closed() => return Err(failed(&"this node is shutting down")),
    };
    let control = into_stream(control).await.map_err(|error| failed(&error))?;
    let streams = PeerStreams {
        peer: hello.node.clone(),
        control,
        sync,
        copies,
        // The frames themselves tell whether they are compressed.
        compression: false,
    };
    let unserved = "the disk is not served any more";
    let engine = disk.engine().ok_or_else(|| failed(&unserved))?;
    // Until now nothing was written to the image, which may serve another migration.
    older_copy::spoil(&migrations.context, disk)
        .await
        .map_err(|error| failed(&error))?;
    let (reply, answer) = oneshot::channel();
    let reply = move |result| {
        let _ = reply.send(result);
    };
    engine.start_destination(hello.migration, PEER_TIMEOUT, streams, Box::new(reply));
    match answer.await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(failed(&error)),
        Err(_) => Err(failed(&unserved)),
    }
}

async fn gather(
    arrivals: &mut mpsc::Receiver<(TrafficClass, PeerConnection)>,
    wanted: usize,
) -> std::io::Result<(PeerStream, Vec<PeerStream>)> {
    let mut sync = None;
    let mut copies = Vec::with_capacity(wanted);
    loop {
        match sync.take() {
            Some(sync) if copies.len() == wanted => return Ok((sync, copies)),
            kept => sync = kept,
        }
        // The table keeps a sender during this wait.
        let Some((class, connection)) = arrivals.recv().await else {
            return Err(std::io::ErrorKind::ConnectionAborted.into());
        };
        match class {
            TrafficClass::Sync if sync.is_none() => sync = Some(into_stream(connection).await?),
            TrafficClass::Copy if copies.len() < wanted => {
                copies.push(into_stream(connection).await?);
            }
            // An extra connection is closed.
            _ => {}
        }
    }
}

/// Makes the image ready to receive. The disk's current activity here gets a moment to end.
async fn prepare(
    migrations: &Arc<Migrations>,
    hello: &Hello,
    offer: &Offer,
) -> Result<(Arc<Disk>, OlderCopy), Refusal> {
    check(migrations, hello, offer)?;
    // Held until the disk is known, to protect the note about its image from removal as an earlier disk's.
    let noted = match &offer.image {
        Some(offered) => {
            let noted = arrival::note(&migrations.images, hello, offer, offered).await;
            Some(noted.map_err(arrival::refusal)?)
        }
        None => None,
    };
    let base = noted.as_ref().map(|noted| &noted.base);
    let deadline = Instant::now() + SETTLE_TIMEOUT;
    loop {
        let prepared = match migrations.disks.find(&hello.disk) {
            None => prepare_new(migrations, hello, offer, base)
                .await
                .map(|disk| (Arc::clone(&disk), new_image(&disk))),
            Some(disk) => prepare_known(migrations, &disk, hello, offer, base).await,
        };
        if prepared.is_err() && base.is_some() {
            migrations.images.release();
        }
        match prepared {
            Err(refusal) if refusal.code == RefusalCode::Busy && Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            prepared => return prepared,
        }
    }
}

fn check(migrations: &Arc<Migrations>, hello: &Hello, offer: &Offer) -> Result<(), Refusal> {
    let refuse = |code, text: String| Err(Refusal { code, text });
    if let Err(error) = migrations.context.check_open() {
        return refuse(RefusalCode::Busy, error.message);
    }
    if let Err(error) = names::check("disk", &hello.disk) {
        return refuse(RefusalCode::Invalid, error.message);
    }
    // The longest capacity that a file's offset and the core can both express.
    if offer.capacity.0 == 0 || offer.capacity.0 > (1 << 54) {
        return refuse(
            RefusalCode::Invalid,
            format!("a disk of {} sectors is not possible", offer.capacity.0),
        );
    }
    if offer.copy_connections == 0 || offer.copy_connections > MAX_COPY_CONNECTIONS {
        return refuse(
            RefusalCode::Invalid,
            format!(
                "{} copy connections were offered; 1 to {MAX_COPY_CONNECTIONS} are possible",
                offer.copy_connections
            ),
        );
    }
    if migrations.gatherings.count() >= MAX_GATHERINGS {
        return refuse(
            RefusalCode::Busy,
            format!(
                "node '{}' has {MAX_GATHERINGS} offers to answer already",
                migrations.context.config.name
            ),
        );
    }
    Ok(())
}

/// Prepares a disk new to this node.
async fn prepare_new(
    migrations: &Arc<Migrations>,
    hello: &Hello,
    offer: &Offer,
    base: Option<&BaseImage>,
) -> Result<Arc<Disk>, Refusal> {
    let wanted = wanted(migrations, hello, offer).await?;
    let is_device = {
        let (migrations, name) = (Arc::clone(migrations), hello.disk.clone());
        let (path, needed) = (wanted.clone(), offer.allocated);
        blocking(move || placement::admit(&migrations.disks, &name, &path, needed))
            .await
            .flatten()
            .map_err(refusal)?
    };
    if is_device && base.is_some() {
        return Err(Refusal {
            code: RefusalCode::Invalid,
            text: format!(
                "disk {} is on an image, and {} at node '{}' is a device: only files can be on images",
                hello.disk,
                wanted.display(),
                migrations.context.config.name
            ),
        });
    }
    let id = match offer.id {
        Some(id) => id,
        None => DiskId(random_id().map_err(refusal)?),
    };
    let entry = DiskEntry {
        // A device is not the node's to delete.
        managed: !is_device,
        counterpart: Some(hello.node.clone()),
        base: base.cloned(),
        mark: Some(Mark::Receiving {
            migration: hello.migration.to_string(),
            new: true,
        }),
        ..DiskEntry::new(id, wanted, offer.capacity)
    };
    let record = AuthorityRecord::vacant();
    let activity = Activity::Incoming(hello.migration);
    let disk = Disk::new(hello.disk.clone(), entry.clone(), record, activity);
    // Another offer was faster: try again.
    migrations.disks.insert(&disk).map_err(|error| Refusal {
        code: RefusalCode::Busy,
        text: error.message,
    })?;
    // Two offers at once may want one place. Nothing of this disk is there yet.
    if let Some(rival) = placement::rival(&migrations.disks, &disk) {
        migrations.disks.remove(&disk.name);
        return Err(Refusal {
            code: RefusalCode::DiskExists,
            text: format!(
                "{} at node '{}' is the image of disk {rival}",
                entry.path.display(),
                migrations.context.config.name
            ),
        });
    }
    let ready = async {
        migrations
            .context
            .store
            .put_disk(&disk.name, &entry, record)
            .await
            .map_err(|error| internal(migrations, &disk, &error))?;
        failpoint::reach(String::from("offer::admitted")).await;
        match is_device {
            true => open_device(migrations, &disk).await,
            // The image's content is fetched later, and its holes stay holes.
            false if base.is_some() => open_new_image(migrations, &disk, 0).await,
            false => open_new_image(migrations, &disk, offer.allocated).await,
        }
    };
    if let Err(refusal) = ready.await {
        if refusal.code == RefusalCode::DiskExists {
            // Another program made a file there meanwhile, which must not be deleted.
            disk.lock().entry.managed = false;
        }
        discard(Arc::clone(migrations), Arc::clone(&disk), hello.migration).await;
        return Err(refusal);
    }
    Ok(disk)
}

/// Returns the path at which the offer wants the disk's image.
async fn wanted(
    migrations: &Arc<Migrations>,
    hello: &Hello,
    offer: &Offer,
) -> Result<PathBuf, Refusal> {
    let (migrations, disk, place) = (
        Arc::clone(migrations),
        hello.disk.clone(),
        offer.place.clone(),
    );
    blocking(move || placement::path(&migrations.context.config, &disk, place.as_ref()))
        .await
        .flatten()
        .map_err(refusal)
}

/// Prepares a disk known from before: its stale image is filled again.
async fn prepare_known(
    migrations: &Arc<Migrations>,
    disk: &Arc<Disk>,
    hello: &Hello,
    offer: &Offer,
    base: Option<&BaseImage>,
) -> Result<(Arc<Disk>, OlderCopy), Refusal> {
    let name = &migrations.context.config.name;
    if offer.place.is_some() {
        let wanted = wanted(migrations, hello, offer).await?;
        let path = disk.lock().entry.path.clone();
        if path != wanted {
            return Err(Refusal {
                code: RefusalCode::DiskExists,
                text: format!(
                    "node '{name}' had disk {} before, in {}: remove it there first, or leave out \
                     where it is to be put",
                    disk.name,
                    path.display()
                ),
            });
        }
    }
    let activity = Activity::Incoming(hello.migration);
    let mut code = RefusalCode::Busy;
    let guard = disk
        .begin(activity, |inner| match inner.record.ownership {
            Ownership::Departed { .. } if inner.record.owes().is_some() => {
                let owner = inner.entry.moved_to.as_deref().unwrap_or("its owner");
                Err(ErrorBody::new(
                    ErrorCode::Conflict,
                    format!(
                        "disk {} at node '{name}' is what node '{owner}' still pulls a part from: move it \
                         when all of it is at node '{owner}'",
                        disk.name
                    ),
                ))
            }
            Ownership::Vacant | Ownership::Departed { .. } => Ok(()),
            Ownership::Serving => {
                code = RefusalCode::DiskExists;
                Err(ErrorBody::new(
                    ErrorCode::Exists,
                    format!(
                        "a disk named {} exists at node '{name}', which serves it",
                        disk.name
                    ),
                ))
            }
            Ownership::Accepted { .. } | Ownership::Relinquished { .. } => Err(ErrorBody::new(
                ErrorCode::Conflict,
                format!(
                    "disk {} is in doubt at node '{name}': an earlier migration is not decided",
                    disk.name
                ),
            )),
        })
        .map_err(|error| Refusal {
            code,
            text: error.message,
        })?;
    // The engine of an unused disk has ended since the disk left.
    let (same, ended) = {
        let inner = disk.lock();
        let ended = inner.engine.is_none() && inner.problem.is_none();
        (inner.entry.sectors == offer.capacity.0, ended)
    };
    if same && ended {
        run::open_and_start(&migrations.disks, disk).await;
    }
    let (usable, managed, path) = {
        let inner = disk.lock();
        let same = inner.entry.sectors == offer.capacity.0;
        (
            inner.engine.is_some() && same,
            inner.entry.managed,
            inner.entry.path.clone(),
        )
    };
    let held = image::allocated(&path).unwrap_or(0);
    let folder = path.parent().unwrap_or(&path);
    if managed {
        let more = offer.allocated.saturating_sub(held);
        image::check_space(name, &disk.name, folder, more).map_err(refusal)?;
    }
    if !usable {
        if !managed || disk.clients() > 0 {
            return Err(Refusal {
                code: RefusalCode::DiskExists,
                text: format!(
                    "the image {} of disk {} at node '{name}' cannot take {}: remove the disk there \
                     first",
                    path.display(),
                    disk.name,
                    offer.capacity.bytes()
                ),
            });
        }
        replace_image(migrations, disk, offer).await?;
    }
    let (entry, record) = {
        let mut inner = disk.lock();
        inner.entry.counterpart = Some(hello.node.clone());
        inner.entry.id = offer.id.or(inner.entry.id);
        inner.entry.base = base.cloned();
        (inner.entry.clone(), inner.record)
    };
    // Blocks not brought by a disk on an image are holes here, not an older copy.
    if base.is_some() {
        arrival::empty(&migrations.images, disk)
            .await
            .map_err(refusal)?;
        guard.keep();
        return Ok((Arc::clone(disk), OlderCopy::None));
    }
    let mut older_copy = match usable {
        true => blocking(move || older_copy::held(&entry, &record))
            .await
            .map_err(refusal)?,
        false => new_image(disk),
    };
    // Push and pull does not use an older copy. Zeroes need not be pulled.
    let is_empty = hello.features.contain(Features::ZEROES)
        && offer.policy.pulls()
        && older_copy == OlderCopy::Unknown
        && managed
        && arrival::empty(&migrations.images, disk).await.is_ok();
    if is_empty {
        older_copy = OlderCopy::Zeroes;
    }
    guard.keep();
    Ok((Arc::clone(disk), older_copy))
}

/// Returns the content of an image made for a disk: zeroes, unless the image is a device.
fn new_image(disk: &Disk) -> OlderCopy {
    let entry = &disk.lock().entry;
    match entry.managed && entry.base.is_none() {
        true => OlderCopy::Zeroes,
        false => OlderCopy::None,
    }
}

/// Keeps the image of a disk that follows here, also after a restart and after the end of the migration: the next one
/// sends only the differences.
pub(super) async fn keep_copy(migrations: &Migrations, disk: &Disk, migration: MigrationId) {
    {
        let mut inner = disk.lock();
        if inner.activity != Activity::Incoming(migration) {
            return;
        }
        inner.entry.mark = None;
    }
    let keep = |entry: &mut DiskEntry| entry.mark = None;
    if let Err(error) = migrations.context.store.change_disk(&disk.name, keep).await {
        tracing::warn!(disk = disk.name, %error, "a restart would remove the copy of the disk");
    }
}

/// Removes the leftovers of an incoming migration that did not make this node the owner. For a disk unknown here
/// before, this is everything.
pub(crate) async fn discard(migrations: Arc<Migrations>, disk: Arc<Disk>, migration: MigrationId) {
    {
        let mut inner = disk.lock();
        if inner.activity != Activity::Incoming(migration) {
            return;
        }
        if inner.entry.base.is_some() {
            // The note about the disk's image is not needed once this is done.
            migrations.images.release();
        }
        if !matches!(inner.entry.mark, Some(Mark::Receiving { new: true, .. })) {
            inner.activity = Activity::Idle;
            return;
        }
        inner.activity = Activity::Removing;
    }
    run::stop(&disk).await;
    if let Err(error) = remove::finish(&migrations.disks, &disk).await {
        tracing::error!(disk = disk.name, %error, "cannot remove the image that was not received");
        let mut inner = disk.lock();
        inner.problem = Some(error.message);
        inner.activity = Activity::Idle;
    }
}

fn refusal(error: ErrorBody) -> Refusal {
    let code = match error.code {
        ErrorCode::NoSpace => RefusalCode::NoSpace,
        ErrorCode::Exists => RefusalCode::DiskExists,
        ErrorCode::Invalid => RefusalCode::Invalid,
        ErrorCode::Busy => RefusalCode::Busy,
        _ => RefusalCode::Internal,
    };
    Refusal {
        code,
        text: error.message,
    }
}

fn internal(migrations: &Arc<Migrations>, disk: &Disk, error: &dyn std::fmt::Display) -> Refusal {
    Refusal {
        code: RefusalCode::Internal,
        text: format!(
            "disk {} cannot be received at node '{}': {error}",
            disk.name, migrations.context.config.name
        ),
    }
}
