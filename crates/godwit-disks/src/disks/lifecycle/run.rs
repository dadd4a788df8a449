//! Starts and stops a disk's engine, and carries out its requests.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use godwit_block::engine::{self, EngineConfig, EngineEvent, EngineHandle, Restored};
use godwit_block::image::{Image, ImageKind};
use godwit_core::authority::{AuthorityRecord, Ownership};
use godwit_core::event::Event;
use godwit_core::units::Sectors;
use tokio::sync::mpsc;

use crate::disks::Disks;
use crate::disks::Said;
use crate::disks::disk::{Disk, Engine};
use crate::disks::lifecycle::older_copy::Blocks;
use crate::disks::lifecycle::{lacking, older_copy, resize};
use crate::disks::vhost;
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::config::AfterReadWait;
use godwit_context::failpoint;

/// Time between two attempts to store.
pub(in crate::disks::lifecycle) const STORE_RETRY: Duration = Duration::from_secs(1);

/// Starts the disk's engine on its image, with the stored record.
///
/// # Errors
/// The image's size differs from the disk's (a larger device is fine), or the engine cannot start.
pub fn start(disks: &Arc<Disks>, disk: &Arc<Disk>, mut image: Image) -> Result<(), ErrorBody> {
    let (record, sectors, shared, on_demand_only, on_image, surpassed, owed_bandwidth) = {
        let inner = disk.lock();
        let (entry, record) = (&inner.entry, inner.record);
        let base = entry.fetches(&record);
        let on_demand_only = base.is_some_and(|base| !base.prefetch);
        let on_image = entry.base.is_some();
        (
            record,
            entry.sectors,
            entry.shared,
            on_demand_only,
            on_image,
            entry.surpassed.is_some(),
            entry.max_bandwidth,
        )
    };
    image.leave_the_rest_of_a_device(Sectors(sectors));
    if image.capacity != Sectors(sectors) {
        return Err(ErrorBody::new(
            ErrorCode::Conflict,
            format!(
                "disk {} has {}, but its image {} has {}",
                disk.name,
                Sectors(sectors).bytes(),
                image.path.display(),
                image.capacity.bytes()
            ),
        )
        .hint(format!(
            "if the image was made larger on purpose: 'godwit disk resize {}'; else give it its size back",
            disk.name
        )));
    }
    let mut config = EngineConfig::new(disk.name.clone());
    config.max_clients = disks.context.config.nbd_connections;
    config.shared = shared;
    config.pull_on_demand_only = on_demand_only;
    let read_wait = disks.context.config.read_wait;
    match disks.context.config.read_wait_then {
        AfterReadWait::Error => config.longest_missing_wait = read_wait,
        AfterReadWait::Pause => config.missing_pauses_after = read_wait,
    }
    if disk.lock().entry.abandoned {
        config.longest_missing_wait = Some(Duration::ZERO);
        config.missing_pauses_after = None;
    }
    config.on_image = on_image;
    config.surpassed = surpassed;
    // A device has no room beside it.
    let device = image.kind == ImageKind::BlockDevice;
    config.kept_in = device.then(|| disks.context.config.data_dir.clone());
    config.owed_bandwidth = owed_bandwidth;
    let (sender, events) = mpsc::unbounded_channel();
    let clients = Arc::clone(&disk.clients);
    let report = move |event| {
        if let EngineEvent::Clients(count) = event {
            clients.store(count, Ordering::Relaxed);
        } else {
            // The receiver is gone only when the node has ended.
            let _ = sender.send(event);
        }
    };
    let prepare = |blocks| older_copy::prepare(&disks.context.config, blocks, &disk.name);
    let take =
        |blocks| older_copy::take(&disks.context.config, blocks, &disk.name, &record, &image);
    config.written = prepare(Blocks::Written);
    if on_image {
        config.compared = prepare(Blocks::Different)
            .zip(prepare(Blocks::Same))
            .map(<[_; 2]>::from);
    }
    let compared = take(Blocks::Different).zip(take(Blocks::Same));
    let restored = Restored {
        missing: lacking::load(&disks.context.config, &disk.name, Sectors(sectors), &record)?,
        written: take(Blocks::Written),
        compared: compared.map(<[_; 2]>::from).filter(|_| on_image),
        activity: older_copy::log(&disks.context.config, disk, Ownership::Serving)?,
    };
    let handle = engine::spawn_restored(config, image, record, restored, Box::new(report))
        .map_err(|error| ErrorBody::new(ErrorCode::Internal, chain(&error)))?;
    let task = run_events(Arc::clone(disks), Arc::clone(disk), handle.clone(), events);
    let mut inner = disk.lock();
    if inner.held {
        handle.hold();
    }
    let vhost =
        (!inner.vhost_held).then(|| vhost::serve(&disks.context.config, &disk.name, &handle));
    let vhost = vhost.flatten();
    inner.problem = None;
    inner.engine = Some(Engine {
        handle,
        vhost,
        events: godwit_context::spawn(task),
    });
    Ok(())
}

/// Ends the disk's engine and waits for the engine and its events. Must not be called by the task that handles the
/// events.
pub async fn stop(disk: &Arc<Disk>) {
    let _ending = disk.ending.lock().await;
    let engine = {
        let mut inner = disk.lock();
        if let Some(resolver) = inner.resolver.take() {
            resolver.abort();
        }
        inner.engine.take()
    };
    if let Some(engine) = engine {
        end(disk, engine).await;
    }
}

/// Ends an engine taken out of the disk.
pub(in crate::disks) async fn end(disk: &Disk, engine: Engine) {
    // Virtual machines connect again when the disk is served again.
    drop(engine.vhost);
    engine.handle.shutdown();
    let handle = engine.handle;
    match tokio::task::spawn_blocking(move || handle.join()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::error!(
                disk = disk.name,
                error = chain(&error),
                "the disk's thread ended badly"
            );
        }
        Err(error) => {
            tracing::error!(disk = disk.name, %error, "the disk's thread did not end in order")
        }
    }
    // The events end with the engine.
    let _ = engine.events.await;
    disk.clients.store(0, Ordering::Relaxed);
}

/// Leaves the disk's engine as it is until this process ends, as a crash would. For disks whose machine's memory is
/// still on its way: the engine may wait for a page. An orderly end would put a page of zeroes in the place of the
/// missing one.
pub fn abandon(disk: &Arc<Disk>) {
    let engine = disk.lock().engine.take();
    std::mem::forget(engine);
}

/// Tells the users of disks, and waits until they have reacted.
async fn tell(disks: &Arc<Disks>, disk: &Arc<Disk>, said: Said) {
    disks.tell(disk, said).await;
}

async fn run_events(
    disks: Arc<Disks>,
    disk: Arc<Disk>,
    handle: EngineHandle,
    mut events: mpsc::UnboundedReceiver<EngineEvent>,
) {
    tell(&disks, &disk, Said::Started).await;
    while let Some(event) = events.recv().await {
        match event {
            EngineEvent::Persist(record) => {
                let group = disk.lock().group.clone();
                let group = group.filter(|group| group.gathers(&record));
                if let Some(group) = group {
                    group.ask(&disks, &disk, handle.clone(), record).await;
                } else if persist(&disks, &disk, record).await {
                    handle.persisted();
                }
            }
            EngineEvent::Core(Event::SharingChanged { shared }) => {
                if keep_sharing(&disks, &disk, shared).await {
                    handle.sharing_stored();
                }
            }
            EngineEvent::Core(event) => tell(&disks, &disk, Said::Core(event)).await,
            EngineEvent::StoreMissing(snapshot) => {
                let (disks, disk) = (Arc::clone(&disks), Arc::clone(&disk));
                godwit_context::spawn(lacking::store(disks, disk, handle.clone(), snapshot));
            }
            EngineEvent::StoreActivity(log) => {
                let stored = older_copy::store_log(&disks, &disk, log).await;
                handle.activity_stored(stored);
            }
            EngineEvent::BecameBase {
                migration,
                fingerprint,
            } => older_copy::keep(&disks, &disk, migration, fingerprint).await,
            EngineEvent::PullDown => tell(&disks, &disk, Said::PullDown).await,
            EngineEvent::ForwardDown => tell(&disks, &disk, Said::ForwardDown).await,
            EngineEvent::WaitsLong => tell(&disks, &disk, Said::WaitsLong).await,
            EngineEvent::OutOfSpace(true) => tell(&disks, &disk, Said::OutOfSpace).await,
            EngineEvent::OutOfSpace(false) => {
                tracing::info!(disk = disk.name, "there is room for the disk again");
            }
            // Counted by `report`.
            EngineEvent::Clients(_) => {}
            EngineEvent::Failed(problem) => failed(&disks, &disk, problem).await,
        }
    }
}

/// Cleans up after an engine that ended by itself. The engine's migration ends too, unless only another node can decide
/// the migration.
async fn failed(disks: &Arc<Disks>, disk: &Arc<Disk>, problem: String) {
    tracing::error!(disk = disk.name, problem, "the disk is not served any more");
    let migration = {
        let mut inner = disk.lock();
        inner.problem = Some(problem.clone());
        // The handle is useless: the thread has ended or is about to.
        inner.engine = None;
        let undecided = inner.in_doubt();
        inner
            .activity
            .migration()
            .filter(|&migration| undecided != Some(migration))
    };
    disk.clients.store(0, Ordering::Relaxed);
    if let Some(migration) = migration {
        tell(disks, disk, Said::EngineFailed { migration, problem }).await;
    }
}

/// Stores whether more than one party may have written to the disk. At the owner at once: the engine holds I/O
/// meanwhile. At a destination, the flag is stored with the next record. Returns false if the node ended first.
async fn keep_sharing(disks: &Arc<Disks>, disk: &Arc<Disk>, shared: bool) -> bool {
    let (serves, record) = {
        let mut inner = disk.lock();
        inner.entry.shared = shared;
        let serves = inner.record.ownership == Ownership::Serving;
        (serves, inner.record)
    };
    !serves || store(disks, disk, record, "who writes to the disk").await
}

/// Makes a record durable, together with its consequences for the entry. Retries until success: the engine holds the
/// guest's I/O meanwhile, and going on without the record would risk two owners. Returns false if the node ended first.
async fn persist(disks: &Arc<Disks>, disk: &Arc<Disk>, record: AuthorityRecord) -> bool {
    let step = match record.ownership {
        Ownership::Vacant => "vacant",
        Ownership::Serving => "serving",
        Ownership::Accepted { .. } => "accepted",
        Ownership::Relinquished { .. } => "relinquished",
        Ownership::Departed { .. } => "departed",
    };
    failpoint::reach(format!("persist::before::{step}")).await;
    if !store(disks, disk, record, "who owns the disk").await {
        return false;
    }
    failpoint::reach(format!("persist::after::{step}")).await;
    disks.owners.send_replace(());
    tracing::info!(
        disk = disk.name,
        epoch = record.epoch.0,
        ownership = step,
        "stored who owns the disk"
    );
    true
}

/// Stores the disk's entry with this record. `what` names the awaited state in messages about a failure. Retries until
/// success; returns false if the node ended first.
async fn store(disks: &Arc<Disks>, disk: &Arc<Disk>, record: AuthorityRecord, what: &str) -> bool {
    let mut entry = disk.lock().entry.clone();
    entry.adopt(&record);
    while let Err(error) = disks
        .context
        .store
        .put_disk(&disk.name, &entry, record)
        .await
    {
        tracing::error!(disk = disk.name, %error, "cannot store {what}; trying again");
        disk.lock().problem = Some(format!("{what} cannot be stored: {error}"));
        tokio::select! {
            () = tokio::time::sleep(STORE_RETRY) => {}
            () = disks.context.closed() => return false,
        }
    }
    let mut inner = disk.lock();
    inner.entry = entry;
    inner.record = record;
    inner.problem = None;
    true
}

/// Opens the disk's image and starts its engine. An error is kept as the disk's problem.
pub async fn open_and_start(disks: &Arc<Disks>, disk: &Arc<Disk>) {
    let path = disk.lock().entry.path.clone();
    let name = disk.name.clone();
    let _ending = disk.ending.lock().await;
    let opened = blocking(move || crate::disks::storage::image::open(&name, &path))
        .await
        .flatten();
    let opened = match opened {
        Ok(image) => resize::finish(disks, disk, &image).await.map(|()| image),
        Err(error) => Err(error),
    };
    if let Err(error) = opened.and_then(|image| start(disks, disk, image)) {
        tracing::error!(disk = disk.name, %error, "cannot start the disk");
        disk.lock().problem = Some(error.message);
    } else if disk.lock().record.owes().is_some() {
        tell(disks, disk, Said::PullDown).await;
    }
}

/// Formats an error with all its causes.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
