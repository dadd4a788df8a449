//! Content that the repository has lost and a disk still needs.

use std::collections::HashMap;
use std::fs;
use std::future::ready;

use bytes::Bytes;
use godwit_image::{ChunkId, Manifest, ManifestChunk, RepositoryError, Used};

use crate::support::*;

/// Returns an image that a disk once used, and the image's chunks.
async fn known() -> (Fixture, Manifest, HashMap<ChunkId, Bytes>) {
    let (fixture, _) = with_image("base").await;
    let Used {
        id,
        manifest,
        pushed,
    } = fixture
        .repository
        .begin_use(&name("base"), &user("b", "old"))
        .await
        .expect("used");
    assert!(pushed.is_some());
    let mut chunks = HashMap::new();
    for chunk in manifest.chunks() {
        let bytes = fixture
            .repository
            .chunk(chunk.id, manifest.length(chunk.number));
        chunks.insert(chunk.id, bytes.await.expect("there"));
    }
    let old = user("b", "old");
    let ended = fixture.repository.end_use(id, &old);
    ended.await.expect("ended");
    (fixture, manifest, chunks)
}

/// Removes the name and collects all unused chunks.
async fn forget(fixture: &Fixture) {
    let base = name("base");
    let removed = fixture.repository.remove(&base, false);
    removed.await.expect("nobody is known to need it");
    fixture.repository.collect(true).await.expect("collected");
    assert!(fixture.objects("chunks").is_empty() && fixture.objects("manifests").is_empty());
}

#[tokio::test]
async fn what_was_removed_is_put_back_and_stays_as_long_as_the_disk_needs_it() {
    let (fixture, manifest, chunks) = known().await;
    forget(&fixture).await;
    let (id, late) = (manifest.encode().0, user("a", "late"));
    let base = name("base");
    let gone = fixture
        .repository
        .begin_use_of(id, &name("base"), &late)
        .await;
    assert!(matches!(gone, Err(RepositoryError::NoManifest { .. })));
    let find = |chunk: ManifestChunk| ready(chunks.get(&chunk.id).cloned());
    let done = fixture
        .repository
        .put_back(&manifest, &name("base"), &late, find)
        .await
        .expect("put back");
    assert_eq!((done.chunks, done.lost), (2, 0));
    assert_eq!(done.bytes, manifest.data_bytes());
    fixture.repository.collect(true).await.expect("collected");
    for chunk in manifest.chunks() {
        let length = manifest.length(chunk.number);
        let read = fixture.repository.chunk(chunk.id, length).await;
        assert!(read.expect("there") == chunks[&chunk.id]);
    }
    let again = fixture.repository.put_back(&manifest, &base, &late, find);
    assert_eq!(again.await.expect("all there"), Default::default());
    let used = fixture
        .repository
        .begin_use_of(id, &name("base"), &late)
        .await
        .expect("there again");
    assert_eq!(used.pushed, None, "no name stands for it");
    let ended = fixture.repository.end_use(id, &late);
    ended.await.expect("ended");
    fixture.repository.collect(true).await.expect("collected");
    assert!(fixture.objects("chunks").is_empty());
    assert!(fixture.objects("leases").is_empty());
}

#[tokio::test]
async fn what_nobody_has_is_counted_and_the_rest_is_put_back() {
    let (fixture, manifest, mut chunks) = known().await;
    forget(&fixture).await;
    let lost = manifest.chunks()[0].id;
    chunks.remove(&lost);
    let find = |chunk: ManifestChunk| ready(chunks.get(&chunk.id).cloned());
    let (base, user) = (name("base"), user("a", "d"));
    let put_back = fixture.repository.put_back(&manifest, &base, &user, find);
    let done = put_back.await.expect("put back");
    assert_eq!((done.chunks, done.lost), (1, 1));
    assert_eq!(done.pushed, None, "no name stands for it");
    // A copy of the lost chunk reappears and is pushed again.
    let pushed = push(&fixture.repository, "base", &fixture.file("raw")).await;
    pushed.expect("pushed");
    let find = |_| ready(None);
    let put_back = fixture.repository.put_back(&manifest, &base, &user, find);
    let done = put_back.await.expect("all there");
    assert_eq!((done.chunks, done.lost), (0, 0));
    assert!(done.pushed.is_some(), "the name stands for it again");
}

#[tokio::test]
async fn nothing_is_put_back_while_chunks_are_collected_and_none_are_collected_meanwhile() {
    let (fixture, manifest, chunks) = known().await;
    forget(&fixture).await;
    let find = |chunk: ManifestChunk| {
        let store = fixture.repository.clone();
        let bytes = chunks.get(&chunk.id).cloned();
        async move {
            let error = store.collect(true).await.unwrap_err();
            assert!(matches!(error, RepositoryError::Busy { .. }), "{error}");
            bytes
        }
    };
    let (image, user) = (name("base"), user("a", "d"));
    let put_back = fixture.repository.put_back(&manifest, &image, &user, find);
    assert_eq!(put_back.await.expect("put back").chunks, 2);
    fs::write(fixture.store.join("collecting"), []).expect("written");
    let find = |_| ready(None);
    let put_back = fixture.repository.put_back(&manifest, &image, &user, find);
    let error = put_back.await.unwrap_err();
    assert!(matches!(error, RepositoryError::Busy { .. }), "{error}");
}
