//! Images go in and come out, in a directory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use godwit_image::{CHUNK_BYTES, Progress, PushOptions, RepositoryError, Used, convert};

use crate::support::*;

#[tokio::test]
async fn a_directory_does_its_work() {
    let fixture = Fixture::new();
    does_its_work(&fixture.repository).await;
    assert!(
        fixture.objects("leases").is_empty(),
        "nothing is left behind"
    );
}

#[tokio::test]
async fn holes_and_zeroes_are_stored_nowhere_and_come_back_as_holes() {
    let fixture = Fixture::new();
    let file = fixture.file("raw");
    raw_image(&file, 400, &[5, 399], 0);
    // Written zeroes and a duplicate chunk.
    let zeroes = vec![0; CHUNK_BYTES as usize];
    let open = fs::OpenOptions::new()
        .write(true)
        .open(&file)
        .expect("the file");
    std::os::unix::fs::FileExt::write_all_at(&open, &zeroes, 9 * CHUNK_BYTES).expect("written");
    let twice =
        fs::read(&file).expect("read")[5 * CHUNK_BYTES as usize..][..CHUNK_BYTES as usize].to_vec();
    std::os::unix::fs::FileExt::write_all_at(&open, &twice, 77 * CHUNK_BYTES).expect("written");
    let pushed = push(&fixture.repository, "thin", &file)
        .await
        .expect("pushed");
    assert_eq!(pushed.image.data_bytes, 3 * CHUNK_BYTES);
    assert_eq!(pushed.sent_bytes, 2 * CHUNK_BYTES);
    assert_eq!(fixture.objects("chunks").len(), 2);
    let back = fixture.file("back");
    pull(&fixture.repository, "thin", &back)
        .await
        .expect("pulled");
    assert!(fs::read(&file).unwrap() == fs::read(&back).unwrap());
    let allocated = fs::metadata(&back).expect("its length").blocks() * 512;
    assert!(allocated <= 4 * CHUNK_BYTES, "{allocated} bytes of 100 MB");
}

#[tokio::test]
async fn a_name_is_taken_until_it_is_replaced() {
    let fixture = Fixture::new();
    let (first, second) = (fixture.file("1"), fixture.file("2"));
    raw_image(&first, 2, &[0], 1);
    raw_image(&second, 2, &[0], 2);
    push(&fixture.repository, "x", &first)
        .await
        .expect("pushed");
    let error = push(&fixture.repository, "x", &second).await.unwrap_err();
    assert!(matches!(error, RepositoryError::Exists { .. }), "{error}");
    let progress = Progress::default();
    let never = std::future::pending();
    let replaced = fixture
        .repository
        .push(&name("x"), &second, REPLACE, &progress, never)
        .await;
    replaced.expect("replaced");
    pull(&fixture.repository, "x", &fixture.file("back"))
        .await
        .expect("pulled");
    assert!(fs::read(second).unwrap() == fs::read(fixture.file("back")).unwrap());
}

#[tokio::test]
async fn of_two_that_push_a_name_at_once_one_gets_it() {
    let fixture = Fixture::new();
    let (first, second) = (fixture.file("1"), fixture.file("2"));
    raw_image(&first, 2, &[0], 1);
    raw_image(&second, 2, &[0], 2);
    let (one, other) = tokio::join!(
        push(&fixture.repository, "x", &first),
        push(&fixture.repository, "x", &second)
    );
    let refused = [&one, &other].into_iter().find_map(|it| it.as_ref().err());
    let refused = refused.expect("one of both is refused");
    assert!(
        matches!(refused, RepositoryError::Exists { .. }),
        "{refused}"
    );
    let kept = if one.is_ok() { first } else { second };
    pull(&fixture.repository, "x", &fixture.file("back"))
        .await
        .expect("pulled");
    assert!(fs::read(kept).unwrap() == fs::read(fixture.file("back")).unwrap());
}

#[tokio::test]
async fn whoever_is_interrupted_leaves_neither_a_name_nor_a_file() {
    let fixture = Fixture::new();
    let file = fixture.file("raw");
    raw_image(&file, 64, &[0, 1, 2, 3], 0);
    let progress = Progress::default();
    let at_once = std::future::ready(());
    let pushed = fixture
        .repository
        .push(
            &name("x"),
            &file,
            PushOptions::default(),
            &progress,
            at_once,
        )
        .await;
    // Either the push or the interruption may win the race. The name and its chunks go together.
    if pushed.is_err() {
        assert!(fixture.objects("images").is_empty());
    }
    assert!(fixture.objects("leases").is_empty());
    let progress = Progress::default();
    let never = std::future::pending();
    let replaced = fixture
        .repository
        .push(&name("x"), &file, REPLACE, &progress, never)
        .await;
    replaced.expect("pushed");
    let back = fixture.file("back");
    let pulled = fixture
        .repository
        .pull(&name("x"), &back, &progress, std::future::ready(()))
        .await;
    assert_eq!(pulled.is_err(), !back.exists());
}

#[tokio::test]
async fn what_disks_fetch_from_is_removed_only_by_force() {
    let (fixture, file) = with_image("base").await;
    let user = user("a", "d");
    let Used { id, manifest, .. } = fixture
        .repository
        .begin_use(&name("base"), &user)
        .await
        .expect("used");
    let error = fixture
        .repository
        .remove(&name("base"), false)
        .await
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "image 'base' is in use: disk a/d still fetches from it"
    );
    // The content is still there under another name, and so are the chunks.
    push(&fixture.repository, "other", &file)
        .await
        .expect("pushed");
    fixture
        .repository
        .remove(&name("base"), false)
        .await
        .expect("removed");
    let removed = fixture
        .repository
        .remove(&name("other"), true)
        .await
        .expect("removed");
    assert_eq!(removed.users, ["a/d"]);
    // The disk that still fetched lost its content, as requested.
    assert_eq!(
        fixture
            .repository
            .collect(true)
            .await
            .expect("collected")
            .chunks,
        2
    );
    let first = manifest.chunks()[0];
    let error = fixture
        .repository
        .chunk(first.id, manifest.length(0))
        .await
        .unwrap_err();
    assert!(matches!(error, RepositoryError::NoChunk { .. }), "{error}");
    fixture
        .repository
        .end_use(id, &user)
        .await
        .expect("that it is gone is fine");
}

#[tokio::test]
async fn qcow2_goes_in_and_comes_out() {
    let fixture = Fixture::new();
    let (raw, qcow2, back) = (
        fixture.file("raw"),
        fixture.file("x.qcow2"),
        fixture.file("back"),
    );
    raw_image(&raw, 10, &[2, 9], 0);
    convert::to_qcow2(&raw, &qcow2).await.expect("converted");
    let snapshot = qemu_img(&["snapshot", "-c", "before"], &qcow2);
    assert!(snapshot, "a snapshot is nothing to refuse");
    convert::from_qcow2(&qcow2, &back).await.expect("converted");
    assert!(fs::read(&raw).unwrap() == fs::read(back).unwrap());
    let again = fixture.file("again");
    for (path, why) in [
        (fixture.file("none"), "No such file"),
        (raw, "no image in the format qcow2"),
    ] {
        let refused = convert::from_qcow2(&path, &again).await;
        let error = refused.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let served = fs::File::open(&qcow2).expect("the image");
    served.lock().expect("a node does that");
    let refused = convert::from_qcow2(&qcow2, &again).await;
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("a node serves it"), "{error}");
    assert!(!again.exists());
}

fn qemu_img(words: &[&str], path: &Path) -> bool {
    let ran = Command::new("qemu-img").args(words).arg(path).status();
    ran.expect("qemu-img runs").success()
}

#[tokio::test]
async fn qcow2_that_refers_to_other_files_is_not_opened() {
    let fixture = Fixture::new();
    let [secret, data] = ["secret", "data"].map(|name| fixture.file(name));
    raw_image(&secret, 1, &[0], 0);
    let create = ["create", "-q", "-f", "qcow2"];
    let backing = ["-F", "raw", "-b", secret.to_str().expect("text")];
    let external = format!("data_file={},data_file_raw=on", data.display());
    for (name, words, why) in [
        ("backed", &backing[..], "it has a backing file"),
        ("split", &["-o", &external], "its data is in another file"),
    ] {
        let path = fixture.file(name);
        let file = path.to_str().expect("text");
        assert!(qemu_img(
            &[&create, words, &[file]].concat(),
            Path::new("1M")
        ));
        let raw = fixture.file("raw");
        let error = convert::from_qcow2(&path, &raw).await.unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert!(!raw.exists());
    }
}

#[tokio::test]
async fn the_disks_of_a_node_that_is_gone_are_forgotten_and_no_others() {
    let (fixture, _) = with_image("base").await;
    for (node, disk) in [("gone", "d"), ("gone", "e"), ("here", "d")] {
        fixture
            .repository
            .begin_use(&name("base"), &user(node, disk))
            .await
            .expect("used");
    }
    let forgotten = fixture
        .repository
        .forget_node("gone")
        .await
        .expect("forgotten");
    assert_eq!(forgotten.len(), 2);
    let (_, users) = fixture
        .repository
        .image(&name("base"))
        .await
        .expect("there");
    assert_eq!(users, ["here/d"]);
}
