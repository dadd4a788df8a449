//! How a mover on the same host speaks with a process that uses the library: one request and one answer,
//! each a line of JSON, over an abstract Unix socket that is named after the process. Only root and the
//! process's own user are heard. Nothing stays connected, so that the process can be dumped.

mod client;
mod requests;
mod server;

pub use client::{ask, processes};
pub use requests::{Answer, Request, Status};
pub use server::start;

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;

/// Longest line in either direction, in bytes.
const MAX_LINE: u64 = 16 << 20;

/// What the socket's name begins with; the process's number follows.
const NAME: &str = "godwit-verbs-";

fn address(pid: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("{NAME}{pid}"))
}
