//! The meaning of an image's name, from other nodes, while the repository is away.
//!
//! Content is checked by its hash, whatever its source. The meaning of a name cannot be checked. A node therefore tells
//! only meanings given by the repository itself, with the time at which the content was pushed under the name. Of
//! several answers, the latest push counts. The creator of a disk learns the answering node.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use godwit_api::{ErrorBody, ErrorCode};
use godwit_core::wire::Features;
use godwit_image::{ImageName, Manifest, ManifestId, PushTime};
use tokio::task::JoinSet;

use super::asking::{self, PATIENCE};
use super::messages::{Answer, Meaning, NameHash, Question};
use crate::images::Images;
use crate::images::creation::manifest_of;
use crate::images::uses::told;
use godwit_context::blocking;
use godwit_peers::config::PeerConfig;

/// Nodes asked at the same time.
const AT_ONCE: usize = 16;
/// Time limit for a node to send a manifest, which may be long.
const MANIFEST: Duration = Duration::from_secs(30);

/// The most by which the pusher's clock may be ahead of this node's.
const AHEAD: Duration = Duration::from_secs(5 * 60);

/// The meaning of a name, with the manifest.
#[derive(Debug)]
pub(in crate::images) struct Named {
    pub(in crate::images) id: ManifestId,
    pub(in crate::images) manifest: Manifest,
    /// The time of the push.
    pub(in crate::images) pushed: PushTime,
    /// The answering node.
    pub(in crate::images) by: String,
}

/// A node and its answer.
type Said = (String, Meaning);

/// Returns the image as known to other nodes or this one from the repository.
///
/// # Errors
/// No node knows the name, two nodes know different pushes of the same second, or the manifest cannot be had.
pub(in crate::images) async fn named(
    images: &Arc<Images>,
    image: &ImageName,
) -> Result<Named, ErrorBody> {
    let name = NameHash::of(image.as_str());
    let mut said = Vec::new();
    for some in images.context.config.peers.chunks(AT_ONCE) {
        let mut asked = JoinSet::new();
        for peer in some.iter().cloned() {
            let images = Arc::clone(images);
            asked.spawn(async move { ask(&images, &peer, name).await.map(|it| (peer.name, it)) });
        }
        said.extend(asked.join_all().await.into_iter().flatten());
    }
    // This node last: others with the same answer also have the image's chunks.
    said.extend(known(images, name).map(|meaning| (images.context.config.name.clone(), meaning)));
    let said = believed(said, PushTime::at(SystemTime::now() + AHEAD));
    let give = |by: String, id| {
        let images = Arc::clone(images);
        async move { manifest(&images, &by, id).await }
    };
    match latest_to_be_had(&said, give).await {
        Ok(Some((by, meaning, manifest))) => Ok(Named {
            id: meaning.manifest,
            manifest,
            pushed: meaning.pushed,
            by,
        }),
        Ok(None) if said.is_empty() => {
            let text = format!("no other node tells what image '{image}' is");
            Err(ErrorBody::new(ErrorCode::Conflict, text))
        }
        Ok(None) => {
            let by: Vec<&str> = said.iter().map(|(by, _)| by.as_str()).collect();
            let text = format!(
                "what image '{image}' consists of cannot be had from those who know it ({})",
                by.join(", ")
            );
            Err(ErrorBody::new(ErrorCode::Conflict, text))
        }
        Err((one, other)) => {
            let text = format!(
                "nodes '{one}' and '{other}' know image '{image}' as different ones that were pushed in the same second"
            );
            Err(ErrorBody::new(ErrorCode::Conflict, text))
        }
    }
}

/// Drops pushes later than `until`: a time in the future would win over all others.
fn believed(mut said: Vec<Said>, until: Option<PushTime>) -> Vec<Said> {
    said.retain(|(by, it)| {
        let believed = until.is_none_or(|until| it.pushed <= until);
        if !believed {
            tracing::warn!(peer = by, pushed = %it.pushed, "that node tells of a push in the future, which is not believed");
        }
        believed
    });
    said
}

/// Returns the latest answer with an obtainable manifest: the node, its answer and the manifest.
///
/// # Errors
/// Two nodes tell different pushes of the same second.
async fn latest_to_be_had<T, F>(
    said: &[Said],
    give: impl Fn(String, ManifestId) -> F,
) -> Result<Option<(String, Meaning, T)>, (String, String)>
where
    F: Future<Output = Option<T>>,
{
    let mut left = said.to_vec();
    loop {
        let meaning = match latest(&left) {
            Ok(Some(meaning)) => meaning,
            Ok(None) => return Ok(None),
            Err((one, other)) => return Err((one.to_owned(), other.to_owned())),
        };
        for (by, _) in left.iter().filter(|(_, it)| *it == meaning) {
            if let Some(given) = give(by.clone(), meaning.manifest).await {
                return Ok(Some((by.clone(), meaning, given)));
            }
        }
        tracing::warn!(manifest = %meaning.manifest, pushed = %meaning.pushed, "nobody gives what was pushed last; what was pushed before counts");
        left.retain(|(_, it)| *it != meaning);
    }
}

async fn ask(images: &Arc<Images>, peer: &PeerConfig, name: NameHash) -> Option<Meaning> {
    let asked = async {
        if !asking::knows(images, peer, Features::IMAGE_NAMES)
            .await
            .ok()?
        {
            return None;
        }
        match asking::ask(images, peer, Question::Name(name)).await.ok()? {
            Answer::Here(bytes) => Meaning::decode(&bytes),
            Answer::NotThatChunk | Answer::Nothing => None,
        }
    };
    tokio::time::timeout(PATIENCE, asked).await.ok().flatten()
}

/// Returns the answer with the latest push.
///
/// # Errors
/// Two nodes with different pushes of the same second.
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

/// Returns the manifest from the node `by`, which may be this node.
async fn manifest(images: &Arc<Images>, by: &str, id: ManifestId) -> Option<Manifest> {
    let Ok(peer) = images.context.peer(by) else {
        let own = Arc::clone(images);
        let loaded = blocking(move || own.manifests.load(id)).await;
        return loaded.ok()?.ok().map(Arc::unwrap_or_clone);
    };
    let asked = asking::ask(images, peer, Question::Manifest(id));
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

/// Returns the repository's meaning of a name, as far as known from disks of this node with an image of this name.
pub(super) fn known(images: &Images, name: NameHash) -> Option<Meaning> {
    let of_it = |disk: Arc<crate::disks::disk::Disk>| {
        let inner = disk.lock();
        let base = inner.entry.base.as_ref()?;
        if NameHash::of(&base.image) != name {
            return None;
        }
        let told = images.told.of(&disk.name, &base.fetch);
        let pushed = match told {
            None => base.pushed.clone()?,
            // Another node's answer is not passed on before the repository agrees.
            Some(told) if told.repository == told::Repository::Agrees => told.pushed,
            Some(_) => return None,
        };
        Some(Meaning {
            manifest: manifest_of(base)?,
            pushed: pushed.parse().ok()?,
        })
    };
    let meanings = images.disks.all().into_iter().filter_map(of_it);
    meanings.max_by_key(|meaning| meaning.pushed)
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    fn said(by: &str, manifest: u8, pushed: &str) -> Said {
        let meaning = Meaning {
            manifest: ManifestId([manifest; 32]),
            pushed: pushed.parse().expect("a second"),
        };
        (by.to_owned(), meaning)
    }

    #[tokio::test]
    async fn a_node_that_lies_of_the_time_or_gives_nothing_does_not_win_over_an_honest_one() {
        let honest = said("a", 1, "2025-01-31T12:00:00Z");
        let empty = said("b", 2, "2025-01-31T12:04:00Z");
        let future = said("c", 3, "2999-01-31T12:00:00Z");
        let until = "2025-01-31T12:05:00Z".parse().ok();
        let all = believed(vec![future, empty.clone(), honest.clone()], until);
        assert_eq!(all, [empty, honest.clone()]);
        let give = |by: String, _| ready((by != "b").then_some(()));
        let found = latest_to_be_had(&all, give).await;
        assert_eq!(found, Ok(Some((honest.0, honest.1, ()))));
        let nothing = |_: String, _| ready(None::<()>);
        assert_eq!(latest_to_be_had(&all, nothing).await, Ok(None));
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
