//! Gives a disk's engine the missing parts of its image. The connection is like the one on which an owner pulls from
//! the source of a move, but leads to the image.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_block::engine::{EngineHandle, PeerStream};
use godwit_core::action::{PULL_SECTORS, PULL_SLOTS};
use godwit_core::request::RequestError;
use godwit_core::units::{Extent, MigrationId};
use godwit_core::wire::{HEADER_SIZE, Header, Message};
use godwit_image::{CHUNK_BYTES, ChunkId, Manifest, ManifestId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::disks::disk::Disk;
use crate::images::Images;
use crate::images::chunks;
use crate::images::creation::manifest_of;
use crate::images::peers::{self, Part};
use godwit_context::blocking;
use godwit_context::failpoint;

/// Time before a lost connection is opened again, to bound the cost of a connection that always fails.
const AFTER_LOSS: Duration = Duration::from_millis(250);
/// Time between two attempts to find the image's manifest.
const MANIFEST_RETRY: Duration = Duration::from_secs(2);
/// Time after a failed chunk during which success with other chunks does not clear the trouble. The disk asks again for
/// the failed chunk within this time.
const TROUBLE_LASTS: Duration = Duration::from_secs(3);
/// Time without an answer after which the repository is reported as slow.
const SLOW: Duration = Duration::from_secs(3);
/// The longest frame from an engine on such a connection, without its header.
const LONGEST: u32 = 64;

/// Gives the running engine of a disk the missing parts of its image, if any, for as long as this engine runs.
pub fn start(images: &Arc<Images>, disk: &Arc<Disk>) {
    let fetches = {
        let inner = disk.lock();
        let base = inner.entry.fetches(&inner.record).cloned();
        base.zip(inner.engine.as_ref().map(|engine| engine.handle.clone()))
    };
    let Some((base, engine)) = fetches else {
        return;
    };
    let (Some(id), Ok(fetch)) = (manifest_of(&base), base.fetch.parse()) else {
        return;
    };
    let (images, disk) = (Arc::clone(images), Arc::clone(disk));
    godwit_context::spawn(async move {
        if !base.prefetch {
            engine.pull_on_demand_only();
        }
        let source = loop {
            match manifest(&images, id).await {
                Ok(manifest) => {
                    break Source {
                        images,
                        disk,
                        manifest,
                        id,
                        fetch,
                        troubled: Arc::default(),
                    };
                }
                Err(why) => tell(
                    &disk,
                    Some(format!(
                        "what image '{}' consists of cannot be read: {why}",
                        base.image
                    )),
                ),
            }
            tokio::select! {
                () = tokio::time::sleep(MANIFEST_RETRY) => {}
                () = images.context.closed() => return,
            }
            if !still_fetches(&disk, fetch, &engine) {
                return;
            }
        };
        source.run(&engine).await;
    });
}

/// Returns the image's manifest: the kept one or, if unreadable, the one of another node or the repository.
pub(super) async fn manifest(
    images: &Arc<Images>,
    id: ManifestId,
) -> Result<Arc<Manifest>, String> {
    let keeper = Arc::clone(images);
    let loaded = blocking(move || keeper.manifests.load(id)).await;
    let why = match loaded {
        Ok(Ok(manifest)) => return Ok(manifest),
        Ok(Err(error)) => error.to_string(),
        Err(error) => return Err(error.message),
    };
    let manifest = match peers::manifest(images, id).await {
        Ok(manifest) => manifest,
        Err(error) => return Err(format!("{why}; and {error}")),
    };
    tracing::warn!(manifest = %id, why, "read again from another node or the repository");
    let keeper = Arc::clone(images);
    let kept = blocking(move || {
        keeper.manifests.replace(&manifest)?;
        keeper.manifests.load(id)
    });
    match kept.await {
        Ok(Ok(manifest)) => Ok(manifest),
        Ok(Err(error)) => Err(format!("it cannot be kept here: {error}")),
        Err(error) => Err(error.message),
    }
}

/// Returns true if this engine still serves the disk, and the disk still has this fetch.
fn still_fetches(disk: &Disk, fetch: MigrationId, engine: &EngineHandle) -> bool {
    let inner = disk.lock();
    let same = |base: &godwit_context::store::BaseImage| base.fetch == fetch.to_string();
    let fetches = inner.entry.fetches(&inner.record).is_some_and(same);
    let runs = inner
        .engine
        .as_ref()
        .is_some_and(|other| other.handle.is_same(engine));
    fetches && runs
}

/// Records trouble with fetching for the disk's operator; nothing when all is well.
fn tell(disk: &Disk, trouble: Option<String>) {
    let mut inner = disk.lock();
    if inner.image_trouble != trouble {
        match &trouble {
            Some(text) => tracing::warn!(
                disk = disk.name,
                trouble = text,
                "a part of the disk cannot be fetched; trying on"
            ),
            None => tracing::info!(disk = disk.name, "the disk is being fetched again"),
        }
        inner.image_trouble = trouble;
    }
}

/// The image at the other end of the connection.
#[derive(Clone)]
struct Source {
    images: Arc<Images>,
    disk: Arc<Disk>,
    manifest: Arc<Manifest>,
    id: ManifestId,
    fetch: MigrationId,
    /// The chunk that failed last, and the time of the failure.
    troubled: Arc<Mutex<Option<(ChunkId, Instant)>>>,
}

impl Source {
    /// Keeps a connection up until the disk is whole, or its engine has ended.
    async fn run(self, engine: &EngineHandle) {
        loop {
            match pair().await {
                Ok((ours, theirs)) => {
                    engine.fetch(PeerStream {
                        socket: theirs,
                        tls: None,
                    });
                    match self.serve(ours).await {
                        Ok(()) => {}
                        Err(error) => {
                            tracing::debug!(disk = self.disk.name, %error, "the connection to the disk is lost");
                        }
                    }
                }
                Err(error) => tell(
                    &self.disk,
                    Some(format!("this host's loopback cannot be used: {error}")),
                ),
            }
            tokio::time::sleep(AFTER_LOSS).await;
            if !still_fetches(&self.disk, self.fetch, engine) || self.images.context.is_closing() {
                tell(&self.disk, None);
                return;
            }
        }
    }

    /// Answers until the connection ends.
    async fn serve(&self, socket: TcpStream) -> io::Result<()> {
        socket.set_nodelay(true)?;
        let (mut reader, mut writer) = socket.into_split();
        let owes = Message::Owes {
            migration: self.fetch,
            max_bandwidth: None,
        };
        writer.write_all(&frame(&owes)).await?;
        let (sender, answers) = mpsc::channel(usize::from(PULL_SLOTS));
        let mut tasks = JoinSet::new();
        tasks.spawn(send(writer, answers));
        loop {
            let message = receive(&mut reader).await?;
            let (slot, extent) = match message {
                Message::Pull { slot, extent } if extent.sectors() <= PULL_SECTORS => {
                    (slot, extent)
                }
                Message::Whole { .. } => return Ok(()),
                _ => {
                    return Err(io::Error::other(
                        "the disk says something that does not belong here",
                    ));
                }
            };
            let (source, sender) = (self.clone(), sender.clone());
            tasks.spawn(async move {
                let (data, result) = match source.read(extent).await {
                    Some(data) => (data, Ok(())),
                    // The disk asks again, and asks for other parts meanwhile.
                    None => (Vec::new(), Err(RequestError::NotServing)),
                };
                let zeroes = result.is_ok() && data.iter().all(|byte| *byte == 0);
                let answer = Message::Pulled {
                    slot,
                    extent,
                    zeroes,
                    result,
                };
                let mut bytes = frame(&answer);
                if !zeroes {
                    bytes.extend_from_slice(&data);
                }
                // The receiver is gone when the connection is lost.
                let _ = sender.send(bytes).await;
            });
            while tasks.try_join_next().is_some() {}
        }
    }

    /// Returns the image's content of the extent, or nothing if a chunk cannot be had now.
    async fn read(&self, extent: Extent) -> Option<Vec<u8>> {
        let (start, end) = (extent.start().byte_offset(), extent.end().byte_offset());
        let mut data = vec![0; (end - start) as usize];
        for number in start / CHUNK_BYTES..end.div_ceil(CHUNK_BYTES) {
            let Some(id) = self.manifest.chunk(number) else {
                continue;
            };
            let length = self.manifest.length(number);
            let part = Part {
                manifest: self.id,
                number,
                id,
                length,
            };
            let chunk = self.chunk(part).await?;
            let first = number * CHUNK_BYTES;
            let (from, to) = (start.max(first), end.min(first + length));
            if from < to {
                data[(from - start) as usize..(to - start) as usize]
                    .copy_from_slice(&chunk[(from - first) as usize..(to - first) as usize]);
            }
        }
        Some(data)
    }

    async fn chunk(&self, part: Part) -> Option<bytes::Bytes> {
        failpoint::reach(String::from("image::chunk")).await;
        let mut fetching = std::pin::pin!(chunks::chunk(&self.images, part));
        let fetched = match tokio::time::timeout(SLOW, &mut fetching).await {
            Ok(fetched) => fetched,
            Err(_) => {
                tell(&self.disk, Some(self.images.slowness()));
                fetching.await
            }
        };
        let mut troubled = self.troubled.lock().unwrap_or_else(PoisonError::into_inner);
        match fetched {
            Ok(bytes) => {
                let lasts = |&(other, since): &(ChunkId, Instant)| {
                    other != part.id && since.elapsed() < TROUBLE_LASTS
                };
                if !troubled.as_ref().is_some_and(lasts) {
                    *troubled = None;
                    tell(&self.disk, None);
                }
                Some(bytes)
            }
            Err(error) => {
                *troubled = Some((part.id, Instant::now()));
                tell(&self.disk, Some(error.message));
                None
            }
        }
    }
}

/// Opens a connection within this host and returns both ends. Connections of others are dropped.
async fn pair() -> io::Result<(TcpStream, std::net::TcpStream)> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let ours = TcpStream::connect(listener.local_addr()?).await?;
    loop {
        let (theirs, from) = listener.accept().await?;
        if from == ours.local_addr()? {
            let theirs = theirs.into_std()?;
            theirs.set_nonblocking(false)?;
            return Ok((ours, theirs));
        }
    }
}

fn frame(message: &Message) -> Vec<u8> {
    let (header, inline, length) = message.encode();
    let mut bytes = header.encode().to_vec();
    bytes.extend_from_slice(&inline[..length]);
    bytes
}

async fn receive(reader: &mut OwnedReadHalf) -> io::Result<Message> {
    let mut header = [0; HEADER_SIZE];
    reader.read_exact(&mut header).await?;
    let header = Header::decode(&header).map_err(io::Error::other)?;
    if header.payload_length > LONGEST {
        return Err(io::Error::other("a frame is too long"));
    }
    let mut body = vec![0; header.payload_length as usize];
    reader.read_exact(&mut body).await?;
    Message::decode(&header, &body).map_err(io::Error::other)
}

async fn send(mut writer: OwnedWriteHalf, mut answers: mpsc::Receiver<Vec<u8>>) {
    while let Some(answer) = answers.recv().await {
        if writer.write_all(&answer).await.is_err() {
            return;
        }
    }
}
