//! A simulated store with stale caches at each host, as NFS has, and pushes and collections of images there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use crate::repository::push::PushOptions;
use crate::{Manifest, Progress, Repository, RepositoryError};

/// Time for which a host may miss a write of another host.
const LAG: Duration = Duration::from_millis(150);

/// A write: the time, the host and the content. No content is a removal.
type Write = (Instant, usize, Option<(Bytes, SystemTime)>);

/// All writes so far.
#[derive(Debug, Default)]
struct Truth(Mutex<BTreeMap<Path, Vec<Write>>>);

impl Truth {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Path, Vec<Write>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, host: usize, path: &Path, bytes: Option<Bytes>) {
        let content = bytes.map(|bytes| (bytes, SystemTime::now()));
        let mut all = self.lock();
        // Within the lock, so that writes are in the order of their times.
        let write = (Instant::now(), host, content);
        all.entry(path.clone()).or_default().push(write);
    }

    /// Returns the latest content of a path.
    fn now(&self, path: &Path) -> Option<Bytes> {
        let all = self.lock();
        let (_, _, content) = all.get(path)?.last()?;
        content.as_ref().map(|(bytes, _)| bytes.clone())
    }
}

/// The store as one host sees it: the host's own writes, and writes of other hosts after a lag. The lag varies with
/// each read.
#[derive(Debug)]
struct Host {
    truth: Arc<Truth>,
    number: usize,
    random: Mutex<u64>,
}

impl Host {
    fn random(&self, below: Duration) -> Duration {
        let mut state = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        below.mul_f64((*state >> 33) as f64 / (1_u64 << 31) as f64)
    }

    async fn takes_a_moment(&self) {
        tokio::time::sleep(self.random(LAG / 20)).await;
    }

    fn sees(&self, path: &Path, writes: &[Write]) -> Option<(Bytes, ObjectMeta)> {
        let late = match self.random(2 * LAG) {
            late if late > LAG => LAG,
            late => late,
        };
        let seen = |(at, host, _): &&Write| *host == self.number || at.elapsed() >= late;
        let (_, _, content) = writes.iter().rev().find(seen)?;
        let (bytes, time) = content.clone()?;
        let meta = ObjectMeta {
            location: path.clone(),
            last_modified: time.into(),
            size: bytes.len() as u64,
            e_tag: None,
            version: None,
        };
        Some((bytes, meta))
    }
}

impl std::fmt::Display for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "host {}", self.number)
    }
}

#[async_trait]
impl ObjectStore for Host {
    async fn put_opts(&self, path: &Path, payload: PutPayload, _: PutOptions) -> Result<PutResult> {
        self.takes_a_moment().await;
        self.truth.write(self.number, path, Some(payload.into()));
        Ok(PutResult {
            e_tag: None,
            version: None,
            extensions: Default::default(),
        })
    }

    async fn get_opts(&self, path: &Path, _: GetOptions) -> Result<GetResult> {
        self.takes_a_moment().await;
        let seen = {
            let all = self.truth.lock();
            all.get(path).and_then(|writes| self.sees(path, writes))
        };
        let Some((bytes, meta)) = seen else {
            return Err(Error::NotFound {
                path: path.to_string(),
                source: "it is not seen".into(),
            });
        };
        Ok(GetResult {
            range: 0..meta.size,
            payload: GetResultPayload::Stream(stream::iter([Ok(bytes)]).boxed()),
            meta,
            attributes: Default::default(),
            extensions: Default::default(),
        })
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (truth, number) = (Arc::clone(&self.truth), self.number);
        let removed = paths.map(move |path| {
            let path = path?;
            truth.write(number, &path, None);
            Ok(path)
        });
        removed.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let all = self.truth.lock();
        let within = |path: &Path| prefix.is_none_or(|prefix| path.prefix_matches(prefix));
        let found: Vec<Result<ObjectMeta>> = all
            .iter()
            .filter(|(path, _)| within(path))
            .filter_map(|(path, writes)| Some(Ok(self.sees(path, writes)?.1)))
            .collect();
        stream::iter(found).boxed()
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(Error::NotImplemented {
            operation: String::from("put_multipart"),
            implementer: self.to_string(),
        })
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        Err(Error::NotImplemented {
            operation: String::from("list_with_delimiter"),
            implementer: self.to_string(),
        })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(Error::NotImplemented {
            operation: String::from("copy"),
            implementer: self.to_string(),
        })
    }
}

/// Hosts that share a store.
struct World {
    truth: Arc<Truth>,
    seed: u64,
    /// The lag that collections assume.
    lag: Duration,
}

impl World {
    fn new(seed: u64, lag: Duration) -> Self {
        let truth = Arc::default();
        Self { truth, seed, lag }
    }

    fn host(&self, number: usize) -> (Repository, Arc<Host>) {
        let random = (self.seed << 8 | number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let host = Arc::new(Host {
            truth: Arc::clone(&self.truth),
            number,
            random: Mutex::new(random),
        });
        let repository = Repository {
            store: Arc::clone(&host) as Arc<dyn ObjectStore>,
            shown: "shared".into(),
            directory: None,
            lag: self.lag,
            hedge: Arc::default(),
        };
        (repository, host)
    }

    /// Runs pushes of one image at two hosts and collections at two other hosts, all at random times. Returns the
    /// number of damaged images.
    async fn run(&self, image: &std::path::Path) -> usize {
        // A host that had the image before leaves chunks without an owner.
        let (before, _) = self.host(9);
        push(&before, "old", image)
            .await
            .expect("nobody else is there");
        let name = "old".parse().expect("a name");
        before.remove(&name, true).await.expect("removed");
        let pushes = (0..2).map(async |number| {
            let (repository, host) = self.host(number);
            tokio::time::sleep(host.random(8 * LAG)).await;
            let name = format!("new{number}");
            let until = Instant::now() + 14 * LAG;
            while let Err(error) = push(&repository, &name, image).await {
                assert!(matches!(error, RepositoryError::Busy { .. }), "{error}");
                if Instant::now() > until {
                    return;
                }
                host.takes_a_moment().await;
            }
        });
        let collections = (2..4).map(async |number| {
            let (repository, host) = self.host(number);
            tokio::time::sleep(host.random(4 * LAG)).await;
            match repository.collect(true).await {
                Ok(_) | Err(RepositoryError::Busy { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        });
        tokio::join!(join_all(pushes), join_all(collections));
        (0..2).filter(|number| !self.is_whole(*number)).count()
    }

    /// Returns true if the image of this host is complete or was not pushed.
    fn is_whole(&self, number: usize) -> bool {
        let entry = Path::from(format!("images/new{number}"));
        let Some(entry) = self.truth.now(&entry) else {
            return true;
        };
        let info: crate::ImageInfo = serde_json::from_slice(&entry).expect("an entry");
        let id = info.manifest.parse().expect("a name");
        let Some(manifest) = self.truth.now(&super::manifest_path(id)) else {
            return false;
        };
        let manifest = Manifest::decode(id, &manifest).expect("a manifest");
        let mut chunks = manifest.chunks().iter();
        chunks.all(|chunk| self.truth.now(&super::chunk_path(chunk.id)).is_some())
    }
}

async fn push(
    repository: &Repository,
    name: &str,
    image: &std::path::Path,
) -> std::result::Result<(), RepositoryError> {
    let (name, progress) = (name.parse().expect("a name"), Progress::default());
    let never = std::future::pending();
    let options = PushOptions::default();
    let pushed = repository.push(&name, image, options, &progress, never);
    pushed.await.map(|_| ())
}

/// Returns the number of damaged images in so many worlds.
async fn losses(worlds: u64, lag: Duration) -> usize {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    std::fs::write(&image, [7; 4096]).expect("written");
    let run = async |seed| World::new(seed, lag).run(&image).await;
    join_all((0..worlds).map(run)).await.into_iter().sum()
}

#[tokio::test]
async fn hosts_with_stale_caches_lose_no_chunk() {
    assert_eq!(losses(200, LAG).await, 0);
}

#[tokio::test]
async fn without_waiting_hosts_with_stale_caches_lose_chunks() {
    // On a busy host everything takes longer than the lag of the caches.
    for _ in 0..20 {
        if losses(100, Duration::ZERO).await > 0 {
            return;
        }
    }
    panic!("nothing was tried");
}
