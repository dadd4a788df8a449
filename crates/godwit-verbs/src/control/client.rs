//! The mover's side.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;

use super::{Answer, MAX_LINE, NAME, Request, address};

/// Asks the process `pid`.
///
/// # Errors
/// If it does not use the library, or ends meanwhile.
pub fn ask(pid: u32, request: &Request) -> io::Result<Answer> {
    let mut stream = address(pid).and_then(|name| UnixStream::connect_addr(&name)).map_err(|error| {
        let hint = format!(
            "process {pid} does not answer: {error}; was it started with LD_PRELOAD=libgodwit_verbs.so, \
             and has it opened an RDMA device?"
        );
        io::Error::new(error.kind(), hint)
    })?;
    let mut line = serde_json::to_string(request)?;
    line.push('\n');
    stream.write_all(line.as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream.take(MAX_LINE)).read_line(&mut line)?;
    if line.is_empty() {
        return Err(io::Error::other(format!(
            "process {pid} hung up; only root and its own user may ask"
        )));
    }
    Ok(serde_json::from_str(&line)?)
}

/// The processes of this host that use the library and have opened a device.
///
/// # Errors
/// If the kernel's list of sockets cannot be read.
pub fn processes() -> io::Result<Vec<u32>> {
    let list = std::fs::read_to_string("/proc/net/unix")?;
    let mut found: Vec<u32> = list
        .lines()
        .filter_map(|line| {
            line.split_whitespace()
                .last()?
                .strip_prefix('@')?
                .strip_prefix(NAME)?
                .parse()
                .ok()
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}
