//! Collections beside operations that are about to need chunks.

use std::fs;
use std::sync::Arc;

use godwit_image::{Progress, RepositoryError, User};

use crate::support::*;

#[tokio::test]
async fn nothing_is_collected_while_an_image_is_pushed_and_none_pushed_meanwhile() {
    let fixture = Fixture::new();
    let file = fixture.file("raw");
    raw_image(&file, 64, &[0, 1, 2], 0);
    fs::create_dir(fixture.store.join("leases")).expect("a folder");
    let lease = fixture.store.join("leases/somebody");
    fs::write(&lease, []).expect("written");
    let error = fixture.repository.collect(true).await.unwrap_err();
    assert!(
        error.to_string().contains("busy: an image is being pushed"),
        "{error}"
    );
    assert!(!fixture.store.join("collecting").exists());
    fs::remove_file(lease).expect("removed");

    fs::write(fixture.store.join("collecting"), []).expect("written");
    let error = push(&fixture.repository, "x", &file).await.unwrap_err();
    assert!(error.to_string().contains("(gc)"), "{error}");
    assert!(matches!(
        fixture.repository.collect(true).await,
        Err(RepositoryError::Busy { .. })
    ));
    let user = User {
        node: String::from("a"),
        node_id: String::from("1f"),
        disk: String::from("d"),
    };
    assert!(
        fixture
            .repository
            .begin_use(&name("x"), &user)
            .await
            .is_err()
    );
    assert!(
        fixture.objects("leases").is_empty(),
        "who steps back leaves nothing"
    );
}

#[tokio::test]
async fn what_the_dead_left_behind_keeps_nobody_away_for_long() {
    let fixture = Fixture::new();
    let file = fixture.file("raw");
    raw_image(&file, 2, &[0], 0);
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(16 * 60);
    fs::create_dir(fixture.store.join("leases")).expect("a folder");
    for dead in ["collecting", "leases/dead"] {
        let file = fs::File::create(fixture.store.join(dead)).expect("a file");
        file.set_modified(long_ago).expect("aged");
    }
    push(&fixture.repository, "x", &file).await.expect("pushed");
    fixture.repository.collect(true).await.expect("collected");
    assert!(fixture.objects("leases").is_empty());
    assert!(!fixture.store.join("collecting").exists());
    pull(&fixture.repository, "x", &fixture.file("back"))
        .await
        .expect("it is all there");
}

/// Pushes whose chunks have no owner yet, and collections, in any order: every pushed image is whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_beside_collections_never_loses_a_chunk() {
    let fixture = Arc::new(Fixture::new());
    let file = fixture.file("raw");
    raw_image(&file, 24, &[0, 5, 11, 17, 23], 9);
    let collector = {
        let fixture = Arc::clone(&fixture);
        tokio::spawn(async move {
            let mut collections = 0;
            for _ in 0..200 {
                match fixture.repository.collect(true).await {
                    Ok(_) => collections += 1,
                    Err(RepositoryError::Busy { .. }) => tokio::task::yield_now().await,
                    Err(error) => panic!("{error}"),
                }
            }
            collections
        })
    };
    let mut pushes = 0;
    while !collector.is_finished() {
        let progress = Progress::default();
        let never = std::future::pending();
        match fixture
            .repository
            .push(&name("x"), &file, REPLACE, &progress, never)
            .await
        {
            Ok(pushed) => {
                pushes += 1;
                let id = pushed.image.manifest.parse().expect("a name");
                let manifest = fixture.repository.manifest(id).await.expect("it is there");
                for chunk in manifest.chunks() {
                    let length = manifest.length(chunk.number);
                    fixture
                        .repository
                        .chunk(chunk.id, length)
                        .await
                        .expect("it is there");
                }
                fixture
                    .repository
                    .remove(&name("x"), false)
                    .await
                    .expect("removed");
            }
            Err(RepositoryError::Busy { .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
    let collections = collector.await.expect("it ends");
    assert!(
        pushes > 0 && collections > 0,
        "{pushes} pushes, {collections} collections"
    );
}

#[tokio::test]
async fn what_cannot_be_read_is_no_reason_to_remove_what_it_needs() {
    let fixture = Fixture::new();
    let file = fixture.file("raw");
    raw_image(&file, 2, &[0, 1], 0);
    push(&fixture.repository, "x", &file).await.expect("pushed");
    fs::write(fixture.store.join("images/x"), b"{").expect("damaged");
    let error = fixture.repository.collect(true).await.unwrap_err();
    assert!(
        matches!(error, RepositoryError::DamagedEntry { .. }),
        "{error}"
    );
    assert_eq!(fixture.objects("chunks").len(), 2);
    let dry = {
        fixture
            .repository
            .remove(&name("x"), true)
            .await
            .expect("removed");
        fixture.repository.collect(false).await.expect("counted")
    };
    assert_eq!((dry.manifests, dry.chunks), (1, 2));
    assert_eq!(fixture.objects("chunks").len(), 2, "it was only counted");
}
