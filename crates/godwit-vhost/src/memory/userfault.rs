//! Page faults of this process that somebody else serves: Linux's userfaultfd.
//!
//! A page of shared memory that is missing in the file holds up whoever touches it, the kernel on
//! this process's behalf included, until the page is put into the file and the waiting are woken.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::mm::UserfaultfdFlags;

/// The interface's version.
const API: u64 = 0xaa;
/// Pages that are missing in shared memory can be waited for.
const MISSING_SHARED: u64 = 1 << 5;
/// Wait for pages that are missing.
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

/// Where this process's page faults are reported and served.
#[derive(Debug)]
pub(crate) struct Userfault(OwnedFd);

impl Userfault {
    /// A new one that reports faults in the kernel, too: guest memory is mostly touched there.
    ///
    /// # Errors
    /// When this process may not have one (it needs `CAP_SYS_PTRACE`, access to
    /// `/dev/userfaultfd`, or `vm.unprivileged_userfaultfd`), or the kernel is too old.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: nobody sees or changes this process's memory through it before it is registered.
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
        // SAFETY: the structure is the one that the operation reads and writes.
        unsafe { control(&fd, AGREE, &mut agreement)? };
        Ok(Self(fd))
    }

    fn from_device() -> io::Result<OwnedFd> {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd")?;
        // SAFETY: the operation takes flags and gives a new descriptor.
        unsafe {
            let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
            match libc::ioctl(device.as_raw_fd(), NEW as _, flags) {
                fd @ 0.. => Ok(OwnedFd::from_raw_fd(fd)),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }

    /// The same one for somebody else.
    ///
    /// # Errors
    /// When this process may not have another descriptor.
    pub(crate) fn share(&self) -> io::Result<File> {
        Ok(self.0.try_clone()?.into())
    }

    /// Whoever touches a page that is missing in this mapping waits from now on.
    ///
    /// # Errors
    /// When the mapping is not one of shared memory, or not of whole pages.
    pub(crate) fn register(&self, start: u64, length: u64) -> io::Result<()> {
        let mut registration = Registration {
            range: Range { start, length },
            mode: MISSING,
            operations: 0,
        };
        // SAFETY: the structure is the one that the operation reads and writes. It changes when
        // accesses return, not what they find.
        unsafe { control(&self.0, REGISTER, &mut registration) }
    }

    /// Nobody waits in this mapping any more. Pages that are missing then are zeroes.
    ///
    /// # Errors
    /// When it is not a mapping that was registered.
    pub(crate) fn unregister(&self, start: u64, length: u64) -> io::Result<()> {
        let mut range = Range { start, length };
        // SAFETY: the structure is the one that the operations read.
        unsafe {
            control(&self.0, UNREGISTER, &mut range)?;
            // A page that was lost is not registered any more, and the step before wakes nobody there.
            control(&self.0, WAKE, &mut range)
        }
    }
}

/// # Safety
/// `argument` must be what the operation takes.
unsafe fn control<T>(fd: &OwnedFd, operation: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: the caller's.
    match unsafe { libc::ioctl(fd.as_raw_fd(), operation as _, std::ptr::from_mut(argument)) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
