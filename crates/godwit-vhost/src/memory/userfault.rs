//! Page faults of this process that another process serves: Linux's userfaultfd.
//!
//! An access to a page missing in a shared file waits until the page is put into the file and the waiters are woken.
//! Accesses by the kernel for this process wait, too.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::mm::UserfaultfdFlags;

/// The interface's version.
const API: u64 = 0xaa;
/// Missing pages of shared memory can be waited for.
const MISSING_SHARED: u64 = 1 << 5;
/// Wait for missing pages.
const MISSING: u64 = 1;

/// `_IO(0xaa, 0)`
const NEW: libc::c_ulong = 0xaa00;
/// `_IOWR(0xaa, 0x3f, struct uffdio_api)`
const AGREE: libc::c_ulong = 0xc018_aa3f;
/// `_IOWR(0xaa, 0, struct uffdio_register)`
const REGISTER: libc::c_ulong = 0xc020_aa00;
/// `_IOR(0xaa, 1, struct uffdio_range)`
const UNREGISTER: libc::c_ulong = 0x8010_aa01;
/// `_IOR(0xaa, 2, struct uffdio_range)`
const WAKE: libc::c_ulong = 0x8010_aa02;

#[repr(C)]
struct Agreement {
    api: u64,
    features: u64,
    operations: u64,
}

#[repr(C)]
struct Range {
    start: u64,
    length: u64,
}

#[repr(C)]
struct Registration {
    range: Range,
    mode: u64,
    operations: u64,
}

/// The descriptor that reports this process's page faults.
#[derive(Debug)]
pub(crate) struct Userfault(OwnedFd);

impl Userfault {
    /// Opens a descriptor that reports faults in the kernel, too: guest memory is mostly touched there.
    ///
    /// # Errors
    /// This process may not have one (needs `CAP_SYS_PTRACE`, access to `/dev/userfaultfd`, or
    /// `vm.unprivileged_userfaultfd`), or the kernel is too old.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: the descriptor gives no access to this process's memory before a registration.
        let made = unsafe { rustix::mm::userfaultfd(flags) };
        let fd = made.or_else(|error| match error {
            rustix::io::Errno::PERM | rustix::io::Errno::NOSYS => Self::from_device(),
            error => Err(error.into()),
        })?;
        let mut agreement = Agreement {
            api: API,
            features: MISSING_SHARED,
            operations: 0,
        };
        // SAFETY: the operation reads and writes this structure.
        unsafe { control(&fd, AGREE, &mut agreement)? };
        Ok(Self(fd))
    }

    fn from_device() -> io::Result<OwnedFd> {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd")?;
        // SAFETY: the operation takes flags and returns a new descriptor.
        unsafe {
            let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
            match libc::ioctl(device.as_raw_fd(), NEW as _, flags) {
                fd @ 0.. => Ok(OwnedFd::from_raw_fd(fd)),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }

    /// Returns a second descriptor, for another process.
    ///
    /// # Errors
    /// This process may not have another descriptor.
    pub(crate) fn share(&self) -> io::Result<File> {
        Ok(self.0.try_clone()?.into())
    }

    /// Makes accesses to missing pages of this mapping wait from now on.
    ///
    /// # Errors
    /// The mapping is not of shared memory, or not of whole pages.
    pub(crate) fn register(&self, start: u64, length: u64) -> io::Result<()> {
        let mut registration = Registration {
            range: Range { start, length },
            mode: MISSING,
            operations: 0,
        };
        // SAFETY: the operation reads and writes this structure. The registration changes when accesses return, not
        // their results.
        unsafe { control(&self.0, REGISTER, &mut registration) }
    }

    /// Ends all waits in this mapping. Pages still missing are zeroes from then on.
    ///
    /// # Errors
    /// The mapping was not registered.
    pub(crate) fn unregister(&self, start: u64, length: u64) -> io::Result<()> {
        let mut range = Range { start, length };
        // SAFETY: the operations read this structure.
        unsafe {
            control(&self.0, UNREGISTER, &mut range)?;
            // A lost page is no longer registered, and the step before wakes no access to it.
            control(&self.0, WAKE, &mut range)
        }
    }
}

/// # Safety
/// `argument` must have the type that the operation takes.
unsafe fn control<T>(fd: &OwnedFd, operation: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: as the caller promises.
    match unsafe { libc::ioctl(fd.as_raw_fd(), operation as _, std::ptr::from_mut(argument)) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
