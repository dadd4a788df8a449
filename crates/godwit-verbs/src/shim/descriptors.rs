//! Descriptors with a fixed number for the application, over device descriptors that come and go.
//!
//! Each is an epoll(7) instance that contains the device's descriptor. An application that waits at the number, in
//! poll(2) or in an epoll instance of its own, waits at this instance. The instance stays when the device's descriptor
//! is replaced. A process image contains the instance and its present content, like any other descriptor.

use std::ffi::c_int;
use std::io;

/// Returns a new descriptor that is readable while one of its sources is readable.
pub(super) fn gathering() -> io::Result<c_int> {
    // SAFETY: takes no pointer.
    checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
}

/// Adds `source` to the descriptor `number`.
pub(super) fn put_into(number: c_int, source: c_int) -> io::Result<()> {
    let mut event = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: 0,
    };
    // SAFETY: the event lives through the call.
    checked(unsafe { libc::epoll_ctl(number, libc::EPOLL_CTL_ADD, source, &raw mut event) })
        .map(drop)
}

/// Removes `source` from the descriptor `number`.
pub(super) fn take_out_of(number: c_int, source: c_int) -> io::Result<()> {
    // SAFETY: this operation takes no event.
    let done =
        unsafe { libc::epoll_ctl(number, libc::EPOLL_CTL_DEL, source, std::ptr::null_mut()) };
    checked(done).map(drop)
}

/// Returns a new descriptor that [`set`] makes readable.
pub(super) fn signal() -> io::Result<c_int> {
    // SAFETY: takes no pointer.
    checked(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Makes a signal readable or not readable.
pub(super) fn set(signal: c_int, readable: bool) {
    let mut count = 1u64;
    // SAFETY: eight bytes from or to a variable of that size. The count is never near its limit, as it is set once.
    unsafe {
        if readable {
            libc::write(signal, (&raw const count).cast(), 8);
        } else {
            libc::read(signal, (&raw mut count).cast(), 8);
        }
    }
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

    fn owned(number: io::Result<c_int>) -> OwnedFd {
        // SAFETY: a new descriptor without another owner.
        unsafe { OwnedFd::from_raw_fd(number.unwrap()) }
    }

    /// Returns the number of events of the instance.
    fn events(instance: &OwnedFd) -> c_int {
        let mut into = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for as many events as are asked for.
        unsafe { libc::epoll_wait(instance.as_raw_fd(), &raw mut into, 1, 0) }
    }

    #[test]
    fn whoever_waits_at_the_number_waits_on_when_its_source_is_another() {
        let edge = libc::EPOLLIN | libc::EPOLLET;
        for triggered in [libc::EPOLLIN, edge] {
            let (number, application) = (owned(gathering()), owned(gathering()));
            let mut event = libc::epoll_event {
                events: triggered as u32,
                u64: 0,
            };
            // SAFETY: the event lives through the call.
            let added = unsafe {
                libc::epoll_ctl(
                    application.as_raw_fd(),
                    libc::EPOLL_CTL_ADD,
                    number.as_raw_fd(),
                    &raw mut event,
                )
            };
            assert_eq!(added, 0);
            for _ in 0..2 {
                let source = owned(signal());
                put_into(number.as_raw_fd(), source.as_raw_fd()).unwrap();
                assert_eq!(events(&application), 0);
                set(source.as_raw_fd(), true);
                assert_eq!(events(&application), 1);
                assert_eq!(events(&application), c_int::from(triggered != edge));
                set(source.as_raw_fd(), false);
                assert_eq!(events(&application), 0);
                take_out_of(number.as_raw_fd(), source.as_raw_fd()).unwrap();
            }
        }
    }

    #[test]
    fn a_number_that_is_none_is_said() {
        let number = owned(gathering());
        assert!(put_into(number.as_raw_fd(), -1).is_err());
        assert!(take_out_of(number.as_raw_fd(), -1).is_err());
    }
}
