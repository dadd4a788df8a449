//! Shared mappings of files that another process can shorten.
//!
//! Touching a page without backing raises SIGBUS, whose default action ends the process. A page loses its backing if
//! the file is shortened, if the file system has no room for a hole, or if the hardware reports an error in the page.
//! In a [`SharedMapping`], the handler of this module maps zeroes in the page's place, and marks the mapping as having
//! lost pages. The thread continues, and the user of the mapping gives the mapping up. A fault elsewhere keeps the
//! default action.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use rustix::mm::{MapFlags, ProtFlags};

/// Possible sizes of a lost page in bytes, the smallest first. The kernel refuses to replace a part of a page.
const PAGES: [usize; 3] = [4 << 10, 2 << 20, 1 << 30];

/// The address range of a mapping, for the handler. Entries are never freed, so the handler can follow the list at any
/// time.
#[derive(Debug)]
struct Entry {
    /// Odd while the range changes.
    version: AtomicUsize,
    start: AtomicUsize,
    end: AtomicUsize,
    has_lost_pages: AtomicBool,
    next: *const Entry,
}

// SAFETY: `next` is written before others know the entry, and leads to an entry that is never freed.
unsafe impl Sync for Entry {}
// SAFETY: as above.
unsafe impl Send for Entry {}

impl Entry {
    /// Returns the addresses; `None` while another thread changes the range.
    fn range(&self) -> Option<Range<usize>> {
        let version = self.version.load(Ordering::Acquire);
        let range = self.start.load(Ordering::Relaxed)..self.end.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let is_settled =
            version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        is_settled.then_some(range)
    }

    /// Replaces the range. Only one thread may do so at a time.
    fn set(&self, range: Range<usize>) {
        self.version.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.has_lost_pages.store(false, Ordering::Relaxed);
        self.start.store(range.start, Ordering::Relaxed);
        self.end.store(range.end, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// The most recent entry, head of the list.
static ENTRIES: AtomicPtr<Entry> = AtomicPtr::new(std::ptr::null_mut());

/// State for registration, not used by the handler.
static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    is_installed: false,
    unused: Vec::new(),
});

struct Registry {
    /// True once the handler is installed.
    is_installed: bool,
    unused: Vec<&'static Entry>,
}

impl Registry {
    fn add(&mut self, range: Range<usize>) -> io::Result<&'static Entry> {
        if !self.is_installed {
            install()?;
            self.is_installed = true;
        }
        let entry = self.unused.pop().unwrap_or_else(|| {
            let entry = Box::leak(Box::new(Entry {
                version: AtomicUsize::new(0),
                start: AtomicUsize::new(0),
                end: AtomicUsize::new(0),
                has_lost_pages: AtomicBool::new(false),
                next: ENTRIES.load(Ordering::Relaxed),
            }));
            ENTRIES.store(entry, Ordering::Release);
            entry
        });
        entry.set(range);
        Ok(entry)
    }

    fn remove(&mut self, entry: &'static Entry) {
        entry.set(0..0);
        self.unused.push(entry);
    }
}

fn with_registry<T>(work: impl FnOnce(&mut Registry) -> T) -> T {
    work(&mut REGISTRY.lock().unwrap_or_else(PoisonError::into_inner))
}

fn install() -> io::Result<()> {
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
    // SAFETY: all zeroes is a valid value of the structure, whose handler then fits the flags.
    let installed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
    };
    match installed {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Handles SIGBUS. The handler uses only atomics and system calls, which are async-signal-safe.
extern "C" fn on_bus_error(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes its information about the signal, and each thread has an error number.
    let (code, address, errno) = unsafe {
        let address = (*info).si_addr() as usize;
        ((*info).si_code, address, libc::__errno_location())
    };
    // Only faults from the kernel have an address, and a misaligned access has not lost its page.
    let is_lost_page = (libc::BUS_ADRERR..=libc::BUS_MCEERR_AO).contains(&code);
    // SAFETY: as above.
    let before = unsafe { *errno };
    if !(is_lost_page && replace(address)) {
        // SAFETY: the default action ends the process when the thread touches the page again.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// Maps zeroes in the place of a lost page. Returns false if the page is in no [`SharedMapping`], or if the kernel
/// refuses.
fn replace(address: usize) -> bool {
    let mut next = ENTRIES.load(Ordering::Acquire).cast_const();
    // SAFETY: entries are never freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        if let Some(range) = entry.range().filter(|range| range.contains(&address)) {
            // Set before any thread can read the zeroes.
            entry.has_lost_pages.store(true, Ordering::SeqCst);
            let pages = PAGES.map(|page| {
                let first = address & !(page - 1);
                first.max(range.start)..first.saturating_add(page).min(range.end)
            });
            return pages.into_iter().chain([range]).any(put_zeroes);
        }
        next = entry.next;
    }
    false
}

fn put_zeroes(range: Range<usize>) -> bool {
    // SAFETY: the range lies in a mapping of a `SharedMapping`, whose bytes others change at any time anyway.
    let mapped = unsafe {
        libc::mmap(
            range.start as *mut libc::c_void,
            range.end - range.start,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

/// A shared mapping of a part of a file or device, for reading and writing. The part stays mapped for the lifetime of
/// this value; other processes change the bytes at any time.
#[derive(Debug)]
pub struct SharedMapping {
    at: NonNull<u8>,
    bytes: usize,
    entry: &'static Entry,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for SharedMapping {}
// SAFETY: as above; the mapping lends no references to its bytes.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps `bytes` bytes from `offset` on, without reserving swap space. The file may be shorter; touching the missing
    /// pages loses them.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn map(file: impl AsFd, offset: u64, bytes: usize) -> io::Result<Self> {
        // SAFETY: the kernel chooses a place that nothing else in this process uses.
        let mapped = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                offset,
            )?
        };
        let at = NonNull::new(mapped.cast::<u8>())
            .ok_or_else(|| io::Error::other("it has no address"))?;
        let start = at.as_ptr() as usize;
        // The mapping owns its last page to the page's end.
        let end = start + bytes.next_multiple_of(PAGES[0]);
        match with_registry(|registry| registry.add(start..end)) {
            Ok(entry) => Ok(Self { at, bytes, entry }),
            Err(error) => {
                // SAFETY: the memory was mapped just now, and no other code knows the address.
                let _ = unsafe { rustix::mm::munmap(mapped, bytes) };
                Err(error)
            }
        }
    }

    /// Returns the address of the first byte.
    pub const fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Returns the mapping's length in bytes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns true if some pages are zeroes private to this process because the original pages are lost. Earlier reads
    /// and writes of the mapping are then unreliable.
    pub fn has_lost_pages(&self) -> bool {
        self.entry.has_lost_pages.load(Ordering::SeqCst)
    }

    /// Marks pages as lost after the kernel failed to access them on this process's behalf, which raises no signal.
    pub fn lose_pages(&self) {
        self.entry.has_lost_pages.store(true, Ordering::SeqCst);
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // First: other memory may be mapped there at once.
        with_registry(|registry| registry.remove(self.entry));
        // SAFETY: the mapping is `self`'s alone, and no reference into it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::AtomicU8;

    use super::*;

    const PAGE: usize = PAGES[0];

    /// Maps a file of four pages.
    fn mapped() -> (File, SharedMapping) {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create(c"test", flags).expect("a file"));
        file.write_all_at(&[7; 4 * PAGE], 0).expect("writes");
        let mapping = SharedMapping::map(&file, 0, 4 * PAGE).expect("is mapped");
        (file, mapping)
    }

    /// Returns the first byte of a page.
    fn byte(mapping: &SharedMapping, page: usize) -> &AtomicU8 {
        assert!(page * PAGE < mapping.bytes());
        // SAFETY: inside of the mapping, and only used through atomics.
        unsafe { AtomicU8::from_ptr(mapping.as_ptr().add(page * PAGE)) }
    }

    fn read(mapping: &SharedMapping, page: usize) -> u8 {
        byte(mapping, page).load(Ordering::SeqCst)
    }

    #[test]
    fn a_page_whose_file_shrank_is_lost_alone() {
        let [(file, mapping), (_other, beside)] = [mapped(), mapped()];
        file.set_len(PAGE as u64).expect("shrinks");
        assert_eq!(read(&mapping, 0), 7);
        assert!(!mapping.has_lost_pages());
        assert_eq!(read(&mapping, 2), 0);
        assert!(mapping.has_lost_pages());
        byte(&mapping, 3).store(5, Ordering::SeqCst);
        assert_eq!((read(&mapping, 3), read(&mapping, 0)), (5, 7));
        assert_eq!(read(&beside, 3), 7);
        assert!(!beside.has_lost_pages());
        drop(mapping);
        // The new mapping reuses the entry, and perhaps the addresses.
        let (_file, next) = mapped();
        assert!(!next.has_lost_pages());
    }

    #[test]
    fn a_fault_elsewhere_ends_the_process() {
        let (file, mapping) = mapped();
        let flags = MapFlags::SHARED;
        // SAFETY: a new mapping, of which only the child below touches anything.
        let unknown = unsafe {
            let at = std::ptr::null_mut();
            rustix::mm::mmap(at, PAGE, ProtFlags::READ, flags, &file, 0).expect("is mapped")
        };
        file.set_len(0).expect("shrinks");
        // SAFETY: the child reads memory and ends, and uses nothing that another thread may hold.
        let child = unsafe {
            match libc::fork() {
                0 => {
                    let known = mapping.as_ptr().read_volatile();
                    let byte = unknown.cast::<u8>().read_volatile();
                    libc::_exit(i32::from(known | byte));
                }
                child => child,
            }
        };
        let mut status = 0;
        // SAFETY: the number is this thread's.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status), "{status:#x}");
        assert_eq!(libc::WTERMSIG(status), libc::SIGBUS);
        // SAFETY: no other code uses the mapping any more.
        unsafe { rustix::mm::munmap(unknown, PAGE) }.expect("is unmapped");
    }

    #[test]
    fn pages_are_lost_while_other_mappings_come_and_go() {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let [(file, mapping), (_other, beside)] = [mapped(), mapped()];
                        file.set_len(0).expect("shrinks");
                        assert_eq!((0..4).map(|page| read(&mapping, page)).max(), Some(0));
                        assert!(mapping.has_lost_pages());
                        assert_eq!(read(&beside, 3), 7);
                        assert!(!beside.has_lost_pages());
                    }
                });
            }
        });
    }
}
