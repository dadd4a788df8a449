//! Tells the repository which disks of this node still fetch. The repository then keeps the chunks of these disks.

mod late;
pub(in crate::images) mod put_back;
pub(in crate::images) mod told;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use godwit_core::authority::Ownership;
use godwit_image::{ManifestId, User};

use crate::disks::disk::Activity;
use crate::images::Images;
use crate::images::creation::manifest_of;
use godwit_api::{DiskState, ErrorBody, ErrorCode};
use godwit_context::blocking;

/// Time between two attempts.
const RETRY: Duration = Duration::from_secs(60);
/// Time between two attempts while the repository does not yet keep an image for a disk.
const LATE_RETRY: Duration = Duration::from_secs(2);

/// Returns a disk of this node as the repository knows the disk.
///
/// # Errors
/// This node's id cannot be stored.
pub(super) async fn user(images: &Arc<Images>, disk: &str) -> Result<User, ErrorBody> {
    let path = images.folder.join("id");
    let read = blocking(move || -> std::io::Result<String> {
        if let Ok(text) = std::fs::read_to_string(&path)
            && text.len() == 32
            && text.chars().all(|digit| digit.is_ascii_hexdigit())
        {
            return Ok(text);
        }
        let id = godwit_context::ids::new_id().map_err(std::io::Error::other)?;
        let text = id.to_string();
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        // A crash leaves the whole id or nothing, so the node keeps the id of its notes in the repository.
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, &text)?;
        std::fs::File::open(&fresh)?.sync_all()?;
        std::fs::rename(&fresh, &path)?;
        if let Some(folder) = path.parent() {
            std::fs::File::open(folder)?.sync_all()?;
        }
        Ok(text)
    });
    let node_id = read.await?.map_err(|error| {
        let text = format!("disk {disk}: cannot store which node this is: {error}");
        ErrorBody::new(ErrorCode::Internal, text)
            .hint("see whether the node's data directory has space")
    })?;
    Ok(User {
        node: images.context.config.name.clone(),
        node_id,
        disk: disk.to_owned(),
    })
}

/// Tells the repository about disks that fetch no more, until the node ends: at the node's start, and whenever a disk
/// has become whole or was removed. Also tells of disks unknown to the repository, as soon as the repository answers.
pub async fn watch(images: Arc<Images>) {
    if !images.has_repository() {
        return;
    }
    let mut told = None;
    loop {
        let late = tokio::select! {
            late = late::note(&images) => late,
            () = images.context.closed() => return,
        };
        let why = late.as_ref().err().map(ToString::to_string);
        if why != told {
            if let Some(error) = &why {
                tracing::warn!(
                    error,
                    "cannot tell the repository which disks need an image; trying on"
                );
            }
            told = why;
        }
        let released = release(&images).await;
        if let Err(error) = &released {
            tracing::debug!(%error, "cannot tell the repository which disks fetch no more");
        }
        let again = match (late, released) {
            (Err(_), _) => Some(LATE_RETRY),
            (_, Err(_)) => Some(RETRY),
            _ => None,
        };
        let later = async {
            match again {
                Some(after) => tokio::time::sleep(after).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = later => {}
            () = images.released.notified() => {}
            () = images.context.closed() => return,
        }
    }
}

async fn release(images: &Arc<Images>) -> Result<(), ErrorBody> {
    // A disk created meanwhile waits: its note may equal one removed here.
    let _noting = images.noting.lock().await;
    let own = user(images, "").await?;
    let repository = images.repository()?;
    let noted = repository
        .uses()
        .await
        .map_err(|error| super::body(&error))?;
    let needed = needed(images);
    let vain = noted.into_iter().filter(|(id, user)| {
        let its = user.node == own.node && user.node_id == own.node_id;
        its && !needed.contains(&(Some(*id), user.disk.clone()))
            && !needed.contains(&(None, user.disk.clone()))
    });
    for (id, user) in vain {
        let ended = repository.end_use(id, &user).await;
        ended.map_err(|error| super::body(&error))?;
        tracing::info!(disk = user.disk, manifest = %id, "the disk needs the image no more");
    }
    let _keeping = images.keeping.lock().await;
    let images = Arc::clone(images);
    blocking(move || {
        let known: HashSet<_> = disks_bases(&images).collect();
        images.manifests.retain(|id| known.contains(&id));
        // Collected before the answers are locked: a holder of a disk's lock looks at the disk's answer.
        let disks = images.disks.all().into_iter().filter_map(|disk| {
            let fetch = disk.lock().entry.base.as_ref()?.fetch.clone();
            Some((disk.name.clone(), fetch))
        });
        let disks = disks.collect();
        images.told.retain(&disks);
    })
    .await
}

/// Returns the fetching disks with their manifests. A disk under creation may have noted any manifest.
fn needed(images: &Images) -> HashSet<(Option<ManifestId>, String)> {
    let disks = images.disks.all().into_iter().filter_map(|disk| {
        let inner = disk.lock();
        if inner.activity == Activity::Creating || inner.state() == DiskState::Importing {
            return Some((None, disk.name.clone()));
        }
        // An incoming disk has noted its future need.
        let comes = matches!(inner.activity, Activity::Incoming(_))
            || matches!(inner.record.ownership, Ownership::Accepted { .. });
        let base = match comes {
            true => inner.entry.base.as_ref()?,
            false => inner.entry.fetches(&inner.record)?,
        };
        Some((manifest_of(base), disk.name.clone()))
    });
    disks.collect()
}

fn disks_bases(images: &Images) -> impl Iterator<Item = ManifestId> {
    let disks = images.disks.all().into_iter();
    disks.filter_map(|disk| manifest_of(disk.lock().entry.base.as_ref()?))
}
