//! Pushes: images from a file into a repository.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::pin::pin;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use serde::Serialize;
use tokio::sync::mpsc;

use crate::chunk::{CHUNK_BYTES, ChunkId, is_zero};
use crate::error::RepositoryError;
use crate::manifest::{Manifest, ManifestChunk};
use crate::name::ImageName;
use crate::repository::catalog::ImageInfo;
use crate::repository::progress::Progress;
use crate::repository::{PARALLEL, Repository, chunk_path, manifest_path};

/// The message of a cancelled push.
const UNNAMED: &str = "the name was not given to anything";

/// The result of a push.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pushed {
    /// The new catalog entry of the name.
    #[serde(flatten)]
    pub image: ImageInfo,
    /// Bytes of the chunks that were sent. Chunks already stored and zeroes do not count.
    pub sent_bytes: u64,
}

/// Rules for a push over existing objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PushOptions {
    /// True if the name may replace another image.
    pub replace: bool,
    /// True to read stored chunks and to send damaged chunks again. Otherwise a damaged chunk of the right length
    /// stays.
    pub check: bool,
}

/// A chunk of the file that is not zeroes.
#[derive(Debug)]
struct Piece {
    number: u64,
    id: ChunkId,
    bytes: Vec<u8>,
}

impl Repository {
    /// Pushes the raw image at `path` under this name. Stored chunks are not sent again, except damaged chunks if
    /// `options.check` is set. If `cancel` completes first, the push is given up. Chunks already sent stay until the
    /// next [`Self::collect`], so that a retry need not send them again.
    ///
    /// # Errors
    /// The name is taken and must not be replaced; the file cannot be read or changes its size; or the store fails. The
    /// name then stands for the same image as before.
    pub async fn push(
        &self,
        name: &ImageName,
        path: &Path,
        options: PushOptions,
        progress: &Progress,
        cancel: impl Future<Output = ()>,
    ) -> Result<Pushed, RepositoryError> {
        let replace = options.replace;
        let mut cancel = pin!(cancel);
        let lease = match self.lease().await {
            // A lease that is being written is not cancelled: the lease would stay and block gc.
            Err(error) if self.bears(&error) => tokio::select! {
                lease = self.patiently(progress, async || self.lease().await) => lease?,
                () = &mut cancel => return Err(RepositoryError::Interrupted(UNNAMED)),
            },
            lease => lease?,
        };
        let pushed = tokio::select! {
            pushed = self.push_chunks(name, path, options, progress) => pushed,
            () = &mut cancel => {
                lease.end().await;
                return Err(RepositoryError::Interrupted(UNNAMED));
            }
        };
        let named = async {
            let info = pushed?;
            // A lost lease was taken for a dead owner's, so chunks may be gone too.
            if !self
                .patiently(progress, async || lease.holds().await)
                .await?
            {
                return Err(
                    self.busy("chunks were removed by gc, because this push seemed to be dead")
                );
            }
            let named = self.patiently(progress, async || self.put_entry(&info, replace).await);
            named.await?;
            Ok(Pushed {
                image: info,
                sent_bytes: progress.moved(),
            })
        };
        let pushed = tokio::select! {
            pushed = named => pushed,
            () = &mut cancel => Err(RepositoryError::Interrupted("the name may stand for the image by now")),
        };
        lease.end().await;
        pushed
    }

    async fn push_chunks(
        &self,
        name: &ImageName,
        path: &Path,
        PushOptions { replace, check }: PushOptions,
        progress: &Progress,
    ) -> Result<ImageInfo, RepositoryError> {
        match self
            .patiently(progress, async || self.entry(name).await)
            .await
        {
            Ok(_) if !replace => {
                return Err(RepositoryError::Exists {
                    image: name.clone(),
                    repository: self.shown.to_string(),
                });
            }
            Ok(_) | Err(RepositoryError::NoImage { .. }) => {}
            Err(RepositoryError::DamagedEntry { .. }) if replace => {}
            Err(error) => return Err(error),
        }
        let file = File::open(path).map_err(|error| RepositoryError::file("read", path, error))?;
        let size = size_of(&file, path)?;
        progress.expect(size);
        let (sender, receiver) = mpsc::channel(PARALLEL);
        let from = path.to_owned();
        let reader = tokio::task::spawn_blocking(move || read(&file, &from, size, &sender));
        let sent: Mutex<HashSet<ChunkId>> = Mutex::default();
        let pieces = futures_util::stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|piece| (piece, receiver))
        });
        let mut chunks: Vec<ManifestChunk> = pieces
            .map(|piece: Step| async {
                let piece = match piece {
                    Step::Zeroes(bytes) => {
                        progress.add(bytes, 0);
                        return Ok(None);
                    }
                    Step::Data(piece) => piece,
                };
                let length = piece.bytes.len() as u64;
                let first = {
                    let mut sent = sent.lock().unwrap_or_else(PoisonError::into_inner);
                    sent.insert(piece.id)
                };
                let moved = if first {
                    let bytes = Bytes::from(piece.bytes);
                    let put = async || self.put_chunk(piece.id, bytes.clone(), check).await;
                    self.patiently(progress, put).await?
                } else {
                    0
                };
                progress.add(length, moved);
                Ok::<_, RepositoryError>(Some(ManifestChunk {
                    number: piece.number,
                    id: piece.id,
                }))
            })
            .buffered(PARALLEL)
            .try_filter_map(async |chunk| Ok(chunk))
            .try_collect()
            .await?;
        let read = reader.await;
        read.map_err(|error| RepositoryError::file("read", path, error))??;
        chunks.shrink_to_fit();
        let manifest = Manifest::new(size, chunks)
            .map_err(|error| RepositoryError::file("push", path, error))?;
        let (id, bytes) = manifest.encode();
        let bytes = Bytes::from(bytes);
        let put = async || match self.head(&manifest_path(id)).await? {
            Some(_) => Ok(()),
            None => self.put(&manifest_path(id), bytes.clone()).await,
        };
        self.patiently(progress, put).await?;
        Ok(ImageInfo::new(
            name.clone(),
            id,
            size,
            manifest.data_bytes(),
        ))
    }

    /// Stores a chunk unless present. Returns the number of bytes sent. With `check`, a stored chunk is read and
    /// verified.
    pub(super) async fn put_chunk(
        &self,
        id: ChunkId,
        bytes: Bytes,
        check: bool,
    ) -> Result<u64, RepositoryError> {
        let path = chunk_path(id);
        let length = bytes.len() as u64;
        let is_there = match check {
            true => match self.chunk(id, length).await {
                Ok(_) => true,
                Err(RepositoryError::NoChunk { .. } | RepositoryError::DamagedChunk { .. }) => {
                    false
                }
                Err(error) => return Err(error),
            },
            // A shorter object is truncated or not a chunk.
            false => self
                .head(&path)
                .await?
                .is_some_and(|meta| meta.size == length),
        };
        if is_there {
            return Ok(0);
        }
        self.put(&path, bytes).await?;
        Ok(length)
    }
}

/// The next part of a file.
#[derive(Debug)]
enum Step {
    /// A run of zeroes, in bytes.
    Zeroes(u64),
    Data(Piece),
}

fn size_of(file: &File, path: &Path) -> Result<u64, RepositoryError> {
    let kind = file
        .metadata()
        .map_err(|error| RepositoryError::file("read", path, error))?;
    if kind.is_dir() {
        return Err(RepositoryError::file("read", path, "it is a directory"));
    }
    let size = seek(file, SeekFrom::End(0))
        .map_err(|errno| RepositoryError::file("read", path, std::io::Error::from(errno)))?;
    if size == 0 || !size.is_multiple_of(512) || size > Manifest::MAX_SIZE {
        let why = format!(
            "a disk's size is a positive multiple of 512 bytes up to 64 TiB, and it has {size}"
        );
        return Err(RepositoryError::file("push", path, why));
    }
    Ok(size)
}

/// Reads the data of a file in chunks until the receiver is dropped.
fn read(
    file: &File,
    path: &Path,
    size: u64,
    sender: &mpsc::Sender<Step>,
) -> Result<(), RepositoryError> {
    let failed = |error: std::io::Error| RepositoryError::file("read", path, error);
    let mut at = 0;
    while at < size {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data.min(size) / CHUNK_BYTES * CHUNK_BYTES,
            Err(Errno::NXIO) => size,
            // Devices and some file systems have no holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
            Err(errno) => return Err(failed(errno.into())),
        };
        let step = if data > at {
            let hole = Step::Zeroes(data - at);
            at = data;
            hole
        } else {
            let mut bytes = vec![0; (size - at).min(CHUNK_BYTES) as usize];
            file.read_exact_at(&mut bytes, at).map_err(failed)?;
            let length = bytes.len() as u64;
            let number = at / CHUNK_BYTES;
            at += length;
            if is_zero(&bytes) {
                Step::Zeroes(length)
            } else {
                let id = ChunkId::of(&bytes);
                Step::Data(Piece { number, id, bytes })
            }
        };
        if sender.blocking_send(step).is_err() {
            return Ok(());
        }
    }
    Ok(())
}
