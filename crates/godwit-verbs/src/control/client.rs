//! The mover's side.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::{Answer, MAX_LINE, NAME, Request, address, files, other_end};
use crate::shim::HandedOver;

/// How long a process may take to read a request.
const PATIENCE: Duration = Duration::from_secs(10);

/// Asks the process `pid`.
///
/// # Errors
/// If it does not use the library, or ends meanwhile.
pub fn ask(pid: u32, request: &Request) -> io::Result<Answer> {
    let mut stream = connect(pid)?;
    let patience = request.patience();
    say(&mut stream, request)?;
    let text = rest(&mut stream, pid, String::new(), patience)?;
    Ok(serde_json::from_str(&text)?)
}

/// Asks the holder `pid` for everything that it has.
///
/// # Errors
/// Also if the holder refuses, or what it says does not go with the files that it gives.
pub(super) fn take_over(pid: u32) -> io::Result<HandedOver> {
    let mut stream = connect(pid)?;
    // What it holds lives in files that it opened; those of another user are not for this process.
    // SAFETY: takes and touches nothing.
    let own = unsafe { libc::geteuid() };
    if other_end(&stream).is_none_or(|who| who.uid != 0 && who.uid != own) {
        return Err(io::Error::other(format!("process {pid} is another user's")));
    }
    let patience = Request::HandOver.patience();
    say(&mut stream, &Request::HandOver)?;
    let Some((first, files)) = files::receive(&stream)? else {
        return Err(io::Error::other(format!("process {pid} hung up")));
    };
    let first = char::from(first).to_string();
    let text = rest(&mut stream, pid, first, patience)?;
    match serde_json::from_str(&text)? {
        Answer::HandedOver(mut handed) => {
            handed.descriptors = files;
            Ok(handed)
        }
        Answer::Error(error) => Err(io::Error::other(error)),
        _ => Err(io::Error::other("it gave an answer to another question")),
    }
}

fn connect(pid: u32) -> io::Result<UnixStream> {
    let stream = address(pid).and_then(|name| UnixStream::connect_addr(&name)).map_err(|error| {
        let hint = format!(
            "process {pid} does not answer: {error}; was it started with LD_PRELOAD=libgodwit_verbs.so, \
             and has it opened an RDMA device?"
        );
        io::Error::new(error.kind(), hint)
    })?;
    // Anybody may listen under this name; what a move does must not depend on what he says.
    let who = other_end(&stream).map(|who| who.pid);
    if who != i32::try_from(pid).ok() {
        return Err(io::Error::other(format!(
            "process {pid} does not answer: its socket's name is used by process {}",
            who.unwrap_or(0)
        )));
    }
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn say(stream: &mut UnixStream, request: &Request) -> io::Result<()> {
    stream.set_read_timeout(Some(request.patience()))?;
    let mut line = serde_json::to_string(request)?;
    line.push('\n');
    stream.write_all(line.as_bytes())
}

/// Reads the answer, of which `line` has been read already.
fn rest(
    stream: &mut UnixStream,
    pid: u32,
    mut line: String,
    patience: Duration,
) -> io::Result<String> {
    let heard = BufReader::new(stream.take(MAX_LINE)).read_line(&mut line);
    heard.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => io::Error::other(format!(
            "process {pid} gave no answer within {} s; is it stopped?",
            patience.as_secs()
        )),
        _ => error,
    })?;
    if line.is_empty() {
        return Err(io::Error::other(format!(
            "process {pid} hung up; only root and its own user may ask"
        )));
    }
    if !line.ends_with('\n') {
        return Err(io::Error::other(format!(
            "process {pid} ended its answer in the middle, after {} bytes",
            line.len()
        )));
    }
    Ok(line)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn another_process_under_the_name_is_not_believed() {
        // A number that no process can have: this process listens in its place.
        let pid = 0x7fff_ff00;
        let _listener = UnixListener::bind_addr(&address(pid).unwrap()).unwrap();
        let error = ask(pid, &Request::Status).unwrap_err().to_string();
        let own = format!("used by process {}", std::process::id());
        assert!(error.contains(&own), "{error}");
    }

    #[test]
    fn an_answer_that_is_cut_off_is_named() {
        let pid = std::process::id();
        let listener = UnixListener::bind_addr(&address(pid).unwrap()).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // The request is read first: a socket that is closed with something unread in it is reset.
            let mut request = String::new();
            BufReader::new(&stream).read_line(&mut request).unwrap();
            stream.write_all(b"\"don").unwrap();
        });
        let error = ask(pid, &Request::Status).unwrap_err().to_string();
        server.join().unwrap();
        assert!(error.contains("in the middle, after 4 bytes"), "{error}");
    }
}
