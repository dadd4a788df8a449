//! The memory of a machine, as its node reads and writes the memory beside QEMU.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;

use godwit_memory::dirty::pages::{PAGE_BYTES, PageRun, Pages};
use godwit_memory::mover::mappings::{self, Home};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Zeroes written at once.
static ZEROES: [u8; 1 << 16] = [0; 1 << 16];

/// A machine's memory: one file, which QEMU maps as a whole.
#[derive(Debug)]
pub(in crate::protect) struct GuestMemory {
    file: File,
    address: u64,
    bytes: u64,
}

impl GuestMemory {
    /// Finds the memory of a QEMU among its open files.
    ///
    /// # Errors
    /// The reason in a sentence: the memory is not one shared file, or this node may not look.
    pub(super) fn of(pid: u32, bytes: u64) -> Result<Self, String> {
        let unreadable = |error: io::Error| {
            format!(
                "its QEMU cannot be looked at: {error}; let the node run as root, or as QEMU's user"
            )
        };
        let mapped = mappings::of_process(pid).map_err(unreadable)?;
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(unreadable)?;
        let mut found = Vec::new();
        for entry in entries.flatten() {
            let is_memory =
                |metadata: &std::fs::Metadata| metadata.is_file() && metadata.len() == bytes;
            if !std::fs::metadata(entry.path()).is_ok_and(|metadata| is_memory(&metadata)) {
                continue;
            }
            let opened = OpenOptions::new().read(true).write(true).open(entry.path());
            let file = opened.map_err(unreadable)?;
            let home = Home {
                file: mappings::File::of(&file).map_err(unreadable)?,
                offset: 0,
                bytes,
            };
            // Two descriptors of one file are one memory.
            let is_known = found.iter().any(|(known, _)| *known == home.file);
            if let Some(layout) = mappings::find(&mapped, home, None).filter(|_| !is_known) {
                found.push((
                    home.file,
                    Self {
                        file,
                        address: layout.address,
                        bytes,
                    },
                ));
            }
        }
        match (found.pop(), found.is_empty()) {
            (Some((_, memory)), true) => Ok(memory),
            _ => Err(String::from(
                "its memory is not one shared file of its own: run it with 'godwit vm run', without memory backends among QEMU's arguments",
            )),
        }
    }

    /// Returns the file.
    pub(super) const fn file(&self) -> &File {
        &self.file
    }

    /// Returns the address of the first byte in QEMU.
    pub(super) const fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns all pages that have ever been written, whoever wrote them: the kernel's answer to a first scan has those
    /// that QEMU has touched. Returns all pages if the file system cannot tell.
    pub(super) fn allocated(&self) -> Pages {
        let mut pages = Pages::default();
        let mut offset = 0;
        while offset < self.bytes {
            let (start, end) = match rustix::fs::seek(&self.file, SeekFrom::Data(offset)) {
                Ok(start) => {
                    let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(start));
                    (start, hole.unwrap_or(self.bytes).min(self.bytes))
                }
                Err(Errno::NXIO) => break,
                Err(_) => (offset, self.bytes),
            };
            let first = start / PAGE_BYTES;
            let pages_to = end.div_ceil(PAGE_BYTES);
            pages.push(PageRun {
                first,
                pages: pages_to.saturating_sub(first),
            });
            offset = end.max(start + 1);
        }
        pages
    }

    /// Reads the run's pages, which fill `into`.
    ///
    /// # Errors
    /// The run is not in the memory, or the system's error.
    pub(super) fn read(&self, run: PageRun, into: &mut [u8]) -> io::Result<()> {
        let (offset, _) = self.place(run)?;
        self.file.read_exact_at(into, offset)
    }

    /// Writes whole pages from a page on.
    ///
    /// # Errors
    /// They are not in the memory, or the system's error.
    pub(super) fn write(&self, first: u64, data: &[u8]) -> io::Result<()> {
        let pages = data.len() as u64 / PAGE_BYTES;
        let (offset, length) = self.place(PageRun { first, pages })?;
        self.file.write_all_at(&data[..length], offset)
    }

    /// Makes the run's pages zeroes.
    ///
    /// # Errors
    /// The run is not in the memory, or the system's error.
    pub(super) fn zero(&self, run: PageRun) -> io::Result<()> {
        let (mut offset, mut length) = self.place(run)?;
        while length > 0 {
            let piece = length.min(ZEROES.len());
            self.file.write_all_at(&ZEROES[..piece], offset)?;
            offset += piece as u64;
            length -= piece;
        }
        Ok(())
    }

    /// Returns the offset and the length of a run in bytes.
    fn place(&self, run: PageRun) -> io::Result<(u64, usize)> {
        let end = run
            .first
            .checked_add(run.pages)
            .and_then(|end| end.checked_mul(PAGE_BYTES));
        let outside = || io::Error::new(io::ErrorKind::InvalidData, "a page is not in the memory");
        let end = end.filter(|end| *end <= self.bytes).ok_or_else(outside)?;
        let offset = run.first * PAGE_BYTES;
        let length = usize::try_from(end - offset).map_err(|_| outside())?;
        Ok((offset, length))
    }
}

#[cfg(test)]
impl GuestMemory {
    /// A memory of so many pages, for tests.
    pub(super) fn empty(pages: u64) -> Self {
        let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC);
        let file = File::from(file.expect("a file"));
        let bytes = pages * PAGE_BYTES;
        file.set_len(bytes).expect("a size");
        Self {
            file,
            address: 0x7000_0000,
            bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_read_as_written() {
        let memory = GuestMemory::empty(4);
        memory
            .write(1, &[7; 2 * PAGE_BYTES as usize])
            .expect("within");
        memory.zero(PageRun { first: 2, pages: 1 }).expect("within");
        let mut read = vec![1; 2 * PAGE_BYTES as usize];
        memory
            .read(PageRun { first: 1, pages: 2 }, &mut read)
            .expect("within");
        let (first, second) = read.split_at(PAGE_BYTES as usize);
        assert!(first.iter().all(|byte| *byte == 7));
        assert!(second.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn pages_written_by_anybody_are_allocated() {
        let memory = GuestMemory::empty(64);
        assert!(memory.allocated().is_empty());
        memory
            .file
            .write_all_at(&[1], 5 * PAGE_BYTES + 7)
            .expect("within");
        memory
            .file
            .write_all_at(&[1; 8192], 63 * PAGE_BYTES - 4096)
            .expect("within");
        let found: Vec<(u64, u64)> = memory
            .allocated()
            .runs()
            .iter()
            .map(|run| (run.first, run.pages))
            .collect();
        assert_eq!(found, [(5, 1), (62, 2)]);
    }

    #[test]
    fn pages_outside_of_the_memory_are_refused() {
        let memory = GuestMemory::empty(4);
        for run in [
            (4, 1),
            (3, 2),
            (u64::MAX, 1),
            (1, u64::MAX),
            (u64::MAX / PAGE_BYTES, 1),
        ] {
            let (first, pages) = run;
            let run = PageRun { first, pages };
            assert!(memory.read(run, &mut []).is_err(), "{run:?}");
            assert!(memory.zero(run).is_err(), "{run:?}");
        }
        assert!(memory.write(4, &[0; PAGE_BYTES as usize]).is_err());
    }
}
