//! Scans for the pages that a process has written, through its `pagemap` (`PAGEMAP_SCAN`, Linux 6.7).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::dirty::pages::{PAGE_BYTES, PageRun, Pages};
use crate::mover::mappings;

/// Most runs that the kernel reports in one call.
const RUNS: usize = 1024;

/// `PAGEMAP_SCAN`: `_IOWR('f', 16, struct pm_scan_arg)`. C libraries do not define the request yet.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
/// Protects the reported pages.
const WP_MATCHING: u64 = 1 << 0;
/// Fails for a range without asynchronous write protection, instead of skipping the range.
const CHECK_WPASYNC: u64 = 1 << 1;
/// Category of pages written since their protection.
const PAGE_IS_WRITTEN: u64 = 1 << 1;

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of `linux/fs.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// The reason why the written pages are unknown. A copy based on them must begin anew, with all pages.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The range was never registered, parts of the range were remapped or unmapped since, or the process is ending.
    #[error(
        "its memory is not under asynchronous write protection: begin to track it, and copy all of it first"
    )]
    NotTracked,
    /// The kernel is too old.
    #[error("this kernel cannot tell which pages a process has written: Linux 6.7 or later can")]
    Unsupported,
    /// The process does not exist, or this node may not inspect it.
    #[error("the process cannot be looked at: {0}; let the node run as root, or as QEMU's user")]
    Process(io::Error),
    /// Another error of the kernel.
    #[error("which pages were written is not known: {0}")]
    Io(io::Error),
}

/// The tracked memory of a process.
#[derive(Debug)]
pub struct Scanner {
    pagemap: File,
    maps: File,
    address: u64,
    bytes: u64,
}

impl Scanner {
    /// Opens a scanner for `bytes` bytes at `address` of a process.
    ///
    /// # Errors
    /// [`ScanError::Process`].
    pub fn of(pid: u32, address: u64, bytes: u64) -> Result<Self, ScanError> {
        let open = |what| File::open(format!("/proc/{pid}/{what}")).map_err(ScanError::Process);
        Ok(Self {
            pagemap: open("pagemap")?,
            maps: open("maps")?,
            address,
            bytes,
        })
    }

    /// Returns the pages written since the last scan, and protects them again. The first scan after the start of
    /// tracking returns all present pages.
    ///
    /// # Errors
    /// [`ScanError`]. Some pages may then be protected again without having been reported.
    pub fn scan(&self) -> Result<Pages, ScanError> {
        let mut regions = vec![Region::default(); RUNS];
        let mut written = Pages::default();
        let end = self.address + self.bytes;
        let mut start = self.address;
        while start < end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                flags: WP_MATCHING | CHECK_WPASYNC,
                start,
                end,
                vec: regions.as_mut_ptr() as u64,
                vec_len: RUNS as u64,
                category_mask: PAGE_IS_WRITTEN,
                return_mask: PAGE_IS_WRITTEN,
                ..ScanArgument::default()
            };
            // SAFETY: the argument has the layout that the kernel expects and says its size; `vec` has room for
            // `vec_len` regions, which live until the call returns, and nothing else refers to them meanwhile.
            let found =
                unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
            let Ok(found) = usize::try_from(found) else {
                return Err(refused(io::Error::last_os_error()));
            };
            for region in &regions[..found.min(RUNS)] {
                written.push(self.run(*region));
            }
            if argument.walk_end <= start {
                let stands = io::Error::other("the kernel's walk does not get ahead");
                return Err(ScanError::Io(stands));
            }
            start = argument.walk_end;
        }
        // The kernel skips unmapped ranges: after the end of the process, the whole range.
        let all = mappings::read(&self.maps).map_err(refused)?;
        if !mappings::cover(&all, self.address, end) {
            return Err(ScanError::NotTracked);
        }
        Ok(written)
    }

    const fn run(&self, region: Region) -> PageRun {
        PageRun {
            first: (region.start - self.address) / PAGE_BYTES,
            pages: (region.end - region.start) / PAGE_BYTES,
        }
    }
}

fn refused(error: io::Error) -> ScanError {
    match error.raw_os_error() {
        Some(libc::EPERM) => ScanError::NotTracked,
        Some(libc::ENOTTY | libc::EINVAL) => ScanError::Unsupported,
        Some(libc::ESRCH) => ScanError::Process(error),
        _ => ScanError::Io(error),
    }
}
