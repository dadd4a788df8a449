//! Helpers of the tests.

use std::fs::{self, File};
use std::future::pending;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_image::{
    CHUNK_BYTES, ImageName, Location, Progress, Pulled, PushOptions, Pushed, Repository,
    RepositoryError, User,
};
use tempfile::TempDir;

/// A repository in a directory, and room for files.
pub(crate) struct Fixture {
    pub(crate) repository: Repository,
    pub(crate) store: PathBuf,
    pub(crate) folder: TempDir,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let store = folder.path().join("repository");
        fs::create_dir(&store).expect("a folder");
        let repository = Repository::open(&Location::Directory(store.clone())).expect("opened");
        // No other host shares the directory.
        let repository = repository.with_lag(Duration::ZERO).expect("short");
        Self {
            repository,
            store,
            folder,
        }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the objects in a folder of the repository.
    pub(crate) fn objects(&self, folder: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut folders = vec![self.store.join(folder)];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten() {
                let path = entry.expect("an entry").path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    found.push(path);
                }
            }
        }
        found
    }
}

pub(crate) fn name(text: &str) -> ImageName {
    text.parse().expect("a name")
}

/// Writes a sparse raw image of `chunks` chunks and a sector. Chunks in `data` have distinct data that depends on
/// `seed`; the other chunks are holes.
pub(crate) fn raw_image(path: &Path, chunks: u64, data: &[u64], seed: u8) {
    let file = File::create(path).expect("a file");
    file.set_len(chunks * CHUNK_BYTES + 512).expect("extended");
    for number in data {
        let bytes: Vec<u8> = (0..CHUNK_BYTES)
            .map(|at| (at / 512) as u8 ^ (*number as u8).wrapping_mul(31) ^ seed)
            .collect();
        file.write_all_at(&bytes, number * CHUNK_BYTES)
            .expect("written");
    }
}

/// A push that may replace an image.
pub(crate) const REPLACE: PushOptions = PushOptions {
    replace: true,
    check: false,
};

/// Returns a repository with an image of two chunks under this name, and the file of the image.
pub(crate) async fn with_image(image: &str) -> (Fixture, PathBuf) {
    let fixture = Fixture::new();
    let file = fixture.file("raw");
    raw_image(&file, 2, &[0, 1], 3);
    push(&fixture.repository, image, &file)
        .await
        .expect("pushed");
    (fixture, file)
}

pub(crate) fn user(node: &str, disk: &str) -> User {
    User {
        node: node.to_owned(),
        node_id: String::from("1f"),
        disk: disk.to_owned(),
    }
}

pub(crate) async fn push(
    repository: &Repository,
    image: &str,
    path: &Path,
) -> Result<Pushed, RepositoryError> {
    let progress = Progress::default();
    repository
        .push(
            &name(image),
            path,
            PushOptions::default(),
            &progress,
            pending(),
        )
        .await
}

pub(crate) async fn pull(
    repository: &Repository,
    image: &str,
    path: &Path,
) -> Result<Pulled, RepositoryError> {
    let progress = Progress::default();
    repository
        .pull(&name(image), path, &progress, pending())
        .await
}

/// Exercises all operations on an empty repository.
pub(crate) async fn does_its_work(repository: &Repository) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name);
    raw_image(&file("one"), 40, &[0, 1, 7, 39], 1);
    raw_image(&file("two"), 40, &[0, 1, 8, 39], 1);

    let one = push(repository, "debian:12", &file("one"))
        .await
        .expect("pushed");
    assert_eq!(one.sent_bytes, 4 * CHUNK_BYTES);
    assert_eq!(one.image.size_bytes, 40 * CHUNK_BYTES + 512);
    assert_eq!(one.image.data_bytes, 4 * CHUNK_BYTES);
    let two = push(repository, "debian:12-x", &file("two"))
        .await
        .expect("pushed");
    assert_eq!(
        two.sent_bytes, CHUNK_BYTES,
        "only what is not there is sent"
    );

    let names: Vec<String> = repository
        .images()
        .await
        .expect("listed")
        .into_iter()
        .map(|image| image.name.to_string())
        .collect();
    assert_eq!(names, ["debian:12", "debian:12-x"]);

    pull(repository, "debian:12-x", &file("back"))
        .await
        .expect("pulled");
    assert!(fs::read(file("two")).unwrap() == fs::read(file("back")).unwrap());

    repository
        .remove(&name("debian:12"), false)
        .await
        .expect("removed");
    let gone = repository.collect(true).await.expect("collected");
    assert_eq!(
        (gone.manifests, gone.chunks, gone.bytes),
        (1, 1, CHUNK_BYTES)
    );
    assert_eq!(gone.kept_chunks, 4);
    let error = repository.image(&name("debian:12")).await.unwrap_err();
    assert!(matches!(error, RepositoryError::NoImage { .. }), "{error}");
    pull(repository, "debian:12-x", &file("again"))
        .await
        .expect("pulled");
    assert!(fs::read(file("two")).unwrap() == fs::read(file("again")).unwrap());
}
