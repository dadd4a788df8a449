//! Finds the blocks of a disk that differ from its base image, before the disk moves: the other blocks need not travel.
//!
//! A disk just created has no such blocks, and a disk just received has few. The disk's engine tracks further writes,
//! and the disk need not be read when it moves. Other disks are read. A chunk with the same hash as the image's is the
//! same. For any other chunk, the image's chunk tells which blocks differ, if the chunk can be fetched.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use godwit_core::Compared;
use godwit_core::units::{Bytes, SECTOR_SIZE, Sectors};
use godwit_image::{CHUNK_BYTES, ChunkId, Manifest};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::disks::disk::Disk;
use crate::images::Images;
use crate::images::blocks::{BLOCK, words};
use crate::images::creation::manifest_of;
use crate::images::peers::Part;
use crate::images::{chunks, serving};
use godwit_api::{ErrorBody, ErrorCode};
use godwit_context::blocking;
use godwit_context::store::BaseImage;

/// Bytes of a block.
const BLOCK_BYTES: u64 = BLOCK * SECTOR_SIZE;
/// Most chunks fetched to compare single blocks: 64 MiB. In all other chunks, every block here counts as different.
const MOST_FETCHED: u32 = 256;
/// Time limit for a chunk. After a timeout no other chunk is fetched.
const FETCH: Duration = Duration::from_secs(3);
/// Most chunks read of a disk at rest: 16 MiB.
const MOST_READ: u64 = 64;

/// The permitted cost of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effort {
    /// No limit on reads.
    Any,
    /// Reads [`MOST_READ`] chunks and fetches none. Behind these chunks, all blocks here count as different.
    Little,
    /// The same, but a disk with more chunks is not compared.
    LittleOrNone,
}

/// Finds the differing blocks at little cost, if the disk still fetches from its image. Called when the disk has just
/// been created, is served again, or has just come.
pub fn begin_to_know(images: &Arc<Images>, disk: &Arc<Disk>, came: bool) {
    let base = {
        let inner = disk.lock();
        inner.entry.fetches(&inner.record).cloned()
    };
    let Some(base) = base else { return };
    let (images, disk) = (Arc::clone(images), Arc::clone(disk));
    let effort = match came {
        true => Effort::Little,
        false => Effort::LittleOrNone,
    };
    godwit_context::spawn(async move {
        let compared = tokio::select! {
            compared = compare_with(&images, &disk, &base, effort) => compared,
            () = images.context.closed() => return,
        };
        match compared {
            Ok(Compared { different, same }) => {
                tracing::debug!(disk = disk.name, %different, %same, "compared with its image");
            }
            // The comparison happens when the disk moves.
            Err(why) => tracing::debug!(disk = disk.name, %why, "not compared with its image"),
        }
    });
}

/// Compares the disk with its image, unless the result is known, and tells the disk's engine. From then on the disk can
/// move without the equal blocks.
///
/// # Errors
/// The disk cannot be used or read, or the image's manifest cannot be found.
pub async fn compare(
    images: &Arc<Images>,
    disk: &Arc<Disk>,
    base: &BaseImage,
) -> Result<Compared, ErrorBody> {
    compare_with(images, disk, base, Effort::Any).await
}

async fn compare_with(
    images: &Arc<Images>,
    disk: &Arc<Disk>,
    base: &BaseImage,
    effort: Effort,
) -> Result<Compared, ErrorBody> {
    let _comparing = disk.comparing.lock().await;
    let failed = |why: &dyn std::fmt::Display| {
        let text = format!(
            "disk {} cannot be compared with image '{}': {why}",
            disk.name, base.image
        );
        ErrorBody::new(ErrorCode::Conflict, text).hint("see 'godwit disk show'")
    };
    let engine = disk.engine().ok_or_else(|| failed(&"it is not served"))?;
    let (reply, answer) = oneshot::channel();
    engine.compared(Box::new(move |known| {
        let _ = reply.send(known);
    }));
    if let Ok(Some(known)) = answer.await {
        return Ok(known);
    }
    let manifest_id = manifest_of(base).ok_or_else(|| failed(&"nothing says what that is"))?;
    let manifest = serving::manifest(images, manifest_id).await;
    let manifest = manifest.map_err(|why| failed(&why))?;
    let (reply, answer) = oneshot::channel();
    engine.begin_comparison(Box::new(move |begun| {
        // The caller may be gone.
        let _ = reply.send(begun);
    }));
    let missing = match answer.await {
        Ok(Ok(missing)) => missing,
        Ok(Err(error)) => return Err(failed(&error)),
        Err(_) => return Err(failed(&"it is not served")),
    };
    let (path, sectors) = {
        let inner = disk.lock();
        (inner.entry.path.clone(), Sectors(inner.entry.sectors))
    };
    // A cancelled move stops reading.
    let given_up = Arc::new(AtomicBool::new(false));
    let _guard = GivesUp(Arc::clone(&given_up));
    let runtime = Handle::current();
    let fetcher = Arc::clone(images);
    let fetch = move |number: u64, id: ChunkId, length: u64| {
        let part = Part {
            manifest: manifest_id,
            number,
            id,
            length,
        };
        let fetched = async { tokio::time::timeout(FETCH, chunks::chunk(&fetcher, part)).await };
        runtime.block_on(fetched).ok()?.ok()
    };
    let found = blocking(move || -> std::io::Result<Found> {
        let file = File::open(path)?;
        let mut comparison = Comparison {
            file,
            size: sectors.0 * SECTOR_SIZE,
            found: Found {
                different: vec![0; missing.len()],
                same: vec![0; missing.len()],
            },
            missing,
            fetches: match effort {
                Effort::Any => MOST_FETCHED,
                Effort::Little | Effort::LittleOrNone => 0,
            },
            reads: match effort {
                Effort::Any => u64::MAX,
                Effort::Little | Effort::LittleOrNone => MOST_READ,
            },
            gives_up: effort == Effort::LittleOrNone,
        };
        comparison.run(&manifest, sectors, fetch, &given_up)?;
        Ok(comparison.found)
    });
    let Found { different, same } = found.await?.map_err(|error| failed(&error))?;
    let bytes = |words: &[u64]| {
        let blocks = words.iter().map(|word| u64::from(word.count_ones()));
        Bytes(blocks.sum::<u64>() * BLOCK_BYTES)
    };
    let counts = Compared {
        different: bytes(&different),
        same: bytes(&same),
    };
    engine.end_comparison(different, same);
    Ok(counts)
}

struct GivesUp(Arc<AtomicBool>);

impl Drop for GivesUp {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A bit for each differing block, and a bit for each equal block that is not a hole of the image.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    different: Vec<u64>,
    same: Vec<u64>,
}

struct Comparison {
    file: File,
    size: u64,
    missing: Vec<u64>,
    found: Found,
    /// Chunks that may still be fetched.
    fetches: u32,
    /// Chunks that may still be read.
    reads: u64,
    /// True if the comparison fails once `reads` is used up; otherwise all further blocks here count as different.
    gives_up: bool,
}

fn is_set(words: &[u64], block: u64) -> bool {
    words[(block / 64) as usize] & 1 << (block % 64) != 0
}

fn set(words: &mut [u64], block: u64) {
    words[(block / 64) as usize] |= 1 << (block % 64);
}

impl Comparison {
    fn run(
        &mut self,
        manifest: &Manifest,
        capacity: Sectors,
        mut fetch: impl FnMut(u64, ChunkId, u64) -> Option<bytes::Bytes>,
        given_up: &AtomicBool,
    ) -> std::io::Result<()> {
        let of_image = words(manifest, capacity);
        let mut data = vec![0; CHUNK_BYTES as usize];
        let mut no_data_before = 0;
        for number in 0..self.size.div_ceil(CHUNK_BYTES) {
            if given_up.load(Ordering::Relaxed) {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            let start = number * CHUNK_BYTES;
            let length = (self.size - start).min(CHUNK_BYTES);
            let id = manifest.chunk(number);
            if id.is_none() {
                if start >= no_data_before {
                    no_data_before = self.next_data(start)?;
                }
                if start + length <= no_data_before {
                    continue;
                }
            }
            let blocks = start / BLOCK_BYTES..(start + length).div_ceil(BLOCK_BYTES);
            let lacks = blocks.clone().filter(|block| is_set(&self.missing, *block));
            let lacks = lacks.count() as u64;
            if lacks == blocks.end - blocks.start {
                blocks.for_each(|block| set(&mut self.found.same, block));
                continue;
            }
            let Some(reads) = self.reads.checked_sub(1) else {
                if self.gives_up {
                    return Err(std::io::Error::other("it has too much of its own"));
                }
                for block in blocks {
                    let set_of = match is_set(&self.missing, block) {
                        true => &mut self.found.same,
                        false => &mut self.found.different,
                    };
                    set(set_of, block);
                }
                continue;
            };
            self.reads = reads;
            let here = &mut data[..length as usize];
            self.file.read_exact_at(here, start)?;
            let here = &data[..length as usize];
            let mut image = None;
            if let Some(id) = id {
                let of_it = manifest.length(number);
                let is_same = lacks == 0 && ChunkId::of(&here[..of_it as usize]) == id;
                image = match is_same {
                    true => Some(bytes::Bytes::copy_from_slice(&here[..of_it as usize])),
                    false => self.fetched((number, id, of_it), &mut fetch),
                };
            }
            for block in blocks {
                let in_image = is_set(&of_image, block);
                if is_set(&self.missing, block) {
                    set(&mut self.found.same, block);
                    continue;
                }
                let from = (block * BLOCK_BYTES - start) as usize;
                let part = &here[from..here.len().min(from + BLOCK_BYTES as usize)];
                let equals = match (in_image, &image) {
                    (false, _) => part.iter().all(|byte| *byte == 0),
                    (true, None) => false,
                    (true, Some(image)) => {
                        let image = image.get(from..).unwrap_or_default();
                        let (own, behind) = part.split_at(part.len().min(image.len()));
                        own == &image[..own.len()] && behind.iter().all(|byte| *byte == 0)
                    }
                };
                match equals {
                    false => set(&mut self.found.different, block),
                    true if in_image => set(&mut self.found.same, block),
                    true => {}
                }
            }
        }
        Ok(())
    }

    fn fetched(
        &mut self,
        (number, id, length): (u64, ChunkId, u64),
        fetch: &mut impl FnMut(u64, ChunkId, u64) -> Option<bytes::Bytes>,
    ) -> Option<bytes::Bytes> {
        self.fetches = self.fetches.checked_sub(1)?;
        let fetched = fetch(number, id, length);
        if fetched.is_none() {
            self.fetches = 0;
        }
        fetched
    }

    /// Returns the start of data at or behind this place, as far as the file system tells.
    fn next_data(&self, at: u64) -> std::io::Result<u64> {
        match seek(&self.file, SeekFrom::Data(at)) {
            Ok(data) => Ok(data),
            Err(Errno::NXIO) => Ok(self.size),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(at),
            Err(errno) => Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_image::ManifestChunk;

    use super::*;

    #[test]
    fn what_is_missing_or_equal_is_the_same_and_what_was_written_differs_block_by_block() {
        let chunk =
            |seed: u8| -> Vec<u8> { (0..CHUNK_BYTES).map(|at| (at / 512) as u8 ^ seed).collect() };
        // Chunks 0, 1 and 3 are data; the last is cut short within a block. The disk is larger.
        let cut = 2 * BLOCK_BYTES + 512;
        let images = [chunk(1), chunk(2), chunk(3)[..cut as usize].to_vec()];
        let id = |at: usize| ChunkId::of(&images[at]);
        let numbered = |number, at| ManifestChunk { number, id: id(at) };
        let manifest = Manifest::new(
            3 * CHUNK_BYTES + cut,
            vec![numbered(0, 0), numbered(1, 1), numbered(3, 2)],
        )
        .expect("valid");
        let file = tempfile::NamedTempFile::new().expect("a file");
        let size = 6 * CHUNK_BYTES;
        file.as_file().set_len(size).expect("extended");
        let write =
            |bytes: &[u8], at: u64| file.as_file().write_all_at(bytes, at).expect("written");
        write(&images[0], 0);
        write(&images[1], CHUNK_BYTES);
        write(&images[2], 3 * CHUNK_BYTES);
        // Block 1 of chunk 1, a block of the image's hole, and a block behind the image.
        write(&[9; 10], CHUNK_BYTES + BLOCK_BYTES);
        write(&[9; 10], 2 * CHUNK_BYTES + 5 * BLOCK_BYTES);
        write(&[9; 10], 5 * CHUNK_BYTES);
        // Chunk 0's last block is not here.
        let mut missing = vec![0; 6];
        set(&mut missing, 63);
        write(&[0; BLOCK_BYTES as usize], 63 * BLOCK_BYTES);
        let run = |reachable: bool, fetches| {
            let mut comparison = Comparison {
                file: file.reopen().expect("opened"),
                size,
                missing: missing.clone(),
                found: Found {
                    different: vec![0; 6],
                    same: vec![0; 6],
                },
                fetches,
                reads: u64::MAX,
                gives_up: false,
            };
            let fetch = |_, wanted, _| {
                let found = images.iter().find(|image| ChunkId::of(image) == wanted);
                found
                    .filter(|_| reachable)
                    .map(|image| bytes::Bytes::copy_from_slice(image))
            };
            let go_on = AtomicBool::new(false);
            comparison
                .run(&manifest, Sectors(size / SECTOR_SIZE), fetch, &go_on)
                .expect("compared");
            comparison.found
        };
        let exact = Found {
            different: vec![0, 1 << 1, 1 << 5, 0, 0, 1],
            same: vec![u64::MAX, !(1 << 1), 0, 0b111, 0, 0],
        };
        assert_eq!(run(true, MOST_FETCHED), exact);
        // Without the image's chunks, all blocks here count as different in a chunk that is not equal as a whole.
        let coarse = Found {
            different: vec![!(1 << 63), u64::MAX, 1 << 5, 0, 0, 1],
            same: vec![1 << 63, 0, 0, 0b111, 0, 0],
        };
        assert_eq!(run(false, MOST_FETCHED), coarse);
        assert_eq!(run(true, 0), coarse);
    }
}
