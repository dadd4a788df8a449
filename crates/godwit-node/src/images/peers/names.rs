//! What the name of an image stands for, from other nodes, while the repository is away that would tell.
//!
//! Content is checked by its hash, whoever it comes from; what a name stands for cannot be. So a node tells only what the
//! repository itself has said to it, with the time at which that content was pushed under the name. Of several answers the
//! one that was pushed last counts, and who asks for a disk is told which node it came from.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::{ErrorBody, ErrorCode};
use godwit_core::wire::Features;
use godwit_image::{ImageName, Manifest, ManifestId, PushTime};
use tokio::task::JoinSet;

use super::asking::{self, PATIENCE};
use super::messages::{Answer, Meaning, NameHash, Question};
use crate::config::PeerConfig;
use crate::images::creation::manifest_of;
use crate::images::told;
use crate::node::{Node, blocking};

/// Nodes that are asked at once.
const AT_ONCE: usize = 16;
/// How long a node may take to send what an image consists of, which may be long.
const MANIFEST: Duration = Duration::from_secs(30);

/// What a name stands for.
#[derive(Debug)]
pub(in crate::images) struct Named {
    pub(in crate::images) id: ManifestId,
    pub(in crate::images) manifest: Manifest,
    /// When it was pushed.
    pub(in crate::images) pushed: PushTime,
    /// The node that knows.
    pub(in crate::images) by: String,
}

/// A node, and what it knows.
type Said = (String, Meaning);

/// What the image is, as other nodes or this one know it from the repository.
///
/// # Errors
/// Nobody knows, two know different things of the same second, or what it consists of cannot be had.
pub(in crate::images) async fn named(
    node: &Arc<Node>,
    image: &ImageName,
) -> Result<Named, ErrorBody> {
    let name = NameHash::of(image.as_str());
    let mut said = Vec::new();
    for some in node.config.peers.chunks(AT_ONCE) {
        let mut asked = JoinSet::new();
        for peer in some.iter().cloned() {
            let node = Arc::clone(node);
            asked.spawn(async move { ask(&node, &peer, name).await.map(|it| (peer.name, it)) });
        }
        said.extend(asked.join_all().await.into_iter().flatten());
    }
    // This node last: others that say the same also have the image's chunks.
    said.extend(known(node, name).map(|meaning| (node.config.name.clone(), meaning)));
    let meaning = match latest(&said) {
        Ok(Some(meaning)) => meaning,
        Ok(None) => {
            let text = format!("no other node tells what image '{image}' is");
            return Err(ErrorBody::new(ErrorCode::Conflict, text));
        }
        Err((one, other)) => {
            let text = format!(
                "nodes '{one}' and '{other}' know image '{image}' as different ones that were pushed in the same second"
            );
            return Err(ErrorBody::new(ErrorCode::Conflict, text));
        }
    };
    for (by, _) in said.iter().filter(|(_, it)| *it == meaning) {
        if let Some(manifest) = manifest(node, by, meaning.manifest).await {
            return Ok(Named {
                id: meaning.manifest,
                manifest,
                pushed: meaning.pushed,
                by: by.clone(),
            });
        }
    }
    let by: Vec<&str> = said.iter().map(|(by, _)| by.as_str()).collect();
    let text = format!(
        "what image '{image}' consists of cannot be had from those who know it ({})",
        by.join(", ")
    );
    Err(ErrorBody::new(ErrorCode::Conflict, text))
}

async fn ask(node: &Arc<Node>, peer: &PeerConfig, name: NameHash) -> Option<Meaning> {
    let asked = async {
        if !asking::knows(node, peer, Features::IMAGE_NAMES)
            .await
            .ok()?
        {
            return None;
        }
        match asking::ask(node, peer, Question::Name(name)).await.ok()? {
            Answer::Here(bytes) => Meaning::decode(&bytes),
            Answer::NotThatChunk | Answer::Nothing => None,
        }
    };
    tokio::time::timeout(PATIENCE, asked).await.ok().flatten()
}

/// What was pushed last of what was said.
///
/// # Errors
/// Two nodes that say different things of the same second.
fn latest(said: &[Said]) -> Result<Option<Meaning>, (&str, &str)> {
    let Some((by, latest)) = said.iter().max_by_key(|(_, it)| it.pushed) else {
        return Ok(None);
    };
    let differs = |(_, it): &&Said| it.pushed == latest.pushed && it.manifest != latest.manifest;
    match said.iter().find(differs) {
        Some((other, _)) => Err((other, by)),
        None => Ok(Some(*latest)),
    }
}

/// The manifest, as this node has it.
async fn manifest(node: &Arc<Node>, by: &str, id: ManifestId) -> Option<Manifest> {
    let Ok(peer) = node.peer(by) else {
        let own = Arc::clone(node);
        let loaded = blocking(move || own.images.manifests.load(id)).await;
        return loaded.ok()?.ok().map(Arc::unwrap_or_clone);
    };
    let asked = asking::ask(node, peer, Question::Manifest(id));
    let answer = tokio::time::timeout(MANIFEST, asked).await.ok()?.ok()?;
    let Answer::Here(bytes) = answer else {
        return None;
    };
    let manifest = Manifest::decode(id, &bytes);
    if let Err(error) = &manifest {
        tracing::warn!(peer = by, manifest = %id, %error, "what that node says that an image consists of is not taken");
    }
    manifest.ok()
}

/// What the repository has said to this node of a name, as far as disks are here that were created from it.
pub(super) fn known(node: &Node, name: NameHash) -> Option<Meaning> {
    let of_it = |disk: Arc<crate::disks::disk::Disk>| {
        let inner = disk.lock();
        let base = inner.entry.base.as_ref()?;
        if NameHash::of(&base.image) != name {
            return None;
        }
        let told = node.images.told.of(&disk.name, &base.fetch);
        let pushed = match told {
            None => base.pushed.clone()?,
            // What another node said is not said on before the repository agrees.
            Some(told) if told.repository == told::Repository::Agrees => told.pushed,
            Some(_) => return None,
        };
        Some(Meaning {
            manifest: manifest_of(base)?,
            pushed: pushed.parse().ok()?,
        })
    };
    let meanings = node.disks.all().into_iter().filter_map(of_it);
    meanings.max_by_key(|meaning| meaning.pushed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(by: &str, manifest: u8, pushed: &str) -> Said {
        let meaning = Meaning {
            manifest: ManifestId([manifest; 32]),
            pushed: pushed.parse().expect("a second"),
        };
        (by.to_owned(), meaning)
    }

    #[test]
    fn what_was_pushed_last_counts_and_nobody_chooses_between_two() {
        let old = said("a", 1, "2025-01-31T12:00:00Z");
        let new = said("b", 2, "2025-01-31T12:00:01Z");
        let same = said("c", 2, "2025-01-31T12:00:01Z");
        let other = said("d", 3, "2025-01-31T12:00:01Z");
        assert_eq!(latest(&[]), Ok(None));
        let all = [old.clone(), new.clone(), same];
        assert_eq!(latest(&all), Ok(Some(new.1)));
        assert!(latest(&[new.clone(), other.clone(), old.clone()]).is_err());
        assert!(latest(&[other, old, new]).is_err());
    }
}
