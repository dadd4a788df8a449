//! Descriptors that an application knows by their number, while what is behind the number changes.

use std::ffi::c_int;
use std::io;

/// Puts what `source` is behind `number`. The number stays as the application has set it: whether it blocks,
/// and closed on exec as libibverbs makes it.
pub(super) fn replace(number: c_int, source: c_int) -> io::Result<()> {
    // SAFETY: these calls take no pointer.
    unsafe {
        let flags = checked(libc::fcntl(number, libc::F_GETFL))?;
        let others = checked(libc::fcntl(source, libc::F_GETFL))? & !libc::O_NONBLOCK;
        checked(libc::dup3(source, number, libc::O_CLOEXEC))?;
        checked(libc::fcntl(
            number,
            libc::F_SETFL,
            others | flags & libc::O_NONBLOCK,
        ))?;
    }
    Ok(())
}

/// Puts something behind `number` that never becomes readable.
pub(super) fn silence(number: c_int) -> io::Result<()> {
    replace_with_count(number, 0)
}

/// Puts something behind `number` that is readable.
pub(super) fn signal(number: c_int) -> io::Result<()> {
    replace_with_count(number, 1)
}

fn replace_with_count(number: c_int, count: u32) -> io::Result<()> {
    // SAFETY: takes no pointer.
    let made = checked(unsafe { libc::eventfd(count, libc::EFD_CLOEXEC) })?;
    let replaced = replace(number, made);
    // SAFETY: the descriptor was made here and nobody else knows it.
    unsafe { libc::close(made) };
    replaced
}

/// A number of its own for what `source` is.
pub(super) fn duplicate(source: c_int) -> io::Result<c_int> {
    // SAFETY: takes no pointer.
    checked(unsafe { libc::fcntl(source, libc::F_DUPFD_CLOEXEC, 0) })
}

fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    fn event_file(value: u32, flags: c_int) -> OwnedFd {
        // SAFETY: a new descriptor that nobody else owns.
        unsafe { OwnedFd::from_raw_fd(checked(libc::eventfd(value, flags)).unwrap()) }
    }

    fn flags(file: &OwnedFd) -> (bool, bool) {
        // SAFETY: these calls take no pointer.
        unsafe {
            (
                libc::fcntl(file.as_raw_fd(), libc::F_GETFL) & libc::O_NONBLOCK != 0,
                libc::fcntl(file.as_raw_fd(), libc::F_GETFD) & libc::FD_CLOEXEC != 0,
            )
        }
    }

    #[test]
    fn what_blocks_and_what_does_not_stays_so() {
        for nonblocking in [0, libc::EFD_NONBLOCK] {
            let known = event_file(0, libc::EFD_CLOEXEC | nonblocking);
            let other = libc::EFD_NONBLOCK - nonblocking;
            silence(known.as_raw_fd()).unwrap();
            assert_eq!(flags(&known), (nonblocking != 0, true));
            let source = event_file(7, libc::EFD_CLOEXEC | other);
            replace(known.as_raw_fd(), source.as_raw_fd()).unwrap();
            assert_eq!(flags(&known), (nonblocking != 0, true));
            let mut read = 0u64;
            // SAFETY: eight bytes into a variable of this size.
            let count = unsafe { libc::read(known.as_raw_fd(), (&raw mut read).cast(), 8) };
            assert_eq!((count, read), (8, 7));
        }
    }

    #[test]
    fn a_number_that_is_none_is_said() {
        assert!(duplicate(-1).is_err());
        assert!(replace(-1, 0).is_err());
        assert!(silence(-1).is_err());
    }
}
