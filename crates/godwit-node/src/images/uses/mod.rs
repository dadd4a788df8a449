//! Tells the repository which disks of this node still fetch, so that what they need stays there.

mod late;
pub(in crate::images) mod put_back;
pub(in crate::images) mod told;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use godwit_core::authority::Ownership;
use godwit_image::{ManifestId, User};

use crate::disks::disk::Activity;
use crate::images::creation::manifest_of;
use crate::node::{Node, blocking};
use godwit_api::{DiskState, ErrorBody, ErrorCode};

/// How long to wait before what failed is tried again.
const RETRY: Duration = Duration::from_secs(60);
/// The same while a disk needs an image that nothing in the repository keeps for it.
const LATE_RETRY: Duration = Duration::from_secs(2);

/// A disk of this node as the repository knows it.
///
/// # Errors
/// What tells this node apart cannot be stored.
pub(super) async fn user(node: &Arc<Node>, disk: &str) -> Result<User, ErrorBody> {
    let path = node.images.folder.join("id");
    let read = blocking(move || -> std::io::Result<String> {
        if let Ok(text) = std::fs::read_to_string(&path)
            && text.len() == 32
            && text.chars().all(|digit| digit.is_ascii_hexdigit())
        {
            return Ok(text);
        }
        let id = crate::migrations::options::new_id().map_err(std::io::Error::other)?;
        let text = id.to_string();
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        // A crash leaves all of it or nothing, so that the node stays the one whose notes the repository has.
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
        node: node.config.name.clone(),
        node_id,
        disk: disk.to_owned(),
    })
}

/// Tells the repository about disks that fetch no more, until the node ends: at its start, and whenever one has
/// become whole or was removed; and about those that fetch without its knowing, as soon as it answers.
pub(crate) async fn watch(node: Arc<Node>) {
    if node.images.config.repository.is_none() {
        return;
    }
    let mut told = None;
    loop {
        let late = tokio::select! {
            late = late::note(&node) => late,
            () = node.closed() => return,
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
        let released = release(&node).await;
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
            () = node.images.released.notified() => {}
            () = node.closed() => return,
        }
    }
}

async fn release(node: &Arc<Node>) -> Result<(), ErrorBody> {
    // A disk that is created meanwhile waits: what it notes may be what is removed here.
    let _noting = node.images.noting.lock().await;
    let own = user(node, "").await?;
    let repository = node.images.repository()?;
    let noted = repository
        .uses()
        .await
        .map_err(|error| super::body(&error))?;
    let needed = needed(node);
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
    let _keeping = node.images.keeping.lock().await;
    let node = Arc::clone(node);
    blocking(move || {
        let known: HashSet<_> = disks_bases(&node).collect();
        node.images.manifests.retain(|id| known.contains(&id));
        // Before what was told is locked: who has a disk locked looks at what was told of it.
        let disks = node.disks.all().into_iter().filter_map(|disk| {
            let fetch = disk.lock().entry.base.as_ref()?.fetch.clone();
            Some((disk.name.clone(), fetch))
        });
        let disks = disks.collect();
        node.images.told.retain(&disks);
    })
    .await
}

/// The disks that fetch, and from what. Those that are being created may have noted anything.
fn needed(node: &Node) -> HashSet<(Option<ManifestId>, String)> {
    let disks = node.disks.all().into_iter().filter_map(|disk| {
        let inner = disk.lock();
        if inner.activity == Activity::Creating || inner.state() == DiskState::Importing {
            return Some((None, disk.name.clone()));
        }
        // One that comes has noted what it will need.
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

fn disks_bases(node: &Node) -> impl Iterator<Item = ManifestId> {
    let disks = node.disks.all().into_iter();
    disks.filter_map(|disk| manifest_of(disk.lock().entry.base.as_ref()?))
}
