//! The protocol between a mover and a process on the same host that uses the library: one request and one answer, each
//! a line of JSON, over an abstract Unix socket that is named after the process. Only root and the process's own user
//! may ask. No connection stays open, so that the process can be dumped.

mod client;
mod files;
mod names;
mod requests;
mod server;

pub use client::{ask, ask_within, processes};
pub(crate) use files::MOST as MOST_FILES;
pub use requests::{Answer, Request, Status};
pub use server::start;

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Longest line in either direction, in bytes.
const MAX_LINE: u64 = 16 << 20;

/// Returns the credentials of the other end: the process that connected or began to listen.
fn other_end(stream: &UnixStream) -> Option<libc::ucred> {
    let mut who = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the option fills a ucred of the given size.
    let asked = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &raw mut size,
        )
    };
    (asked == 0).then_some(who)
}
