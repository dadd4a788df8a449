//! Writes that a follower keeps apart from its image until their checkpoint is whole.

mod log;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::rc::Rc;

use godwit_core::action::{Content, DiskOperation, DiskTag};
use godwit_core::request::RequestError;
use godwit_core::units::Extent;
use godwit_io::page_buffers::Mapping;

use crate::engine::disk::{Keep, User};
use crate::engine::kept::log::{Log, Place, Shape};
use crate::engine::run::Engine;
use crate::engine::slots::Slots;

/// At most 8 GiB. A segment holds the longest request.
const SHAPE: Shape = Shape {
    segment: 64 << 20,
    segments: 128,
};

/// Bytes on the image's file system that the first kept write needs.
pub const KEPT_ROOM: u64 = SHAPE.segment as u64;

/// Most kept writes: 40 MiB of memory.
const MOST: usize = 1 << 20;

/// Most writes applied at once.
const AT_ONCE: usize = 32;

/// A kept write.
#[derive(Clone, Copy, Debug)]
struct Write {
    epoch: u64,
    extent: Extent,
    /// `Err` for zeroes, with true if the space is to be released.
    data: Result<Place, bool>,
}

/// Writes that are being applied.
#[derive(Debug)]
struct Batch {
    /// Number of the oldest kept writes that are to be applied and were not started.
    left: usize,
    /// Extents of the started writes, by the number of the disk operation.
    running: [Option<Extent>; AT_ONCE],
    result: Result<(), RequestError>,
}

/// The kept writes of a disk.
#[derive(Debug)]
pub(super) struct Kept {
    log: Log,
    /// Writes that were not started, oldest first.
    writes: VecDeque<Write>,
    batch: Option<Batch>,
    /// True if the log is not needed any more once the batch has ended.
    dropped: bool,
}

impl Kept {
    /// Keeps nothing yet. The file will be in this folder.
    pub(super) fn new(folder: PathBuf) -> Self {
        Self {
            log: Log::new(folder, SHAPE),
            writes: VecDeque::new(),
            batch: None,
            dropped: false,
        }
    }

    /// Returns true while kept writes are being applied.
    pub(super) const fn is_applying(&self) -> bool {
        self.batch.is_some()
    }

    /// Keeps a write apart. The data, if any, is in the buffer of the tag.
    fn keep(
        &mut self,
        slots: &mut Slots,
        tag: DiskTag,
        operation: DiskOperation,
    ) -> std::io::Result<()> {
        if self.writes.len() >= MOST {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        let (extent, epoch, data) = match (operation, tag) {
            (DiskOperation::Keep { extent, epoch }, DiskTag::Replica(tag)) => {
                let bytes = extent.bytes() as usize;
                let data = slots.bytes_mut(tag, 0..bytes);
                if data.len() < bytes {
                    return Err(std::io::ErrorKind::UnexpectedEof.into());
                }
                (extent, epoch, Ok(self.log.append(data)?))
            }
            (
                DiskOperation::KeepZeroes {
                    extent,
                    unmap,
                    epoch,
                },
                _,
            ) => (extent, epoch, Err(unmap)),
            _ => return Err(std::io::ErrorKind::InvalidInput.into()),
        };
        self.writes.push_back(Write {
            epoch,
            extent,
            data,
        });
        Ok(())
    }

    /// Begins to apply the writes up to this epoch.
    fn begin(&mut self, through: u64) {
        self.batch = Some(Batch {
            left: self.writes.partition_point(|write| write.epoch <= through),
            running: [None; AT_ONCE],
            result: Ok(()),
        });
    }

    /// Returns the next write to start, and the number of its operation. A write waits for an older one to the same
    /// place.
    fn next(&mut self) -> Option<(u32, Write)> {
        let batch = self.batch.as_mut().filter(|batch| batch.left > 0)?;
        let write = *self.writes.front()?;
        let mut running = batch.running.iter().flatten();
        if batch.result.is_err() || running.any(|extent| extent.overlaps(write.extent)) {
            return None;
        }
        let number = batch.running.iter().position(Option::is_none)?;
        batch.running[number] = Some(write.extent);
        batch.left -= 1;
        self.writes.pop_front();
        Some((number as u32, write))
    }

    /// Ends a started write.
    fn done(&mut self, number: u32, result: Result<(), RequestError>) {
        if let Some(batch) = &mut self.batch {
            batch.running[number as usize] = None;
            batch.result = batch.result.and(result);
        }
    }

    /// Ends the batch if nothing of it is left or runs. Returns its result.
    fn end(&mut self) -> Option<Result<(), RequestError>> {
        let batch = self.batch.as_ref()?;
        let runs = batch.running.iter().any(Option::is_some);
        let result = batch.result;
        if runs || result.is_ok() && batch.left > 0 {
            return None;
        }
        self.batch = None;
        if self.dropped {
            self.drop_writes();
        } else {
            let oldest = self.writes.iter().find_map(|write| write.data.ok());
            self.log.free_before(oldest);
        }
        Some(result)
    }

    /// Drops all writes but those that are being applied, and the log with the last one.
    fn drop_writes(&mut self) {
        let left = self.batch.as_ref().map_or(0, |batch| batch.left);
        self.writes.truncate(left);
        self.dropped = self.batch.is_some();
        if !self.dropped {
            self.log = self.log.emptied();
        }
    }
}

impl Write {
    /// Returns the operation on the image, and the memory of its data.
    fn on_image(self, log: &Log) -> (DiskOperation, *mut u8, Option<Rc<Mapping>>) {
        let (extent, fua) = (self.extent, false);
        match self.data {
            Ok(place) => {
                let (pointer, memory) = log.at(place);
                (DiskOperation::Write { extent, fua }, pointer, Some(memory))
            }
            Err(unmap) => {
                let zeroes = DiskOperation::WriteZeroes { extent, fua, unmap };
                (zeroes, std::ptr::null_mut(), None)
            }
        }
    }
}

impl Engine {
    /// Keeps a write apart from the image, at once.
    pub(super) fn keep(&mut self, tag: DiskTag, operation: DiskOperation) {
        let kept = self.kept.keep(&mut self.memory.slots, tag, operation);
        let result = kept.map_err(|error| {
            let disk = &self.cx.config.disk;
            tracing::warn!(disk, "cannot keep a write for the next checkpoint: {error}");
            match error.kind() {
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                    RequestError::NoSpace
                }
                _ => RequestError::Io,
            }
        });
        let result = result.map(|()| Content::Data);
        self.cx.core.handle_disk_done(self.cx.now, tag, result);
    }

    /// Applies the kept writes up to this epoch.
    pub(super) fn apply_kept(&mut self, through: u64) {
        self.kept.begin(through);
        self.apply_more();
    }

    /// Drops the kept writes that are not being applied.
    pub(super) fn drop_kept(&mut self) {
        self.kept.drop_writes();
    }

    /// Ends the write of a kept write to the image.
    pub(super) fn kept_done(&mut self, number: u32, result: Result<(), RequestError>) {
        self.kept.done(number, result);
        self.apply_more();
    }

    /// Starts the writes that may start, and tells the controller of the end.
    fn apply_more(&mut self) {
        while let Some((number, write)) = self.kept.next() {
            let (operation, pointer, memory) = write.on_image(&self.kept.log);
            let (ring, pieces) = (&mut self.ring, &mut self.vhost.pieces);
            let (user, keep) = (User::Kept(number), memory.map(Keep::Mapping));
            // SAFETY: the mapping, which `keep` holds, is as long from there, and its place is not used again before the
            // batch has ended.
            unsafe {
                self.disk
                    .start(ring, user, operation, pointer, pieces, keep)
            };
        }
        if let Some(result) = self.kept.end() {
            self.cx.core.handle_kept_applied(self.cx.now, result);
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_core::units::Lba;

    use super::*;

    /// Keeps writes in segments of two pages.
    fn kept(folder: &tempfile::TempDir) -> Kept {
        let shape = Shape {
            segment: 8192,
            segments: 3,
        };
        Kept {
            log: Log::new(folder.path().to_owned(), shape),
            ..Kept::new(PathBuf::new())
        }
    }

    fn extent(block: u64) -> Extent {
        Extent::new(Lba(block * 8), 8).expect("an extent")
    }

    fn keep(kept: &mut Kept, epoch: u64, block: u64) {
        let place = kept.log.append(&[epoch as u8; 4096]).expect("room");
        kept.writes.push_back(Write {
            epoch,
            extent: extent(block),
            data: Ok(place),
        });
    }

    fn started(kept: &mut Kept) -> Vec<u32> {
        std::iter::from_fn(|| kept.next())
            .map(|(number, _)| number)
            .collect()
    }

    #[test]
    fn writes_to_one_place_are_applied_one_after_the_other_and_others_together() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut kept = kept(&folder);
        for (epoch, block) in [(2, 0), (2, 1), (2, 0), (3, 5)] {
            keep(&mut kept, epoch, block);
        }
        kept.begin(2);
        assert_eq!(started(&mut kept), [0, 1]);
        kept.done(1, Ok(()));
        assert!(started(&mut kept).is_empty(), "an older write runs");
        kept.done(0, Ok(()));
        assert_eq!((started(&mut kept), kept.end()), (vec![0], None));
        kept.done(0, Ok(()));
        assert_eq!(kept.end(), Some(Ok(())));
        assert!(!kept.is_applying());
        assert_eq!(kept.writes.len(), 1, "the next epoch stays");
    }

    #[test]
    fn the_space_of_applied_epochs_is_used_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut kept = kept(&folder);
        for epoch in 2..50 {
            keep(&mut kept, epoch, 0);
            keep(&mut kept, epoch, 1);
            kept.begin(epoch - 1);
            while let [first, ..] = started(&mut kept)[..] {
                kept.done(first, Ok(()));
                kept.done(first + 1, Ok(()));
            }
            assert_eq!(kept.end(), Some(Ok(())), "epoch {epoch}");
        }
    }

    #[test]
    fn an_error_ends_the_batch_once_nothing_runs() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut kept = kept(&folder);
        for block in [0, 1, 1] {
            keep(&mut kept, 2, block);
        }
        kept.begin(2);
        assert_eq!(started(&mut kept), [0, 1]);
        kept.done(1, Err(RequestError::NoSpace));
        assert_eq!((started(&mut kept), kept.end()), (vec![], None));
        kept.drop_writes();
        kept.done(0, Ok(()));
        assert_eq!(kept.end(), Some(Err(RequestError::NoSpace)));
        assert!(kept.writes.is_empty() && !kept.dropped);
    }
}
