//! Repositories that are down, slow, closed or damaged.

use std::fs;
use std::net::TcpListener;
use std::path::Path;

use godwit_image::{
    Keys, Location, ManifestId, Progress, PushOptions, Repository, RepositoryError,
};

use crate::support::*;

fn at(address: &str) -> Repository {
    let location: Location = "s3://images".parse().expect("a location");
    let location = location
        .at(format!("http://{address}"))
        .expect("an endpoint");
    let keys = Keys {
        id: String::from("id"),
        secret: String::from("secret"),
    };
    Repository::open_with(&location, Some(&keys)).expect("opened")
}

#[tokio::test]
async fn one_that_is_down_is_told_as_such() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address").to_string();
    drop(free);
    let error = at(&address).images().await.unwrap_err();
    assert!(matches!(error, RepositoryError::Down { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(&address) && text.contains("refused"),
        "{text}"
    );
}

#[tokio::test]
async fn a_directory_that_is_not_there_is_told_as_such() {
    let location = Location::Directory(Path::new("/nowhere/at/all").to_owned());
    let error = Repository::open(&location).unwrap_err().to_string();
    assert_eq!(
        error,
        "the repository /nowhere/at/all cannot be opened: there is no such directory"
    );
}

#[tokio::test]
async fn damage_is_found_before_anybody_uses_it() {
    let fixture = Fixture::new();
    let file = fixture.file("raw");
    raw_image(&file, 8, &[0, 4], 0);
    push(&fixture.repository, "x", &file).await.expect("pushed");
    let chunk = fixture.objects("chunks").pop().expect("a chunk");
    let whole = fs::read(&chunk).expect("read");

    let mut flipped = whole.clone();
    flipped[1000] ^= 1;
    for damaged in [
        &flipped[..],
        &whole[..whole.len() - 1],
        &[],
        &[&whole[..], &[0]].concat(),
    ] {
        fs::write(&chunk, damaged).expect("damaged");
        let error = pull(&fixture.repository, "x", &fixture.file("back"))
            .await
            .unwrap_err();
        assert!(
            matches!(error, RepositoryError::DamagedChunk { .. }),
            "{error}"
        );
        assert!(!fixture.file("back").exists(), "half a file is none");
    }
    fs::remove_file(&chunk).expect("removed");
    let error = pull(&fixture.repository, "x", &fixture.file("back"))
        .await
        .unwrap_err();
    assert!(matches!(error, RepositoryError::NoChunk { .. }), "{error}");

    fs::write(&chunk, whole).expect("repaired");
    let manifest = fixture.objects("manifests").pop().expect("a manifest");
    let bytes = fs::read(&manifest).expect("read");
    fs::write(&manifest, &bytes[..bytes.len() - 40]).expect("damaged");
    let error = pull(&fixture.repository, "x", &fixture.file("back"))
        .await
        .unwrap_err();
    assert!(
        matches!(error, RepositoryError::DamagedManifest { .. }),
        "{error}"
    );
    fs::remove_file(&manifest).expect("removed");
    let error = pull(&fixture.repository, "x", &fixture.file("back"))
        .await
        .unwrap_err();
    assert!(
        matches!(error, RepositoryError::NoManifest { .. }),
        "{error}"
    );
    assert!(!fixture.file("back").exists());
}

#[tokio::test]
async fn a_push_that_checks_repairs_what_is_damaged() {
    let fixture = Fixture::new();
    let file = fixture.file("raw");
    raw_image(&file, 8, &[0, 4, 7], 0);
    push(&fixture.repository, "x", &file).await.expect("pushed");
    let chunk = fixture.objects("chunks").pop().expect("a chunk");
    let whole = fs::read(&chunk).expect("read");
    let mut damaged = whole.clone();
    damaged[1000] ^= 1;
    fs::write(&chunk, &damaged).expect("damaged");

    let again = async |check| {
        let progress = Progress::default();
        let options = PushOptions {
            replace: true,
            check,
        };
        let never = std::future::pending();
        let name = name("x");
        let pushed = fixture
            .repository
            .push(&name, &file, options, &progress, never);
        pushed.await.expect("pushed").sent_bytes
    };
    assert_eq!(again(false).await, 0, "its length is right");
    assert!(fs::read(&chunk).expect("read") == damaged);
    assert_eq!(again(true).await, whole.len() as u64);
    assert!(fs::read(&chunk).expect("read") == whole);
    assert_eq!(again(true).await, 0, "nothing is damaged any more");
    pull(&fixture.repository, "x", &fixture.file("back"))
        .await
        .expect("pulled");
}

#[tokio::test]
async fn files_that_are_no_disks_are_refused() {
    let fixture = Fixture::new();
    let (odd, empty) = (fixture.file("odd"), fixture.file("empty"));
    fs::write(&odd, [1; 1000]).expect("written");
    fs::write(&empty, []).expect("written");
    for path in [
        &odd,
        &empty,
        &fixture.file("none"),
        &fixture.folder.path().to_owned(),
    ] {
        let error = push(&fixture.repository, "x", path).await.unwrap_err();
        assert!(matches!(error, RepositoryError::File { .. }), "{error}");
        assert!(
            error.to_string().contains(&path.display().to_string()),
            "{error}"
        );
    }
    assert!(fixture.objects("images").is_empty() && fixture.objects("leases").is_empty());
}

#[tokio::test]
async fn a_directory_that_has_gone_is_not_made_anew() {
    let fixture = Fixture::new();
    let file = fixture.file("raw");
    raw_image(&file, 2, &[0], 0);
    push(&fixture.repository, "x", &file).await.expect("pushed");
    let away = fixture.file("away");
    fs::rename(&fixture.store, &away).expect("gone");
    let down = |error: RepositoryError| matches!(error, RepositoryError::Down { .. });
    assert!(down(
        push(&fixture.repository, "y", &file).await.unwrap_err()
    ));
    assert!(down(
        pull(&fixture.repository, "x", &fixture.file("back"))
            .await
            .unwrap_err()
    ));
    assert!(down(fixture.repository.images().await.unwrap_err()));
    assert!(down(fixture.repository.collect(true).await.unwrap_err()));
    assert!(!fixture.store.exists());
}

#[tokio::test]
async fn a_directory_that_is_empty_is_away_for_disks_and_not_for_a_push() {
    let fixture = Fixture::new();
    let (base, late) = (name("base"), user("a", "late"));
    let id = ManifestId([1; 32]);
    let created = fixture.repository.begin_use(&base, &late).await;
    let noted = fixture.repository.begin_use_of(id, &base, &late).await;
    for answer in [created, noted] {
        let error = answer.unwrap_err();
        assert!(error.is_away(), "{error}");
    }
    let left = fs::read_dir(&fixture.store).expect("a folder").count();
    assert_eq!(left, 0, "something is left where another may be mounted");
    let (fixture, _) = with_image("base").await;
    let used = fixture.repository.begin_use(&base, &late).await;
    assert!(used.is_ok(), "{used:?}");
    let other = fixture.repository.begin_use(&name("other"), &late).await;
    assert!(matches!(other, Err(RepositoryError::NoImage { .. })));
}

#[tokio::test]
async fn a_directory_that_refuses_is_not_away() {
    let (fixture, _) = with_image("base").await;
    let (base, disk) = (name("base"), user("a", "d"));
    // A file in place of a folder: permissions would not stop a test that runs as root.
    fs::remove_dir_all(fixture.store.join("uses")).ok();
    fs::write(fixture.store.join("uses"), []).expect("written");
    let used = fixture.repository.begin_use(&base, &disk);
    let error = used.await.unwrap_err();
    assert!(!error.is_away() && error.may_pass(), "{error}");
    fs::remove_dir_all(&fixture.store).expect("removed");
    let used = fixture.repository.begin_use(&base, &disk);
    assert!(used.await.unwrap_err().is_away());
}
