//! Gives other nodes this node's parts of images: chunks fetched by its disks and not changed by a guest since, and the
//! chunks fetched last.
//!
//! Nothing more is kept for this. The file of a disk is read at the chunk's place, and the chunk is given if its hash
//! is right. The file of a departed disk serves as well, until overwritten.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use godwit_core::wire::{Refusal, RefusalCode};
use godwit_image::{CHUNK_BYTES, ChunkId, Manifest, ManifestId};
use rustix::fs::{SeekFrom, seek};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use super::Part;
use super::messages::{Answer, Question};
use super::names;
use super::places::HEAD_START;
use crate::images::Images;
use crate::images::creation::manifest_of;
use godwit_context::blocking;
use godwit_peers::PeerConnection;

/// Connections on which other nodes ask.
const CONNECTIONS: usize = 64;
/// Chunks read at the same time: this node's own guests use the same storage.
const READS: usize = 4;
/// Chunks read at the same time for this node's own disks, whose guests wait.
const OWN_READS: usize = 16;
/// Longest time without a question on a connection.
pub(super) const IDLE: Duration = Duration::from_secs(60);
/// Time limit for the other node to take an answer.
const TAKEN: Duration = Duration::from_secs(10);
/// Files searched for one chunk.
const FILES: usize = 16;

/// Limits on the use of this node by others.
#[derive(Debug)]
pub struct Giving {
    connections: Arc<Semaphore>,
    reads: Semaphore,
    /// Reads for disks of this node. The limit bounds the threads held by a file that does not answer.
    own_reads: Arc<Semaphore>,
    /// The file in which a chunk was found last.
    last: Mutex<Option<PathBuf>>,
    /// The manifest of the last question, kept to avoid a full read for each question.
    manifest: Mutex<Option<(ManifestId, Arc<Manifest>)>>,
}

impl Default for Giving {
    fn default() -> Self {
        Self {
            connections: Arc::new(Semaphore::new(CONNECTIONS)),
            reads: Semaphore::new(READS),
            own_reads: Arc::new(Semaphore::new(OWN_READS)),
            last: Mutex::default(),
            manifest: Mutex::default(),
        }
    }
}

/// Returns a place for a connection on which another node asks.
///
/// # Errors
/// All places are taken.
pub fn admit(images: &Images) -> Result<OwnedSemaphorePermit, Refusal> {
    let connections = Arc::clone(&images.giving.connections);
    connections.try_acquire_owned().map_err(|_| Refusal {
        code: RefusalCode::Busy,
        text: format!(
            "node '{}' has {CONNECTIONS} connections on which chunks of images are asked for",
            images.context.config.name
        ),
    })
}

/// Answers the other node's questions until the connection ends.
pub async fn serve(
    images: Arc<Images>,
    mut connection: PeerConnection,
    peer: String,
    place: OwnedSemaphorePermit,
) {
    let served = async {
        loop {
            let asked = tokio::time::timeout(IDLE, Question::read(&mut connection));
            let Ok(asked) = asked.await else {
                return Ok::<_, io::Error>(());
            };
            let Some(question) = asked? else {
                return Ok(());
            };
            // The permit is held until the answer is written, which bounds the waiting answers.
            let (answer, _one) = answer(&images, question).await;
            tokio::time::timeout(TAKEN, answer.write(&mut connection)).await??;
        }
    };
    tokio::select! {
        served = served => {
            if let Err(error) = served {
                tracing::debug!(peer, %error, "no more chunks of images for that node");
            }
        }
        () = images.context.closed() => {}
    }
    drop(place);
}

/// Returns the answer. The answer with a manifest, which may be long, comes with the read permit.
async fn answer(images: &Arc<Images>, question: Question) -> (Answer, Option<SemaphorePermit<'_>>) {
    let id = match question {
        Question::Chunk { manifest, .. } | Question::Manifest(manifest) => manifest,
        Question::Name(name) => {
            let known = names::known(images, name);
            let answer = known.map_or(Answer::Nothing, |known| Answer::Here(known.encode()));
            return (answer, None);
        }
    };
    let paths = files(images, id);
    if paths.is_empty() {
        return (Answer::Nothing, None);
    }
    // The semaphore is never closed.
    let one = images.giving.reads.acquire().await.ok();
    let giver = Arc::clone(images);
    let read = blocking(move || {
        let manifest = manifest(&giver, id)?;
        let Question::Chunk { number, .. } = question else {
            return Some(Answer::Here(manifest.encode().1.into()));
        };
        let chunk = find(&giver, &manifest, number, paths);
        Some(chunk.map_or(Answer::NotThatChunk, Answer::Here))
    });
    let answer = read.await.ok().flatten().unwrap_or(Answer::Nothing);
    let is_long = matches!(question, Question::Manifest(_));
    (answer, one.filter(|_| is_long))
}

/// Returns a whole chunk of this node, not changed by a guest. Blocks.
pub(in crate::images) fn own_chunk(
    images: &Images,
    id: ManifestId,
    manifest: &Manifest,
    number: u64,
) -> Option<Bytes> {
    find(images, manifest, number, files(images, id))
}

/// Returns a chunk that a disk of this node lacks, if another disk has the chunk and reading its file is quick.
pub(super) async fn of_another_disk(images: &Arc<Images>, part: Part) -> Option<Bytes> {
    let paths = files(images, part.manifest);
    if paths.len() < 2 {
        return None;
    }
    let reads = Arc::clone(&images.giving.own_reads);
    let giver = Arc::clone(images);
    let found = async {
        let one = reads.acquire_owned().await.ok()?;
        let read = blocking(move || {
            let _one = one;
            let manifest = giver.manifests.load(part.manifest).ok()?;
            find(&giver, &manifest, part.number, paths)
        });
        part.right(read.await.ok()??)
    };
    tokio::time::timeout(HEAD_START, found).await.ok()?
}

/// Returns the chunk from memory or from one of these files. Blocks.
fn find(images: &Images, manifest: &Manifest, number: u64, paths: Vec<PathBuf>) -> Option<Bytes> {
    let id = manifest.chunk(number)?;
    let length = manifest.length(number);
    // The disk may have only a part of the chunk.
    if let Some(bytes) = images.chunks.find(id) {
        return Some(bytes);
    }
    for path in paths {
        // An unreadable file counts as one without the chunk.
        if let Ok(Some(bytes)) = chunk_in(&path, number, length, id) {
            *lock(&images.giving.last) = Some(path);
            return Some(bytes);
        }
    }
    None
}

/// Returns a kept manifest. Blocks.
fn manifest(images: &Images, id: ManifestId) -> Option<Arc<Manifest>> {
    let mut last = lock(&images.giving.manifest);
    if let Some((_, manifest)) = last.as_ref().filter(|(of, _)| *of == id) {
        return Some(Arc::clone(manifest));
    }
    let manifest = images.manifests.load(id).ok()?;
    *last = Some((id, Arc::clone(&manifest)));
    Some(manifest)
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the files of disks created from this manifest, beginning with the file of the last hit.
fn files(images: &Images, manifest: ManifestId) -> Vec<PathBuf> {
    let of_it = |disk: Arc<crate::disks::disk::Disk>| {
        let inner = disk.lock();
        let base = inner.entry.base.as_ref().and_then(manifest_of);
        (base == Some(manifest)).then(|| inner.entry.path.clone())
    };
    let mut paths: Vec<PathBuf> = images.disks.all().into_iter().filter_map(of_it).collect();
    let last = lock(&images.giving.last).clone();
    if let Some(at) = paths.iter().position(|path| Some(path) == last.as_ref()) {
        paths.swap(0, at);
    }
    paths.truncate(FILES);
    paths
}

/// Returns the chunk if the file has the chunk at its place.
fn chunk_in(path: &Path, number: u64, length: u64, id: ChunkId) -> io::Result<Option<Bytes>> {
    let file = File::open(path)?;
    let start = number * CHUNK_BYTES;
    // A part not fetched is a hole, which need not be read.
    match seek(&file, SeekFrom::Data(start)) {
        Ok(data) if data >= start + length => return Ok(None),
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        // On a file system without hole reports, the hash decides.
        Ok(_) | Err(_) => {}
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, start)?;
    Ok((ChunkId::of(&bytes) == id).then(|| bytes.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_given_only_as_it_is_in_the_image() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file()
            .set_len(4 * CHUNK_BYTES)
            .expect("a file of holes");
        let content: Vec<u8> = (0..CHUNK_BYTES).map(|at| (at / 64) as u8).collect();
        let id = ChunkId::of(&content);
        let find = |number| chunk_in(file.path(), number, CHUNK_BYTES, id).expect("read");
        assert_eq!(find(2), None, "not fetched");
        let write = |bytes: &[u8], at| file.as_file().write_all_at(bytes, at).expect("written");
        write(&content[..64 << 10], 2 * CHUNK_BYTES);
        assert_eq!(find(2), None, "fetched in part");
        write(&content, 2 * CHUNK_BYTES);
        assert_eq!(find(2).as_deref(), Some(&content[..]));
        assert_eq!(find(1), None);
        write(&[1], 2 * CHUNK_BYTES + 7);
        assert_eq!(find(2), None, "changed");
    }
}
